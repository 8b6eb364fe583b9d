"""A bash on a terminal of a slot; each prompt says which line it follows and with which exit code that line ended."""

from __future__ import annotations

import asyncio
import codecs
import io
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionNotInitializedError,
)
from swerex.runtime.abstract import BashAction, BashInterruptAction, BashObservation, CreateBashSessionRequest

from atropos.adapters.sharing import BUFFER_BYTES, READ_WAIT_S, HeldSlot
from atropos.slots.slot.processes import Process

SHELL_START_S = 30.0
"""How long a shell may take to its first prompt; `startup_timeout` is the time of `startup_source` alone."""
PROMPT_WAIT_S = 5.0
"""How long an idle shell may take to answer."""
RETRY_PAUSE_S = 0.2
"""Between two interrupts."""
MAX_OUTPUT_CHARS = 10_000_000
"""Output of an action that is kept: its end."""
OVERLAP_CHARS = 4096
"""Longest match that may be split between two reads."""
ESCAPES = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
INTERRUPT, SUSPEND = "\x03", "\x1a"
KILL_SUSPENDED = "sh -c 'kill -9 -$1; while kill -0 -$1; do sleep 0.02; done' sh $(jobs -p %%) 2>/dev/null"
"""It waits for the end of the job's process group, so that bash says "Killed" and not "Stopped" once more."""


@dataclass(frozen=True)
class PromptMatch:
    """Why waiting ended.

    Attributes:
        before: output up to the match.
        string: the expected pattern, or the prompt.
        exit_code: of the line before the prompt; None: a pattern matched.
    """

    before: str
    string: str
    exit_code: int | None


