"""Programs of a slot: commands that are waited for, background processes and terminals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal

from atropos import wire
from atropos.errors import SandboxError
from atropos.slots.slot.arguments import check_seconds, named_if_wrong
from atropos.slots.slot.files import SlotFiles
from atropos.slots.slot.results import ExecResult, answered, file_error
from atropos.slots.slot.uploads import PIECE_BYTES

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
        # A byte and not 0: the wire asks for at least one. `offset` frees nothing that was not read.
        await self._ask(wire.ProcRead(id=self.id, offset=self._read, max_bytes=1))
        return self.exit_code

    @named_if_wrong
    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end.

        Returns:
            Its exit code; None when it still runs after `timeout_s`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + check_seconds("timeout_s", timeout_s)
        while self.exit_code is None:
            remaining_s = deadline - time.monotonic()
            # In slices: a call that waits for hours would outlive any connection's patience.
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


class SlotProcesses(SlotFiles):
    """The part of `Slot` that runs programs."""

    __slots__ = ()

    @named_if_wrong
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        split: bool = False,
        clean_env: bool = False,
        max_output_bytes: int | None = None,
        concurrent: bool = False,
    ) -> ExecResult:
        """Run a command in its own session and wait for its main process.

        Args:
            command: a line for bash, or a program and its arguments, which run without a shell; for a program that
                isn't there or may not be executed the result's `error` starts with `not_found` or `permission`.
            timeout_s: then the whole session is killed; None: the slot's wall-time limit.
            workdir: None: the profile's, else /workspace.
            env: added to the slot's environment.
            user: one of the slot's own users, as `name`, `uid`, `name:group` or `uid:gid`, with its groups, HOME, USER
                and LOGNAME; None: root. For one that the slot doesn't have, the result's `error` says so.
            stdin: what it reads, of any length: beyond 4 MiB it is a file of the slot's /tmp until the command has
                ended. None: nothing.
            split: give stdout and stderr apart as well.
            clean_env: start from the slot's first environment and PATH alone.
            max_output_bytes: keep less output than the slot's limit.
            concurrent: run it now, beside the slot's other calls, which don't wait for it; after those before it where
                `stdin` is longer than 4 MiB. The slot runs 64 of these at once; further ones wait. A `snapshot` or
                `view` waits until none runs.
        """
        data = stdin.encode() if isinstance(stdin, str) else stdin
        operation = wire.Exec(
            command=one_command(command),
            timeout_s=timeout_s,
            workdir=workdir,
            env=dict(env or {}),
            user=user,
            stdin=data,
            split=split,
            clean_env=clean_env,
            max_output_bytes=max_output_bytes,
            concurrent=concurrent,
        )
        large = data is not None and len(data) > PIECE_BYTES
        return ExecResult.of(await (self._run_on_file(operation) if large else self.run(operation)))

    async def _run_on_file(self, operation: wire.Exec) -> wire.OpResult:
        """Run a command whose stdin is too large for a call: it reads a file, which is removed when it has ended."""
        # A name that no program of the slot can have made ahead.
        path = f"/tmp/.stdin-{secrets.token_hex(8)}"
        assert operation.stdin is not None
        changes = {"command": reading(path, operation.command), "stdin": None}
        remove = wire.Exec(command=("rm", "-f", path), workdir="/", user="0:0", concurrent=operation.concurrent)
        try:
            result = await self._write(path, operation.stdin, user=operation.user)
            if not isinstance(result, wire.OpError):
                result = await self.run(operation.model_copy(update=changes))
            await self.run(remove)
        except asyncio.CancelledError:
            self.link.state.tasks.spawn(self._run_unless_over(remove), f"removal of {path} in {self.lease.slot}")
            raise
        return result

    async def _run_unless_over(self, operation: wire.Operation) -> None:
        with contextlib.suppress(SandboxError):
            await self.run(operation)

    @named_if_wrong
    async def start(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: tuple[int, int] | None = None,
        split: bool = False,
        hold: bool = False,
        buffer_bytes: int = 200_000,
        concurrent: bool = False,
    ) -> Process:
        """Start a background process, which runs until it ends, is killed or the lease ends.

        Args:
            command: as for `exec`.
            workdir: as for `exec`.
            env: as for `exec`.
            user: as for `exec`.
            pty: (rows, columns) of a terminal of its own; None: pipes, its output and errors in one.
            split: on pipes, its errors are read apart, from `Process.errors`.
            hold: it is kept until it is read to its end, or killed; on pipes it waits while half of `buffer_bytes`
                waits to be read: then nothing falls out.
            buffer_bytes: output kept until it is read; older output falls out and is counted.
            concurrent: as for `exec`.

        Raises:
            OSError: it can't be started; `FileNotFoundError`, `PermissionError` … where they apply.
        """
        rows, cols = pty or (24, 80)
        operation = wire.ProcStart(
            command=one_command(command),
            workdir=workdir,
            env=dict(env or {}),
            user=user,
            pty=pty is not None,
            split=split,
            hold=hold,
            rows=rows,
            cols=cols,
            buffer_bytes=buffer_bytes,
            concurrent=concurrent,
        )
        return Process(self.run, answered(await self.run(operation), wire.ProcState))

    async def processes(self) -> list[Process]:
        """All background processes of the lease, oldest first, ended ones included; each is read from its start.

        Raises:
            OSError: the slot refused.
        """
        listing = answered(await self.run(wire.ProcList()), wire.ProcListing)
        return [Process(self.run, state) for state in listing.processes]

    async def quiesce(self) -> int:
        """Kill every process in the slot; files stay. Returns how many there were."""
        return answered(await self.run(wire.Quiesce()), wire.Done, "/").count


def one_command(command: str | Sequence[str]) -> wire.CommandOrArgv:
    """A command as in the wire's messages."""
    return command if isinstance(command, str) else tuple(command)


def reading(path: str, command: str | Sequence[str]) -> wire.CommandOrArgv:
    """The command that runs another one with a file as its stdin."""
    if isinstance(command, str):
        # `exec` changes the shell's own input; a pipe would run the command in a subshell.
        return f"exec <{path}; {command}"
    return ("/bin/sh", "-c", f'exec <{path} "$@"', "sh", *command)
