"""Programs of a training run, started and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
START_S = 60.0
"""How long run-api may take to answer (it imports much)."""
END_S = 90.0
"""How long a program may take from SIGTERM to its end; then it is killed. An env waits up to 80 s for its engine to
remove containers."""

_libc = ctypes.CDLL(None)


@contextlib.asynccontextmanager
async def program(*argv: str, output: IO[bytes] | int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python ARGV` in the repository, in a session of its own; ended with SIGTERM, and with this process.

    Its errors go to `output` too, but not into a pipe.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=None if output in {None, asyncio.subprocess.PIPE} else asyncio.subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        await asyncio.shield(ended(process))


async def ended(process: asyncio.subprocess.Process) -> int:
    """The exit code, after SIGTERM and, where that is not enough, SIGKILL."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
    return await process.wait()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, below those that the kernel may give another program meanwhile."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 10_000 + secrets.randbelow(9_000)))
            return int(probe.getsockname()[1])


class PolicyServer(NamedTuple):
    """The running scripted policy; `ready` has its `base_url`, `model` and `tokenizer`."""

    ready: dict[str, Any]
    process: asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def policy(*flags: str) -> AsyncIterator[PolicyServer]:
    """`python -m examples.policy FLAGS` on a port of its own.

    Raises:
        RuntimeError: it ended at once; its own line says why.
    """
    async with program("-m", "examples.policy", *flags, output=asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        if not (line := await process.stdout.readline()):
            raise RuntimeError(f"the policy server {how(await process.wait())}; its own line stands above")
        yield PolicyServer(json.loads(line), process)


class RunApi(NamedTuple):
    """A running trajectory API."""

    url: str
    process: asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def run_api() -> AsyncIterator[RunApi]:
    """atroposlib's trajectory API on a port of its own.

    Raises:
        RuntimeError: it did not come up.
    """
    port = free_port()
    argv = ("-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    async with program(*argv, output=asyncio.subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(START_S):
                await _answers(url, process)
        except TimeoutError:
            raise RuntimeError(f"run-api did not answer within {START_S:g} s") from None
        yield RunApi(url, process)


async def _answers(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"run-api ended with {process.returncode}")


class Trainer:
    """The trainer's side of the trajectory API.

    Args:
        url: of run-api.
        batch_size: sequences of a batch.
        max_token_len: groups with a sequence of this length or more are thrown away by the env.
        steps: after so many batches the env ends.
    """

    def __init__(self, url: str, *, batch_size: int, max_token_len: int = 30_000, steps: int = 1_000_000) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(url)
        self._first: list[dict[str, Any]] | None = None
        self._facts = {
            "wandb_group": "none",
            "wandb_project": "none",
            "batch_size": batch_size,
            "max_token_len": max_token_len,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": steps,
        }

    async def __aenter__(self) -> Self:
        """Register; the first request for a batch lets envs start, and may get one that an earlier trainer left."""
        await self._answer("POST", "/register", json=self._facts)
        self._first = await self.batch()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def batch(self) -> list[dict[str, Any]] | None:
        """The groups of the next batch, or None while there is none."""
        first, self._first = self._first, None
        return first or (await self._answer("GET", "/batch"))["batch"] or None

    async def batches(self, *watched: asyncio.subprocess.Process) -> AsyncIterator[list[dict[str, Any]]]:
        """The batches, as they come.

        Raises:
            RuntimeError: one of the watched programs is over, so that none will come; or the API is.
        """
        while True:
            batch = await self.batch()
            if batch is not None:
                yield batch
                continue
            for process in watched:
                if process.returncode is not None:
                    raise RuntimeError(f"an env {how(process.returncode)}; its output says why")
            await asyncio.sleep(0.05)

    async def _answer(self, method: str, path: str, **options: Any) -> Any:
        try:
            async with self._session.request(method, path, **options) as answer:
                answer.raise_for_status()
                return await answer.json()
        except aiohttp.ClientError as error:
            raise RuntimeError(f"the trajectory API at {self.url} is gone ({type(error).__name__}: {error})") from error


def how(code: int) -> str:
    """How a program ended, in words, from `returncode`."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """The exit code of a program: its own, 1 after a RuntimeError or OSError (one line), or 128 + N after signal N.

    SIGTERM and Ctrl-C cancel the work once, and its clean-up is waited for; a second one changes nothing.
    """
    told: list[int] = []

    async def until_told() -> int:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if not told:
                task.cancel()
            told.append(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work()

    try:
        return asyncio.run(until_told())
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("interrupted; everything was ended", file=sys.stderr)
        return 128 + (told[0] if told else signal.SIGINT)
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def flags(prefix: str, values: dict[str, Any]) -> list[str]:
    """`--PREFIX.NAME VALUE` for each."""
    return [part for name, value in values.items() for part in (f"--{prefix}.{name}", str(value))]
