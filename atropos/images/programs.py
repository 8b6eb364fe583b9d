"""The programs that an image store runs, each bounded and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import isal

import atropos
from atropos.errors import ImageUnavailable
from atropos.images.manifests import MAX_JSON_BYTES

SAID_BYTES = 4096
CHUNK_BYTES = 1 << 18
KILLED_S = 2.0
"""How long a killed program is waited for."""


async def run_module(module: ModuleType, what: str, *arguments: object, folder: Path, deadline_s: float) -> Any:
    """Run one of the programs that read what strangers sent; its result."""
    output = await run(module_command(module, *arguments), what, folder=folder, deadline_s=deadline_s)
    return json.loads(output.splitlines()[-1])


def module_command(module: ModuleType, *arguments: object) -> list[str]:
    """How one of these programs is started: it sees this package and isal's, and no other site-packages."""
    # -S leaves out site-packages, where whatever is installed could be imported (and `.pth` files would run); -I the
    # environment's PYTHON* and the current folder.
    paths = dict.fromkeys(
        os.path.dirname(os.path.dirname(os.path.abspath(str(each.__file__)))) for each in (atropos, isal)
    )
    code = f"import sys; sys.path[:0] = {[*paths]}; from {module.__name__} import main; sys.exit(main())"
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


async def run(program: list[str], what: str, *, folder: Path, deadline_s: float) -> str:
    """Run a program to its end; its output.

    Args:
        program: with its arguments.
        what: what it does, for errors.
        folder: what it writes to.
        deadline_s: longest it may take, in seconds.

    Raises:
        ImageUnavailable: it failed or took too long; with its last words.
    """
    process = await _start(program, asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stderr is not None
    # Both at once: a program that fills the one pipe while the other is read would wait forever.
    outputs = asyncio.gather(_head(process.stdout), _tail(process.stderr))
    try:
        async with within(deadline_s, what):
            output, errors = await outputs
            # After the outputs: they end with the last descriptor, be it a child's of the program.
            code = await process.wait()
    finally:
        await _end(process)
        outputs.cancel()
    if code != 0:
        raise _failure(what, folder, code, errors)
    return output.decode(errors="replace")


@contextlib.asynccontextmanager
async def streamed(program: list[str], what: str, *, folder: Path) -> AsyncGenerator[AsyncIterator[bytes]]:
    """A program's output as it comes; it is killed at the end. Args: as for `run`.

    Raises:
        ImageUnavailable: while it is read: it failed; with its last words.
    """
    process = await _start(program, asyncio.subprocess.DEVNULL)

    async def chunks() -> AsyncIterator[bytes]:
        assert process.stdout is not None
        assert process.stderr is not None
        # stderr is read only afterwards: these programs write a line or a traceback there, which fits into a pipe.
        while chunk := await process.stdout.read(CHUNK_BYTES):
            yield chunk
        errors = await _tail(process.stderr)
        if code := await process.wait():
            raise _failure(what, folder, code, errors)

    try:
        yield chunks()
    finally:
        await _end(process)


class Worker:
    """One of the programs that read what strangers sent, while it answers orders with lines of JSON.

    Args:
        process: the program.
        folder: what it writes to.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls,
        module: ModuleType,
        *arguments: object,
        folder: Path,
        stdin: int = asyncio.subprocess.PIPE,
        passed: tuple[int, ...] = (),
    ) -> AsyncGenerator[Self]:
        """One that is killed at the end.

        Args:
            module: the program.
            arguments: its own.
            folder: what it writes to.
            stdin: what its orders come from, if not from `order`.
            passed: descriptors that it has, too.
        """
        process = await _start(module_command(module, *arguments), stdin, passed)
        try:
            yield cls(process, folder)
        finally:
            await _end(process)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    def order(self, line: object) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def answer(self, what: str) -> Any:
        """What it writes next; `what` it does, for errors.

        Raises:
            ImageUnavailable: it failed; with its last words.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = await self._process.stdout.readline()
        # The end of its output, perhaps within a line: it was killed, or said why on stderr.
        if not line.endswith(b"\n"):
            errors = await _tail(self._process.stderr)
            raise _failure(what, self._folder, await self._process.wait(), errors)
        return json.loads(line)


@contextlib.asynccontextmanager
async def within(seconds: float, what: str) -> AsyncGenerator[None]:
    """Within, at most so many seconds pass.

    Raises:
        ImageUnavailable: they have.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ImageUnavailable(f"{what}: not done within {seconds:g} s") from None


async def _start(program: list[str], stdin: int, passed: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        # PR_SET_PDEATHSIG (prctl(2)) by a program, as `preexec_fn` would keep Python from using vfork.
        *("setpriv", "--pdeathsig", "KILL"),  # nothing writes on after a server that was killed
        *program,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # A group of its own, for killpg: zstd is a child of these programs.
        start_new_session=True,
        # The longest line, too, which `readline` refuses beyond it.
        limit=CHUNK_BYTES,
        pass_fds=passed,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Not left as a zombie by a cancellation. A call that nothing ends, as a long syncfs(2), outlasts the kill.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                await process.wait()


def _failure(what: str, folder: Path, code: int, errors: str) -> ImageUnavailable:
    # `cp` and `sync` have no such exit code.
    if code == errno.ENOSPC or os.strerror(errno.ENOSPC) in errors:
        return ImageUnavailable(f"{what}: the disk of {folder} is full")
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return ImageUnavailable(f"{what}: {lines[-1][:1000] if lines else f'exit code {code}'}")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all."""
    # In the same folder, as a rename is atomic within one file system alone (rename(2)); other servers write there,
    # too.
    part = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    part.write_bytes(data)
    part.replace(path)


async def _head(stream: asyncio.StreamReader) -> bytes:
    """The first `MAX_JSON_BYTES`; the rest is read, too, since a program waits until it is."""
    head = bytearray()
    while chunk := await stream.read(1 << 16):
        head += chunk[: MAX_JSON_BYTES - len(head)]
    return bytes(head)


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while chunk := await stream.read(SAID_BYTES):
        tail = (tail + chunk)[-SAID_BYTES:]
    return tail.decode(errors="replace")
