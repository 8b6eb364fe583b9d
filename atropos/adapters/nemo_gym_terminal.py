"""Terminals of slots as NeMo Gym's PTY sessions; its versions before 0.7 have none."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Self, cast, get_args

from nemo_gym.sandbox.providers.base import SandboxPtyError, SandboxPtySpec

from atropos.adapters.sharing import (
    BUFFER_BYTES,
    MAX_OUTPUT_BYTES,
    READ_WAIT_S,
    HeldSlot,
    infrastructure,
    shell_code,
)
from atropos.errors import SandboxError
from atropos.slots import Process, Signal

LAST_LINE_BYTES = 64
"""Longest line that `run_detached` prints after a command."""


class Terminal:
    """A program of a slot on a terminal of its own, or on pipes; a `SandboxPtySession`.

    Attributes:
        session_id: its name in the slot.
        mode: `pty` or `pipe`.
        closed: whether `close` has run.
    """

    def __init__(self, process: Process, mode: str) -> None:
        self.session_id = process.id
        self.mode: str | None = mode
        self.closed = False
        self._process = process

    @classmethod
    async def start(cls, held: HeldSlot, spec: SandboxPtySpec, env: Mapping[str, str]) -> Self:
        """Start the spec's command, or a shell.

        Raises:
            SandboxPtyError: it can't be started, or the slot failed.
        """
        with infrastructure(SandboxPtyError):
            try:
                process = await held.slot.start(
                    spec.command or ["/bin/bash"],
                    workdir=held.path(spec.cwd or "."),
                    env=env,
                    user=held.user if spec.user is None else str(spec.user),
                    pty=(spec.rows, spec.cols) if spec.pty else None,
                    split=not spec.pty,
                    hold=not spec.pty,
                    buffer_bytes=BUFFER_BYTES,
                )
            except OSError as error:
                raise SandboxPtyError(f"{spec.command or '/bin/bash'}: {error}") from error
        return cls(process, "pty" if spec.pty else "pipe")

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """What it printed since the last time, its errors as well on a terminal; empty once it has ended.

        Raises:
            TimeoutError: nothing came.
            SandboxPtyError: the slot failed, or output of a terminal came faster than it was read and is lost.
        """
        return await self._read(self._process, timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """As `read`, what it printed as errors on pipes; on a terminal nothing, once it has ended."""
        if self._process.errors is None:
            await self.wait_exit(timeout_s=timeout_s)
            return b""
        return await self._read(self._process.errors, timeout_s)

    async def _read(self, process: Process, timeout_s: float | None) -> bytes:
        with infrastructure(SandboxPtyError):
            async with asyncio.timeout(timeout_s):
                while not process.over:
                    wait_s = READ_WAIT_S if timeout_s is None else min(timeout_s, READ_WAIT_S)
                    data = await process.read(max_bytes=BUFFER_BYTES, wait_s=wait_s)
                    if lost := process.dropped_bytes:
                        raise SandboxPtyError(f"{lost:,} bytes of output are lost: {BUFFER_BYTES:,} are kept")
                    if data:
                        return data
        return b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data

    async def write(self, data: bytes) -> None:
        """Type on its terminal, or give it input."""
        with infrastructure(SandboxPtyError):
            try:
                await self._process.write(data)
            except OSError as error:
                raise SandboxPtyError(f"session {self.session_id}: {error}") from error

    async def resize(self, rows: int, cols: int) -> None:
        """Give its terminal another size."""
        with infrastructure(SandboxPtyError):
            await self._process.resize(rows, cols)

    async def send_signal(self, signal: str) -> None:
        """Signal all that it started; a name as `SIGTERM`.

        Raises:
            ValueError: a signal that can't be sent.
        """
        name = signal.removeprefix("SIG")
        if name not in get_args(Signal):
            raise ValueError(f"signal {signal!r}: one of {', '.join(f'SIG{one}' for one in get_args(Signal))}")
        with infrastructure(SandboxPtyError):
            await self._process.kill(cast("Signal", name))

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Its exit code, 128 + N when signal N ended it.

        Raises:
            TimeoutError: it still runs.
        """
        with infrastructure(SandboxPtyError):
            code = await self._process.wait(timeout_s)
        if code is None:
            raise TimeoutError(f"session {self.session_id} still runs after {timeout_s:g} s")
        return shell_code(code)

    async def run_detached(self, command: str, *, poll_interval_s: float = 15.0) -> tuple[bytes, int | None]:
        """Run a line in the session's shell. It holds no resource, so `poll_interval_s` is ignored.

        Returns:
            The output, and the exit code; None where the session ended.

        Raises:
            SandboxPtyError: as `read`, or there is more than 10 MiB of output.
        """
        del poll_interval_s
        mark = f"ATROPOS{uuid.uuid4().hex}"
        line = f"{{ eval {shlex.quote(command)}; }} </dev/null 2>&1; printf '%s%s:%s\\n' {mark[:9]} {mark[9:]} $?\n"
        await self.write(line.encode())
        last_line = re.compile(rf"{mark}:(\d+)\r?\n".encode())
        seen, searched = bytearray(), 0
        while (match := last_line.search(seen, searched)) is None:
            if len(seen) > MAX_OUTPUT_BYTES:
                raise SandboxPtyError(f"{command!r} has printed more than {MAX_OUTPUT_BYTES:,} bytes")
            if not (data := await self.read()):
                return bytes(seen), None
            searched = max(0, len(seen) - LAST_LINE_BYTES)  # it may come in two parts
            seen += data
        return bytes(seen[: match.start()]), int(match[1])

    async def close(self) -> None:
        """End it, with all that it started. Idempotent."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(SandboxError, OSError):
                await self._process.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        await self.close()
