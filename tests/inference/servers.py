"""The real servers, as processes with a log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from examples.serve.processes import free_port

CACHE = Path(os.environ.get("ATROPOS_INFERENCE", ""))
"""What `make test-inference` made: an environment with the servers, and the tiny model."""
MODEL = "tiny"
START_S = 600
_REQUEST = re.compile(r"Request (\S+) details: .*?prompt_token_ids: (\[[\d, ]*\])")
_RESPONSE = re.compile(r"Generated response (\S+) details: output_token_ids: (\[[\d, ]*\])")


class RealServer:
    """A running server."""

    def __init__(self, port: int, log: Path) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"
        self._log = log

    def sampled(self) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompt and sampled ids of each request, as vLLM's own log has them."""
        prompts: dict[str, tuple[int, ...]] = {}
        found = set()
        for line in self._log.read_text(errors="replace").splitlines():
            if request := _REQUEST.search(line):
                prompts[_bare(request[1])] = tuple(json.loads(request[2]))
            elif (response := _RESPONSE.search(line)) and (prompt := prompts.get(_bare(response[1]))):
                found.add((prompt, tuple(json.loads(response[2]))))
        return found


def _bare(request_id: str) -> str:
    """vLLM's completions number the prompts of a request."""
    return re.sub(r"-\d+$", "", request_id)


@contextlib.contextmanager
def _serving(argv: list[str], port: int, log: Path, **environment: str) -> Iterator[RealServer]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        server, until = RealServer(port, log), time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.root}/health", timeout=5):
                break
            assert process.poll() is None and time.monotonic() < until, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def vllm(log: Path, *flags: str) -> contextlib.AbstractContextManager[RealServer]:
    """`vllm serve` with these flags, and the tiny model in float32."""
    port = free_port()
    argv = [str(CACHE / "venv/bin/vllm"), "serve", str(CACHE / "model"), "--served-model-name", MODEL]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    argv += ["--enable-log-requests", "--enable-log-outputs", *flags]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default half of the memory
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "DEBUG",  # which has the tokens of each request
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /pause and the like
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return _serving(argv, port, log, **environment)