class BashSession:
    """One shell. A command is a file that the shell sources, so that it may have any length and any number of lines."""

    def __init__(self, held: HeldSlot, process: Process) -> None:
        self._held = held
        self._process = process
        self._key = secrets.token_hex(8)
        self._file = f"/tmp/.atropos-session-{self._key}"
        self._prompt = re.compile(rf"<{self._key}:(\d*):(\d+)>")
        # a command may leave the terminal as it likes (`reset`, a killed editor): the next line that is typed shall
        # show nowhere
        shown = f"<{self._key}:$ATROPOS_LINE:${{ATROPOS_CODE-$?}}>"
        prompt = f"{{ command -p stty sane -echo; PS1='{shown}' PS2= PS0=; }} 2>/dev/null"
        self._set_prompt = f"unset PROMPT_COMMAND; export PROMPT_COMMAND={shlex.quote(prompt)}"
        self._line = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._searched = io.StringIO()
        """Output in which no match begins; `_pending` follows it."""
        self._pending = ""
        self._dropped = 0

    @classmethod
    async def start(cls, held: HeldSlot, request: CreateBashSessionRequest) -> tuple[BashSession, str]:
        """A shell that has read its start-up files and those that the request names, and what the latter printed.

        Raises:
            SessionNotInitializedError: the slot has no bash, or it ended.
            CommandTimeoutError: it took too long.
        """
        try:
            process = await held.slot.start(
                ["bash", "--noediting"],
                user=held.user,
                workdir=held.folder,
                env={"TERM": "dumb"},  # what bash makes of none, as in SWE-ReX's containers: models read no escapes
                pty=(24, 80),
                buffer_bytes=BUFFER_BYTES,
            )
        except OSError as error:
            raise SessionNotInitializedError(f"bash can't be started: {error}") from error
        session = cls(held, process)
        try:
            await session._answer("stty -echo", SHELL_START_S)
            if not request.startup_source:
                return session, ""
            line = " ; ".join(f"source {path}" for path in request.startup_source)
            return session, await session._answer(line, request.startup_timeout)
        except BaseException:
            await session.close()
            raise

    async def close(self) -> None:
        """End the shell and what runs in it."""
        await self._process.kill()

    async def run(self, action: BashAction) -> BashObservation:
        """Run a command, or type a line to an interactive program.

        Raises:
            BashIncorrectSyntaxError: it is no command.
            CommandTimeoutError: it still runs after `timeout`.
            NonZeroExitCodeError: it failed, and `check` is "raise".
            NoExitCodeError: there is none, and `check` is "raise".
            SessionNotInitializedError: the shell has ended.
        """
        if action.is_interactive_command or action.is_interactive_quit:
            return await self._interact(action)
        await self._check_syntax(action.command)
        await self._held.slot.write_file(self._file, action.command, 0o600, user=self._held.user)
        line = await self._enter(f". {self._file}")
        match = await self._expect(action.expect, action.timeout, action.command, line=line)
        output, code = match.before, match.exit_code
        if action.check == "ignore":
            return BashObservation(output=clean(output), expect_string=match.string)
        if code is None:
            try:
                end = await self._expect((), PROMPT_WAIT_S, action.command, line=line)
            except CommandTimeoutError as error:
                if action.check == "raise":
                    raise NoExitCodeError(f"{action.command!r} still runs") from error
            else:
                output, code = output + end.before, end.exit_code
        if code != 0 and action.check == "raise":
            reason = f"{action.command!r} ended with exit code {code}; its output:\n{clean(output)!r}"
            raise NonZeroExitCodeError(f"{action.error_msg}: {reason}" if action.error_msg else reason)
        return BashObservation(output=clean(output), exit_code=code, expect_string=match.string)

    async def interrupt(self, action: BashInterruptAction) -> BashObservation:
        """Type ^C until there is a prompt, and kill what ignores it.

        Raises:
            CommandTimeoutError: there is still no prompt.
        """
        for _ in range(action.n_retry):
            await self._process.write(INTERRUPT)
            try:
                match = await self._expect(action.expect, action.timeout, "^C")
            except CommandTimeoutError:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            after = "" if match.exit_code is None else await self._answer("stty -echo", PROMPT_WAIT_S)
            return BashObservation(output=clean(match.before + after).strip(), exit_code=0, expect_string=match.string)
        await self._process.write(SUSPEND)
        match = await self._expect(action.expect, PROMPT_WAIT_S, "^Z")
        after = await self._answer("stty -echo", PROMPT_WAIT_S)
        killed = await self._answer(KILL_SUSPENDED, PROMPT_WAIT_S)
        self._pending = killed + self._pending  # read with the next action, as in SWE-ReX's own sessions
        return BashObservation(output=clean(match.before + after).strip(), exit_code=0, expect_string=match.string)

    async def _interact(self, action: BashAction) -> BashObservation:
        await self._process.write(f"{action.command}\n")
        match = await self._expect(action.expect, action.timeout, action.command)
        output = clean(match.before)
        if action.is_interactive_quit:
            await self._answer("stty -echo", PROMPT_WAIT_S)
        else:  # many programs turn the terminal's echo on
            output = output.lstrip().removeprefix(action.command).strip()
        return BashObservation(output=output, exit_code=0, expect_string=match.string)

    async def _check_syntax(self, command: str) -> None:
        # from stdin, so that what the model reads of an error names no file
        result = await self._held.slot.exec(["bash", "-n"], user=self._held.user, stdin=command, split=True)
        if result.exit_code == 0:
            return
        streams = {"bash_stdout": result.stdout or "", "bash_stderr": result.stderr or result.error or ""}
        raise BashIncorrectSyntaxError(f"{command!r}: {streams['bash_stderr']}", extra_info=streams)

    async def _enter(self, line: str) -> int:
        """Type a line; returns the number that the prompt after it has.

        The prompt is set before it, for one that an interrupt ends, and after it, since it may have set another;
        `set -x` shows neither.
        """
        self._line += 1
        before = f"{{ export ATROPOS_LINE={self._line}; unset ATROPOS_CODE; {self._set_prompt}; }} 2>/dev/null"
        after = f"{{ ATROPOS_CODE=$?; {self._set_prompt}; }} 2>/dev/null"
        await self._process.write(f"{before}; {line}; {after}\n")
        return self._line

    async def _answer(self, line: str, timeout_s: float) -> str:
        """What a line prints until the prompt after it."""
        number = await self._enter(line)
        return clean((await self._expect((), timeout_s, line, line=number)).before)

    async def _expect(
        self, patterns: Sequence[str], timeout_s: float | None, command: str, *, line: int | None = None
    ) -> PromptMatch:
        """Read until a pattern or a prompt comes.

        Args:
            patterns: regular expressions.
            timeout_s: None: no limit.
            command: for messages.
            line: only the prompt after this line counts, and earlier ones are removed; None: any.

        Raises:
            CommandTimeoutError: none came; what was read stays for the next action.
            SessionNotInitializedError: the shell has ended.
        """
        loop = asyncio.get_running_loop()
        deadline, late = None if timeout_s is None else loop.time() + timeout_s, False
        self._pending = self._taken(self._pending)
        while True:
            if line is not None:
                self._pending = self._prompt.sub(lambda at: at[0] if at[1] == str(line) else "", self._pending)
            if (match := self._matched(patterns)) is not None:
                return match
            self._searched.write(self._pending[:-OVERLAP_CHARS])
            self._pending = self._pending[-OVERLAP_CHARS:]
            if self._searched.tell() > 2 * MAX_OUTPUT_CHARS:
                end = self._taken()
                self._searched.write(end)
            if late:
                raise CommandTimeoutError(f"timeout after {timeout_s} seconds while running command {command!r}")
            wait_s = READ_WAIT_S if deadline is None else deadline - loop.time()
            late = wait_s <= 0  # what came in time may be unread: this process did not run meanwhile
            ended = self._process.exit_code is not None
            data = await self._process.read(max_bytes=BUFFER_BYTES, wait_s=max(0.0, min(wait_s, READ_WAIT_S)))
            if not data and ended:
                raise SessionNotInitializedError(f"the shell ended in {command!r}: {clean(self._pending)[-2000:]!r}")
            self._pending += self._decoder.decode(data)

    def _taken(self, following: str = "") -> str:
        """Take what was searched, with what follows it: its end, as much as is kept."""
        text, self._searched = self._searched.getvalue() + following, io.StringIO()
        self._dropped += max(0, len(text) - MAX_OUTPUT_CHARS)
        return text[-MAX_OUTPUT_CHARS:]

    def _matched(self, patterns: Sequence[str]) -> PromptMatch | None:
        """The first match in what is pending, which is taken from it."""
        start = min(1, self._searched.tell())  # so that `^` is the beginning of all output
        candidates = [(self._prompt.search(self._pending, start), None)]
        candidates += [(re.compile(pattern, re.DOTALL).search(self._pending, start), pattern) for pattern in patterns]
        matches = [(at, pattern) for at, pattern in candidates if at is not None]
        if not matches:
            return None
        at, pattern = min(matches, key=lambda each: each[0].start())
        before, self._pending = self._taken(self._pending[: at.start()]), self._pending[at.end() :]
        if dropped := self._dropped + self._process.dropped_bytes:
            before = f"[{dropped} characters of output were dropped here]\n{before}"
            self._dropped = self._process.dropped_bytes = 0
        return PromptMatch(before, pattern or at[0], None if pattern is not None else int(at[2]))


def clean(output: str) -> str:
    """What a program printed, without what is the terminal's."""
    return ESCAPES.sub("", output).replace("\r\n", "\n")
