"""Background processes in the trajectory's slot: their output, input and end."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

from pydantic import Field

from atropos import wire
from atropos.tools.arguments import Arguments, Seconds
from atropos.tools.base import Tool, ToolError, ToolScope, ToolState
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed.text import bounded_s, clip, decode, plural, shown, unfinished, without_escapes

BUFFER_BYTES = 200_000
"""Latest output of a background process that is kept; the dropped bytes are counted."""


class UnknownSession(ToolError):
    """The slot has no such background process, or no longer: of those that have ended it keeps the latest."""


class ProcessReports(ToolState):
    """What the model has seen of the background processes, and which of them are reported with other calls' results."""

    def __init__(self) -> None:
        self.seen = Counter[str]()
        """Bytes of each process's output."""
        self.intervals: dict[str, float] = {}
        """Seconds between the reports of a process."""
        self._due: dict[str, float] = {}

    async def after_call(self, result: ToolResult, scope: ToolScope) -> ToolResult:
        """Add a report of the processes whose check is due."""
        now = asyncio.get_running_loop().time()
        reports: list[str] = []
        for session_id, interval_s in list(self.intervals.items()):
            if now < self._due.setdefault(session_id, now + interval_s):
                continue
            self._due[session_id] = now + interval_s
            # One byte: it is the state and the count that are asked for.
            state = await scope.slot.run(wire.ProcRead(id=session_id, offset=0, max_bytes=1))
            if isinstance(state, wire.ProcState):
                new = state.total_bytes - self.seen[session_id]
                reports.append(f"[session {session_id}: {_state(state)}, {plural(new, 'new byte')} of output]")
                if state.running:
                    continue
            # Ended, or forgotten by the slot: this was its last report.
            del self.intervals[session_id]
        if not reports:
            return result
        return result.model_copy(update={"output": "\n".join([result.output, *reports]).lstrip("\n")})


def process_reports(scope: ToolScope) -> ProcessReports:
    """The trajectory's `ProcessReports`."""
    return scope.get_state("process", ProcessReports)


Action = Literal["list", "poll", "log", "wait", "kill", "write", "submit", "close"]


class ProcessArguments(Arguments):
    """Arguments of `process`."""

    action: Action = Field(
        description="list: all sessions; poll: state and new output; log: last lines of output; "
        "wait: until it ends (later calls wait too; use poll to work meanwhile); "
        "kill: end it; write: send data as it is; submit: send data and Enter; close: end its input"
    )
    session_id: str | None = Field(default=None, description="from terminal(background=true); not for list")
    data: str | None = Field(default=None, description="for write and submit")
    timeout: Seconds | None = Field(default=None, description="seconds, for wait")
    lines: int | None = Field(default=None, ge=1, le=100_000, description="for log: how many of the last lines")


