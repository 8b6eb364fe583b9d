"""Shell commands in the trajectory's slot, and the processes they leave in the background."""

from __future__ import annotations

import asyncio
import contextlib

from pydantic import Field, field_validator

from atropos import wire
from atropos.errors import SandboxError
from atropos.tools.arguments import Arguments, Seconds, Text
from atropos.tools.base import Tool, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed.process import BUFFER_BYTES, dropped_before, process_reports, read
from atropos.tools.sandboxed.text import bounded_s, clip, command_result, decode, without_escapes


class TerminalArguments(Arguments):
    """Arguments of `terminal`."""

    command: Text = Field(description="shell command line, run by bash")
    timeout: Seconds | None = Field(default=None, description="seconds until the command is killed")
    workdir: Text | None = Field(default=None, description="directory to run in; default: the workspace")
    background: bool = Field(
        default=False, description="start it, answer at once with a session id for the process tool"
    )
    pty: bool = Field(default=False, description="run it on a terminal of its own, for programs that need one")
    check_interval: Seconds | None = Field(
        default=None, description="with background: seconds between reports of it, which come with later results"
    )

    @field_validator("command")
    @classmethod
    def _bounded(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("it is empty; write a shell command")
        if len(value) > wire.MAX_COMMAND_BYTES or len(value.encode("utf-8", "replace")) > wire.MAX_COMMAND_BYTES:
            raise ValueError(
                f"it is longer than {wire.MAX_COMMAND_BYTES:,} bytes; write a file with write_file and run that"
            )
        return value


class TerminalTool(Tool):
    """Run a shell command."""

    name = "terminal"
    description = (
        "Run a shell command in your workspace and see its output (stdout and stderr together) and exit code. "
        "Each command starts in a new shell; files stay. Use background=true for servers and long-running programs, "
        "and the process tool to manage them; with pty=true they run on a terminal of their own."
    )
    arguments = TerminalArguments
    toolsets = ("default", "terminal")

    async def run(self, arguments: TerminalArguments, scope: ToolScope) -> ToolResult:
        """Run it, or start it in the background."""
        if arguments.background:
            return await self._start(arguments, scope)
        limits = scope.limits
        timeout_s, note = bounded_s("timeout", arguments.timeout or limits.command_timeout_s, limits.max_timeout_s)
        result: wire.CommandResult
        if arguments.pty:
            result = await self._on_terminal(arguments, scope, timeout_s)
        else:
            result = await scope.run(
                wire.Exec(
                    command=arguments.command,
                    timeout_s=timeout_s,
                    workdir=arguments.workdir,
                    max_output_bytes=limits.max_output_bytes,
                )
            )
        return command_result(result, timeout_s=timeout_s, note=note)

    async def _on_terminal(
        self, arguments: TerminalArguments, scope: ToolScope, timeout_s: float
    ) -> wire.CommandResult:
        """Run it in the foreground on a terminal; its output is plain text."""
        started = await _started(arguments, scope)
        try:
            state = await read(scope, started.id, offset=0, wait_s=timeout_s, until="exit")
            timed_out = state.running
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await scope.slot.run(wire.ProcKill(id=started.id, signal="KILL"))
            raise
        if timed_out:
            await scope.run(wire.ProcKill(id=started.id, signal="KILL"))
            state = await read(scope, started.id, offset=0, wait_s=10, until="exit")
        text, clipped = clip(without_escapes(decode(state.output)), scope.limits.max_output_bytes)
        dropped = state.dropped_bytes + clipped
        return wire.CommandResult(
            exit_code=state.exit_code,
            output=f"{dropped_before(state)}{text}".encode(),
            timed_out=timed_out,
            truncated=bool(dropped),
            dropped_bytes=dropped,
            limit="time" if timed_out else state.limit or ("output" if dropped else None),
            duration_s=state.uptime_s,
        )

    async def _start(self, arguments: TerminalArguments, scope: ToolScope) -> ToolResult:
        state = await _started(arguments, scope)
        if arguments.check_interval is not None:
            process_reports(scope).intervals[state.id] = arguments.check_interval
        terminal = " on a terminal of its own" if arguments.pty else ""
        ignored = "; timeout does not apply to background processes" if arguments.timeout is not None else ""
        return ToolResult(
            success=True,
            output=f"started in the background{terminal} as session {state.id} (pid {state.pid}){ignored}; "
            f"use the process tool with session_id {state.id!r}",
            data={"session_id": state.id, "pid": state.pid},
        )


async def _started(arguments: TerminalArguments, scope: ToolScope) -> wire.ProcState:
    command, workdir, pty = arguments.command, arguments.workdir, arguments.pty
    return await scope.run(wire.ProcStart(command=command, workdir=workdir, pty=pty, buffer_bytes=BUFFER_BYTES))
