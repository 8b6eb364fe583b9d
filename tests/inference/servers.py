"""The real servers, as processes with a log."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from examples.serve.processes import free_port

CACHE = Path(os.environ.get("ATROPOS_INFERENCE", ""))
"""What `make test-inference` made: an environment with the servers, and the tiny model."""
MODEL = "tiny"
START_S = 900
JSON = {"Content-Type": "application/json"}
LLAMA = os.environ.get("ATROPOS_LLAMA_SERVER") or shutil.which("llama-server")
"""llama.cpp's server, which no package index has as a binary."""
_REQUEST = re.compile(r"Request (\S+) details: .*?prompt_token_ids: (\[[\d, ]*\])")
_RESPONSE = re.compile(r"Generated response (\S+) details: output_token_ids: (\[[\d, ]*\])")


class RealServer:
    """A running server."""

    def __init__(self, port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._process = process
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"
        self._log = log

    def post(self, path: str, body: dict[str, object] | None = None) -> object:
        """Ask it for what its operator may ask."""
        request = urllib.request.Request(f"{self.root}{path}", json.dumps(body or {}).encode(), JSON, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def count(self, line: str) -> int:
        """How often its log has this text, as of requests."""
        return self._log.read_text(errors="replace").count(line)

    def running_requests(self) -> float:
        """How many requests vLLM works on, by its metrics."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    def kill(self) -> None:
        """End it at once, as if its machine had failed."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def sampled(self) -> Sampled:
        """What vLLM's own log has."""
        prompts: dict[str, tuple[int, ...]] = {}
        found: Sampled = Sampled(set)
        for line in self._log.read_text(errors="replace").splitlines():
            if request := _REQUEST.search(line):
                prompts[_bare(request[1])] = tuple(json.loads(request[2]))
            elif (response := _RESPONSE.search(line)) and (prompt := prompts.get(_bare(response[1]))):
                found[prompt].add(tuple(json.loads(response[2])))
        return found


class Sampled(defaultdict[tuple[int, ...], set[tuple[int, ...]]]):
    """Sampled ids by prompt."""

    def holds(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> bool:
        """Whether ids were sampled for a prompt: at once, or until an abort, and the others after these."""
        return any(
            ids[: len(had)] == had and (had == ids or self.holds(prompt + had, ids[len(had) :]))
            for had in self.get(prompt, ())
            if had
        )


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
        server, until = RealServer(port, log, process), time.monotonic() + START_S
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


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default half of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "DEBUG",  # which has the tokens of each request
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /pause and the like
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm(log: Path, *flags: str, model: str = "model") -> contextlib.AbstractContextManager[RealServer]:
    """`vllm serve` with these flags, and a tiny model in float32."""
    port = free_port()
    argv = [str(CACHE / "venv/bin/vllm"), "serve", str(CACHE / model), "--served-model-name", MODEL]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    argv += ["--enable-log-requests", "--enable-log-outputs", *flags]
    return _serving(argv, port, log, **ENVIRONMENT)


def atroposlib(log: Path) -> contextlib.AbstractContextManager[RealServer]:
    """atroposlib's own server, with the imports and the parser of arguments that this vLLM wants."""
    found = importlib.util.find_spec("example_trainer")  # which imports torch
    assert found is not None
    assert found.origin is not None
    name, port = "vllm_api_server.py", free_port()
    text, script = Path(found.origin).with_name(name).read_text(), log.with_name(name)
    for was, became in {
        "vllm.entrypoints.launcher ": "vllm.entrypoints.launchers.launcher ",
        "vllm.entrypoints.utils ": "vllm.entrypoints.serve.utils.api_utils ",
        "= FlexibleArgumentParser()": '= FlexibleArgumentParser(conflict_handler="resolve")',
    }.items():
        assert was in text
        text = text.replace(was, became)
    script.write_text(text)
    argv = [str(CACHE / "venv/bin/python"), str(script), "--model", str(CACHE / "model"), "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    return _serving(argv, port, log, **ENVIRONMENT, LOGDIR=str(log.parent))


def transformers(log: Path) -> contextlib.AbstractContextManager[RealServer]:
    """`transformers serve`, which takes a model's folder as its name."""
    port = free_port()
    argv = [str(CACHE / "venv/bin/transformers"), "serve", "--device", "cpu", "--host", "127.0.0.1"]
    argv += ["--port", str(port)]
    return _serving(argv, port, log, **ENVIRONMENT)


def llama(
    log: Path, *flags: str, model: str = "model", port: int | None = None
) -> contextlib.AbstractContextManager[RealServer]:
    """llama.cpp's server with a tiny model; what it keeps of earlier tokens is in float32 too, by default in float16."""
    assert LLAMA is not None
    gguf, port = log.with_suffix(".gguf"), port or free_port()
    if not gguf.exists():
        argv = [CACHE / "venv/bin/python", Path(__file__).with_name("gguf_model.py"), CACHE / model, gguf]
        subprocess.run(argv, check=True)
    argv = [LLAMA, "-m", str(gguf), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["-c", "32768", "-np", "8", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", *flags]
    return _serving(argv, port, log)