class ProcessTool(Tool):
    """Manage background processes."""

    name = "process"
    description = (
        "Manage the processes that terminal(background=true) started: list them, poll one for new output, see the last "
        "lines of its log, wait for it to end, write to its input, or kill it."
    )
    arguments = ProcessArguments
    toolsets = ("default", "terminal", "process")

    async def run(self, arguments: ProcessArguments, scope: ToolScope) -> ToolResult:
        """Do the action."""
        action, session_id = arguments.action, arguments.session_id
        if action == "list":
            return await self._list(scope)
        if not session_id:
            listing: wire.ProcListing = await scope.run(wire.ProcList())
            raise ToolError(f"process: action {action!r} needs session_id; {_sessions(listing)}")
        if action == "write" and arguments.data is None:
            raise ToolError("process: action 'write' needs data, the text to send")
        if action == "poll":
            return self._report(await self._unseen(session_id, scope), scope, "no new output")
        if action == "log":
            return await self._log(session_id, arguments.lines or 200, scope)
        if action == "wait":
            return await self._wait(session_id, arguments.timeout, scope)
        if action == "kill":
            return await self._kill(session_id, scope)
        return await self._write(session_id, arguments, scope)

    async def _list(self, scope: ToolScope) -> ToolResult:
        listing: wire.ProcListing = await scope.run(wire.ProcList())
        rows = [
            f"{one.id}  {_state(one)}  {one.uptime_s:.0f} s  {plural(one.total_bytes, 'byte')} of output  "
            f"{clip(one.command, 200)[0]}"
            for one in listing.processes
        ]
        data: dict[str, object] = {"processes": [_data(one) for one in listing.processes]}
        return ToolResult(success=True, output="\n".join(rows) or "no background processes", data=data)

    async def _unseen(self, session_id: str, scope: ToolScope, wait_s: float = 0) -> wire.ProcState:
        """Output that the model has not seen, read at once or at the process's end."""
        seen = process_reports(scope).seen[session_id]
        return await read(scope, session_id, offset=seen, max_bytes=scope.limits.max_output_bytes, wait_s=wait_s)

    async def _log(self, session_id: str, wanted: int, scope: ToolScope) -> ToolResult:
        state = await read(scope, session_id, offset=0)
        output, left_out = _text(state)
        lines = output.splitlines(keepends=True)
        shown = lines[-wanted:]
        text, clipped = clip("".join(shown), scope.limits.max_output_bytes)
        dropped = state.dropped_bytes + left_out + clipped
        before = f"[the last {plural(len(shown), 'line')} of {len(lines):,} kept"
        before += f"; {plural(state.dropped_bytes, 'byte')} before were dropped]\n" if state.dropped_bytes else "]\n"
        return ToolResult(
            success=True,
            output=f"{_head(state)}\n{before if len(shown) < len(lines) or state.dropped_bytes else ''}{text}",
            truncated=bool(dropped),
            dropped_bytes=dropped,
            data=_data(state),
        )

    async def _wait(self, session_id: str, timeout_s: float | None, scope: ToolScope) -> ToolResult:
        most_s = scope.limits.max_wait_s
        wait_s, cut = bounded_s("the wait of", timeout_s or most_s, most_s)
        state = await self._unseen(session_id, scope, wait_s)
        running = f"still running after {wait_s:g} s" if state.running else ""
        note = "\n".join(f"[{part}]" for part in (running, cut) if part)
        return self._report(state, scope, "no new output", note)

    async def _kill(self, session_id: str, scope: ToolScope) -> ToolResult:
        await read(scope, session_id, offset=0, max_bytes=1)  # whether there is such a session
        await scope.run(wire.ProcKill(id=session_id, signal="TERM"))
        offset = process_reports(scope).seen[session_id]
        # KILL follows TERM in the slot, long before this bound.
        state = await read(scope, session_id, offset=offset, wait_s=min(30, scope.limits.max_wait_s))
        return self._report(state, scope, "", "" if not state.running else "[it has not ended yet; poll it]")

    async def _write(self, session_id: str, arguments: ProcessArguments, scope: ToolScope) -> ToolResult:
        state = await read(scope, session_id, offset=0, max_bytes=1)
        if not state.running:
            raise ToolError(f"process: session {session_id} has ended ({_state(state)}); it reads no more input")
        data = (arguments.data or "").encode("utf-8", "replace")
        if len(data) > wire.MAX_COMMAND_BYTES:
            raise ToolError(f"process: data is longer than {wire.MAX_COMMAND_BYTES:,} bytes; write a file instead")
        if arguments.action == "submit":
            data += b"\r" if state.pty else b"\n"  # Enter on a terminal is a carriage return
        end = arguments.action == "close"
        if end and state.pty:
            data, end = data + b"\x04", False  # the end of a terminal's input is Ctrl-D
        await scope.run(wire.ProcWrite(id=session_id, data=data, eof=end))
        done = "closed its input" if arguments.action == "close" else f"sent {plural(len(data), 'byte')}"
        return ToolResult(success=True, output=f"{done}; poll it to see the answer", data={"session_id": session_id})

    def _report(self, state: wire.ProcState, scope: ToolScope, nothing: str, note: str = "") -> ToolResult:
        seen = process_reports(scope).seen
        end = state.offset + len(state.output)
        unread = state.total_bytes - end
        # Half of a character stays for the next read; at the end it is shown as it is.
        if (held := unfinished(state.output)) and (state.running or unread):
            state, end = state.model_copy(update={"output": state.output[:-held]}), end - held
        seen[state.id] = end
        more = f"\n[{plural(unread, 'more byte')}; poll again]" if unread > 0 else ""
        text, left_out = _text(state) if state.output else (nothing, 0)
        parts = [_head(state), f"{dropped_before(state)}{text}{more}".rstrip("\n"), note]
        return ToolResult(
            success=True,
            output="\n".join(part for part in parts if part),
            exit_code=state.exit_code,
            limit=state.limit,
            truncated=state.dropped_bytes + left_out > 0,
            dropped_bytes=state.dropped_bytes + left_out,
            data=_data(state),
        )


async def read(
    scope: ToolScope,
    session_id: str,
    *,
    offset: int,
    max_bytes: int = BUFFER_BYTES,
    wait_s: float = 0,
    until: Literal["exit", "output", "quiet"] = "exit",
    quiet_s: float = 0.3,
) -> wire.ProcState:
    """A background process's state and output.

    Raises:
        UnknownSession: there is no such session; the message lists the sessions.
        ToolError: it can't be read.
    """
    operation = wire.ProcRead(
        id=session_id, offset=offset, max_bytes=max_bytes, wait_s=wait_s, until=until, quiet_s=quiet_s
    )
    result = await scope.slot.run(operation)
    if isinstance(result, wire.OpError):
        if result.error != "unknown_process":
            raise ToolError(result.message, limit=result.limit)
        listing: wire.ProcListing = await scope.run(wire.ProcList())
        raise UnknownSession(f"process: there is no session {session_id[:100]!r}; {_sessions(listing)}")
    assert isinstance(result, wire.ProcState)
    return result


def _text(state: wire.ProcState) -> tuple[str, int]:
    """Output as text, and how many bytes of it were left out."""
    return (without_escapes(decode(state.output)), 0) if state.pty else shown(state.output)


def dropped_before(state: wire.ProcState) -> str:
    """A line that says what is missing before a process's output; empty: nothing."""
    return f"[{plural(state.dropped_bytes, 'byte')} before this were dropped]\n" if state.dropped_bytes else ""


def _state(state: wire.ProcState) -> str:
    if state.running:
        return "running"
    if state.exit_code is None:
        return "ended"
    return f"killed by signal {-state.exit_code}" if state.exit_code < 0 else f"exit code {state.exit_code}"


def _head(state: wire.ProcState) -> str:
    limit = f", stopped by the {state.limit} limit" if state.limit else ""
    return f"[session {state.id}: {_state(state)}{limit}, {state.uptime_s:.1f} s]"


def _data(state: wire.ProcState) -> dict[str, object]:
    return {
        "session_id": state.id,
        "pid": state.pid,
        "running": state.running,
        "exit_code": state.exit_code,
        "total_bytes": state.total_bytes,
    }


def _sessions(listing: wire.ProcListing) -> str:
    known = ", ".join(f"{one.id} ({_state(one)})" for one in listing.processes)
    return f"the sessions are: {known}" if known else "there are no sessions; terminal(background=true) starts one"
