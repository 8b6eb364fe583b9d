"""Programs of a slot that an agent of OpenAI's Agents SDK goes on speaking with."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

from agents.sandbox.errors import ExecTransportError, PtySessionNotFoundError
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    resolve_pty_write_yield_time_ms,
)

from atropos.adapters.sharing import BUFFER_BYTES, HeldSlot, shell_code
from atropos.errors import SandboxError
from atropos.event_loop import in_event_loop
from atropos.slots import Process

SIZE = (24, 80)
"""Rows and columns of a terminal, which the SDK doesn't name."""
START_YIELD_S, WRITE_YIELD_S = 10.0, 0.25
"""How long output is waited for where the SDK doesn't say, as by its own clients."""


class _Program:
    """A program, and output of it that was read in the middle of a character."""

    def __init__(self, process: Process, *, tty: bool) -> None:
        self.process = process
        self.tty = tty
        self._chunks: deque[bytes] = deque()

    async def collect(self, yield_time_ms: int, max_output_tokens: int | None) -> tuple[bytes, int | None, bool]:
        """Its output until it ends or the time is over, the number of tokens where it was cut, and whether it ended."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + yield_time_ms / 1000

        async def poll(_: float) -> None:
            if data := await self.process.read(max_bytes=BUFFER_BYTES, wait_s=max(0.0, ends - loop.time())):
                self._chunks.append(data)

        async def waited(_: float) -> None:
            """As `poll` has."""

        return await collect_pty_output(
            output_chunks=self._chunks,
            output_lock=asyncio.Lock(),
            output_notify=asyncio.Event(),
            is_done=lambda: self.process.over,
            yield_time_ms=yield_time_ms,
            max_output_tokens=max_output_tokens,
            poll_output=poll,
            wait_for_output=waited,
        )


class Terminals:
    """The programs of one session, by the numbers that the SDK's model knows them by."""

    def __init__(self, held: HeldSlot) -> None:
        self._held = held
        self._programs: dict[int, _Program] = {}

    @in_event_loop
    async def start(
        self,
        argv: Sequence[str],
        *,
        workdir: str,
        env: Mapping[str, str],
        user: str | None,
        tty: bool,
        yield_time_s: float | None,
        max_output_tokens: int | None,
    ) -> PtyExecUpdate:
        """Start a program and wait for what it prints.

        Raises:
            ExecTransportError: it can't be started, or there are 64.
            SandboxError: the infrastructure failed.
        """
        if len(self._programs) >= PTY_PROCESSES_MAX:
            raise ExecTransportError(command=argv, message=f"{PTY_PROCESSES_MAX} programs run: end one first")
        try:
            process = await self._held.slot.start(
                argv,
                workdir=workdir,
                env=env,
                user=user,
                pty=SIZE if tty else None,
                buffer_bytes=BUFFER_BYTES,
                concurrent=True,
            )
        except OSError as error:
            raise ExecTransportError(command=argv, message=str(error), cause=error, retryable=False) from error
        number = allocate_pty_process_id(set(self._programs))
        self._programs[number] = _Program(process, tty=tty)
        yield_ms = clamp_pty_yield_time_ms(round((START_YIELD_S if yield_time_s is None else yield_time_s) * 1000))
        return await self._update(number, yield_ms, max_output_tokens)

    @in_event_loop
    async def write(
        self, number: int, chars: str, yield_time_s: float | None, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Type on a program's terminal, and wait for what it prints.

        Raises:
            PtySessionNotFoundError: no such program.
            RuntimeError: it has no terminal.
            SandboxError: the infrastructure failed.
        """
        program = self._programs.get(number)
        if program is None:
            raise PtySessionNotFoundError(session_id=number)
        if chars:
            if not program.tty:
                raise RuntimeError("stdin is not available for this process")
            with contextlib.suppress(OSError):  # it has ended, as its output will say
                await program.process.write(chars)
        wanted_ms = round((WRITE_YIELD_S if yield_time_s is None else yield_time_s) * 1000)
        yield_ms = resolve_pty_write_yield_time_ms(yield_time_ms=wanted_ms, input_empty=not chars)
        return await self._update(number, yield_ms, max_output_tokens)

    async def _update(self, number: int, yield_ms: int, max_output_tokens: int | None) -> PtyExecUpdate:
        program = self._programs[number]
        output, tokens, ended = await program.collect(yield_ms, max_output_tokens)
        code = program.process.exit_code if ended else None
        if code is not None:
            self._programs.pop(number, None)
        return PtyExecUpdate(
            process_id=number if code is None else None,
            output=output,
            exit_code=None if code is None else shell_code(code),
            original_token_count=tokens,
        )

    @in_event_loop
    async def close(self) -> None:
        """End them all. Idempotent."""
        programs, self._programs = self._programs, {}
        for program in programs.values():
            with contextlib.suppress(SandboxError, OSError):
                await program.process.kill()
