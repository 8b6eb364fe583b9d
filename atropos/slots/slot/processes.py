"""Background processes and terminals of a slot, as their starter sees them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal

from atropos import wire
from atropos.slots.slot.arguments import named_if_wrong
from atropos.slots.slot.results import answered, file_error

WRITE_BYTES = 256 * 1024
"""Input travels in pieces of this size: the slot queues 1 MiB for a process that doesn't read."""
FULL_WAIT_S = 0.05
"""Pause before more input is offered to a process whose queue is full."""
READ_WAIT_S = 30.0
"""Longest wait of one request while output is followed."""

RunOperation = Callable[[wire.Operation], Awaitable[wire.OpResult]]
Signal = Literal["TERM", "KILL", "INT", "HUP", "QUIT", "USR1", "USR2"]


class Process:
    """A background process of a slot, perhaps on a terminal; `Slot.start` and `Slot.processes` give one.

    Methods raise what the slot's do, and `OSError` when the slot refuses: the process is forgotten, its input is
    closed.

    Attributes:
        id: its name in the slot.
        pid: its process id in the slot.
        exit_code: as last seen: None while it runs, -N when signal N ended it.
        dropped_bytes: output that fell out of the buffer before it was read.
        errors: what it prints as errors, where that is kept apart: read like another process's output.
    """

    def __init__(self, run: RunOperation, state: wire.ProcState) -> None:
        self._run = run
        self._read, self._total = 0, state.total_bytes
        self.id, self.pid = state.id, state.pid
        self.exit_code = state.exit_code
        self.dropped_bytes = 0
        self.errors = (
            None
            if state.errors is None
            else Process(run, state.model_copy(update={"id": state.errors, "errors": None}))
        )

    def __repr__(self) -> str:
        state = "running" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"<Process {self.id} pid {self.pid}: {state}>"

    @property
    def over(self) -> bool:
        """Whether it has ended, and all that it printed was read."""
        return self.exit_code is not None and self._read >= self._total

    async def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        await self._ask(wire.ProcRead(id=self.id, offset=self._read, max_bytes=1))
        return self.exit_code

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end.

        Returns:
            Its exit code; None when it still runs after `timeout_s`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.exit_code is None:
            remaining_s = deadline - time.monotonic()
            wait_s = min(READ_WAIT_S, max(0.0, remaining_s))
            await self._ask(wire.ProcRead(id=self.id, offset=self._read, max_bytes=1, wait_s=wait_s))
            if remaining_s <= READ_WAIT_S:
                break
        return self.exit_code

    @named_if_wrong
    async def read(self, *, max_bytes: int = 200_000, wait_s: float = 0.0) -> bytes:
        """What it wrote since the last `read`; empty when nothing came within `wait_s`, or it has ended."""
        operation = wire.ProcRead(id=self.id, offset=self._read, max_bytes=max_bytes, wait_s=wait_s, until="output")
        state = await self._ask(operation)
        self.dropped_bytes += state.dropped_bytes
        self._read = state.offset + len(state.output)
        return state.output

    async def output(self) -> AsyncIterator[bytes]:
        """Its output as it comes, until it has ended and all is read."""
        while not self.over:
            if data := await self.read(wait_s=READ_WAIT_S):
                yield data

    @named_if_wrong
    async def write(self, data: bytes | str) -> None:
        """Give it input, or type on its terminal; waits while it doesn't read."""
        content = data.encode() if isinstance(data, str) else data
        for start in range(0, len(content), WRITE_BYTES):
            piece = content[start : start + WRITE_BYTES]
            while not await self._write(wire.ProcWrite(id=self.id, data=piece)):  # noqa: ASYNC110
                await asyncio.sleep(FULL_WAIT_S)

    async def close_stdin(self) -> None:
        """End its input, once what was written is read; on a terminal as ^D does."""
        await self._write(wire.ProcWrite(id=self.id, eof=True))

    @named_if_wrong
    async def resize(self, rows: int, cols: int) -> None:
        """Give its terminal another size."""
        await self._write(wire.ProcWrite(id=self.id, rows=rows, cols=cols))

    @named_if_wrong
    async def kill(self, signal: Signal = "KILL") -> None:
        """Signal its whole session; `TERM` is followed by `KILL` five seconds later."""
        await self._ask(wire.ProcKill(id=self.id, signal=signal))

    async def _write(self, operation: wire.ProcWrite) -> bool:
        """Whether its queue had room."""
        result = await self._run(operation)
        if isinstance(result, wire.OpError):
            if result.error == "limit":
                return False
            raise file_error(result, self.id)
        return True

    async def _ask(self, operation: wire.ProcRead | wire.ProcKill) -> wire.ProcState:
        state = answered(await self._run(operation), wire.ProcState)
        self.exit_code, self._total = state.exit_code, state.total_bytes
        return state


def one_command(command: str | Sequence[str]) -> wire.CommandOrArgv:
    """A command as in the wire's messages."""
    return command if isinstance(command, str) else tuple(command)


def reading(path: str, command: str | Sequence[str]) -> wire.CommandOrArgv:
    """The command that runs another one with a file as its stdin."""
    if isinstance(command, str):
        return f"exec <{path}; {command}"
    return ("/bin/sh", "-c", f'exec <{path} "$@"', "sh", *command)
