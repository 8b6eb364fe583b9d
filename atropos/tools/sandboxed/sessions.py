"""Terminal sessions in the trajectory's slot: keys in, screen out, as with tmux's send-keys and capture-pane.

The program runs on a terminal inside the slot; the screen is computed here from its output.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Literal

import regex
from pydantic import Field, field_validator

from atropos import wire
from atropos.aio import off_loop
from atropos.tools.arguments import Arguments, Seconds, Text
from atropos.tools.base import Tool, ToolError, ToolScope, ToolState
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed.process import BUFFER_BYTES, UnknownSession, read
from atropos.tools.sandboxed.recording import Recording
from atropos.tools.sandboxed.screen import TERM, Screen
from atropos.tools.sandboxed.text import bounded_s, clip, plural

QUIET_S = 0.15
"""A program without output for this long has finished drawing."""
SETTLE_S = 2.0
"""Longest wait for that after keys; then the screen is shown as it is."""
ON_LOOP_BYTES = 4096
"""Output of up to this size is drawn on the event loop, more in a thread."""
MAX_KEYS = 1000
PAST_BYTES = 64_000_000
"""Recordings of forgotten sessions that a trajectory keeps: the latest of them."""
_COUNT = re.compile(r"(\)?)\{(\d+)")
_VERBOSE = re.compile(r"\(\?[A-Za-z0-9-]*x")
"""Where white space and comments may stand within a count."""
MAX_UNROLLED = 20_000
"""Nodes of a pattern. `regex` makes one for each repetition that must be there: `x{999999999}` would take all
memory."""
MATCH_S = 0.5
"""Longest search for a pattern on the screen."""

Action = Literal["start", "send", "screen", "wait", "history", "resize", "list", "close"]


class SessionArguments(Arguments):
    """Arguments of `session`."""

    action: Action = Field(
        description="start: run a command on a new terminal; send: press keys and see the screen; screen: see it; "
        "wait: until a pattern shows or output stops; history: lines that scrolled off; resize; list; close"
    )
    session_id: str | None = Field(default=None, description="from start; may be left out while there is only one")
    command: Text | None = Field(default=None, description="for start; default: bash")
    workdir: Text | None = Field(default=None, description="for start")
    keys: list[str] | None = Field(
        default=None,
        max_length=MAX_KEYS,
        description="for send, in order: names of keys (Enter, Escape, Tab, Up, C-c, M-x, F1, PageDown …) or text",
    )
    text: str | None = Field(default=None, description="for send: literal text, sent before keys")
    pattern: str | None = Field(
        default=None, max_length=2000, description="for wait: regular expression to be found on the screen"
    )
    timeout: Seconds | None = Field(default=None, description="for wait and send: longest wait in seconds")
    rows: int | None = Field(default=None, ge=2, le=300, description="for start and resize; default 24")
    cols: int | None = Field(default=None, ge=10, le=500, description="for start and resize; default 80")
    lines: int = Field(default=200, ge=1, le=2000, description="for history")
    record: bool = Field(default=False, description="for start: keep a recording (asciinema v2)")

    @field_validator("pattern")
    @classmethod
    def _bounded(cls, value: str | None) -> str | None:
        if value is not None and (_VERBOSE.search(value) or _unrolled(value) > MAX_UNROLLED):
            raise ValueError("it repeats too much; use * or + in place of large counts, and no (?x)")
        return value


def _unrolled(pattern: str) -> int:
    """At most so many nodes `regex` makes of a pattern: `{n}` after a group multiplies what is in it."""
    # Too high rather than too low: nested counts are multiplied even where they stand side by side.
    times, parts = 1, len(pattern)
    for group, count in _COUNT.findall(pattern):
        times, parts = (times * max(int(count), 1), parts) if group else (times, parts + int(count))
    return times * parts


@dataclass
class _Session:
    """One terminal, its screen, and how much of its output was read."""

    id: str
    command: str
    screen: Screen
    began: float = field(default_factory=time.monotonic)
    seen: int = 0
    lost: int = 0
    recording: Recording | None = None
    state: wire.ProcState | None = None
    finished: bool = False

    def note(self, kind: str, data: str) -> None:
        """Add to the recording, where there is one."""
        if self.recording is not None:
            self.recording.event(time.monotonic() - self.began, kind, data)


class Sessions(ToolState):
    """A trajectory's terminals."""

    def __init__(self) -> None:
        self.by_id: dict[str, _Session] = {}
        self._past: dict[str, str] = {}

    def forget(self, session_id: str) -> None:
        """Forget an ended session but for its recording."""
        session = self.by_id.pop(session_id)
        if session.recording is not None:
            self._past[session_id] = session.recording.text()
        # Dicts keep their order: the oldest goes first.
        while sum(map(len, self._past.values())) > PAST_BYTES:
            del self._past[next(iter(self._past))]

    async def finish(self, scope: ToolScope) -> None:
        """Read the last output, for the recordings."""
        for session in self.by_id.values():
            if session.recording is not None and not session.finished:
                await _update(scope, session)

    def recordings(self) -> dict[str, str]:
        """Recorded sessions by id, as asciinema v2."""
        return self._past | {one.id: one.recording.text() for one in self.by_id.values() if one.recording is not None}


class SessionTool(Tool):
    """Full-screen programs."""

    name = "session"
    description = (
        "Use interactive and full-screen programs (vim, less, top, a debugger, an installer) on a terminal: start one, "
        "send keys, and see the screen."
    )
    arguments = SessionArguments
    toolsets = ("session",)

    async def run(self, arguments: SessionArguments, scope: ToolScope) -> ToolResult:
        """Do the action."""
        sessions = scope.get_state("session", Sessions)
        if arguments.action == "start":
            return await _start(arguments, scope, sessions)
        if arguments.action == "list":
            return await _list(scope, sessions)
        session = _find(arguments, sessions)
        actions = {
            "send": _send,
            "screen": _screen,
            "wait": _wait,
            "history": _history,
            "resize": _resize,
            "close": _close,
        }
        return await actions[arguments.action](arguments, scope, session)


def _find(arguments: SessionArguments, sessions: Sessions) -> _Session:
    known = ", ".join(sessions.by_id) or "none; start one"
    if arguments.session_id is None:
        every = list(sessions.by_id.values())
        # where all have ended, the model may still want the last one's screen
        meant = [one for one in every if not one.finished] or every[-1:]
        if len(meant) != 1:
            raise ToolError(f"session: session_id is missing; the sessions are: {known}")
        return meant[0]
    try:
        return sessions.by_id[arguments.session_id]
    except KeyError:
        raise ToolError(
            f"session: there is no session {arguments.session_id[:100]!r}; the sessions are: {known}"
        ) from None


async def _start(arguments: SessionArguments, scope: ToolScope, sessions: Sessions) -> ToolResult:
    if sum(not one.finished for one in sessions.by_id.values()) >= scope.limits.max_sessions:
        raise ToolError(f"session: {scope.limits.max_sessions} sessions are open, the most allowed; close one")
    rows, cols, command = arguments.rows or 24, arguments.cols or 80, arguments.command or "bash"
    if not command.strip():
        raise ToolError("session: command is empty; leave it out for bash")
    state: wire.ProcState = await scope.run(
        wire.ProcStart(
            command=command,
            workdir=arguments.workdir,
            env={"TERM": TERM, "COLUMNS": str(cols), "LINES": str(rows)},
            pty=True,
            rows=rows,
            cols=cols,
            buffer_bytes=BUFFER_BYTES,
        )
    )
    session = _Session(state.id, command, Screen(rows, cols))
    if arguments.record or scope.limits.record_sessions:
        most = scope.limits.max_recording_bytes
        session.recording = Recording(
            rows=rows, cols=cols, started=time.time(), most_bytes=most, command=command, term=TERM
        )
    sessions.by_id[state.id] = session
    _forget_old(sessions, scope.limits.max_sessions)
    await _settle(scope, session, SETTLE_S)
    return _show(session, f"started session {session.id}")


def _forget_old(sessions: Sessions, most: int) -> None:
    """Forget all but the latest ended sessions, as the slot does."""
    ended = [one.id for one in sessions.by_id.values() if one.finished]
    for session_id in ended[: max(len(sessions.by_id) - 2 * most, 0)]:
        sessions.forget(session_id)


async def _send(arguments: SessionArguments, scope: ToolScope, session: _Session) -> ToolResult:
    if not arguments.keys and not arguments.text:
        raise ToolError('session: send needs keys, such as ["ls -l", "Enter"], or text')
    await _update(scope, session)  # what cursor keys send depends on the program's mode
    if session.finished:
        raise ToolError(f"session: {session.id} has ended; start another. It showed:\n{session.screen.text()}")
    data = (arguments.text or "").encode("utf-8", "replace")
    for key in arguments.keys or ():
        pressed = session.screen.key(key)
        data += key.encode("utf-8", "replace") if pressed is None else pressed
    if len(data) > wire.MAX_COMMAND_BYTES:
        raise ToolError(f"session: more than {wire.MAX_COMMAND_BYTES:,} bytes in one call; write a file instead")
    session.note("i", data.decode("utf-8", "replace"))
    # Read before the keys are sent, so that an answer that comes at once is seen as one.
    before = session.seen
    result = await scope.slot.run(wire.ProcWrite(id=session.id, data=data))
    if isinstance(result, wire.OpError):
        await _update(scope, session)
        if not session.finished:
            raise ToolError(f"session: {result.message}", limit=result.limit)
    if session.seen == before:  # wait until the program starts to answer, before waiting for quiet; some never answer
        await _read(scope, session, wait_s=min(0.5, arguments.timeout or 0.5), until="output")
    settle = SETTLE_S if arguments.timeout is None else min(arguments.timeout, scope.limits.max_wait_s)
    await _settle(scope, session, settle)
    return _show(session)


async def _screen(_: SessionArguments, scope: ToolScope, session: _Session) -> ToolResult:
    await _update(scope, session)
    return _show(session)


async def _wait(arguments: SessionArguments, scope: ToolScope, session: _Session) -> ToolResult:
    most_s = scope.limits.max_wait_s
    wait_s, cut = bounded_s("the wait of", arguments.timeout or min(30.0, most_s), most_s)
    if arguments.pattern is None:
        quiet = await _settle(scope, session, wait_s, quiet_s=1.0)
        return _show(session, cut if quiet else f"output has not stopped after {wait_s:g} s")
    try:
        expression = regex.compile(arguments.pattern, regex.MULTILINE)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ToolError(f"session: pattern is no regular expression: {error}") from None
    deadline, late = time.monotonic() + wait_s, False
    await _update(scope, session)
    while not await _matches(expression, session.screen.text()):
        if session.finished or late:
            why = "the program has ended" if session.finished else f"it did not show within {wait_s:g} s"
            return _show(session, "; ".join(part for part in (f"pattern not found: {why}", cut) if part), found=False)
        remaining_s = deadline - time.monotonic()
        late = remaining_s <= 0  # what came in time may be unread: this process did not run meanwhile
        await _read(scope, session, wait_s=max(0.0, remaining_s), until="output")
    return _show(session, cut, found=True)


async def _matches(wanted: regex.Pattern[str], text: str) -> bool:
    """Whether the pattern is on the screen.

    It is a model's and may backtrack for ever, so the search has a deadline.
    """
    try:
        return await asyncio.to_thread(wanted.search, text, timeout=MATCH_S, concurrent=True) is not None
    except TimeoutError:
        raise ToolError("session: the search for pattern takes too long; simplify it") from None


async def _history(arguments: SessionArguments, scope: ToolScope, session: _Session) -> ToolResult:
    await _update(scope, session)
    text, dropped = clip(session.screen.scrollback(arguments.lines), scope.limits.max_output_bytes)
    return ToolResult(success=True, output=f"{_head(session)}\n{text}", truncated=bool(dropped), dropped_bytes=dropped)


async def _resize(arguments: SessionArguments, scope: ToolScope, session: _Session) -> ToolResult:
    rows, cols = arguments.rows or session.screen.rows, arguments.cols or session.screen.cols
    await _update(scope, session)
    await scope.run(wire.ProcWrite(id=session.id, rows=rows, cols=cols))
    session.screen.resize(rows, cols)
    session.note("r", f"{cols}x{rows}")
    await _settle(scope, session, SETTLE_S)
    return _show(session)


async def _close(_: SessionArguments, scope: ToolScope, session: _Session) -> ToolResult:
    await _update(scope, session)
    if not session.finished:
        # What the kernel sends when a terminal is closed; shells pass it on to their jobs.
        await scope.run(wire.ProcKill(id=session.id, signal="HUP"))
        await _read(scope, session, wait_s=0.5, until="exit")
    if not session.finished:
        await scope.run(wire.ProcKill(id=session.id, signal="KILL"))
        await _read(scope, session, wait_s=10.0, until="exit")
    return ToolResult(success=True, output=f"session {session.id} is closed")


async def _list(scope: ToolScope, sessions: Sessions) -> ToolResult:
    rows: list[str] = []
    for session in sessions.by_id.values():
        if not session.finished:
            await _update(scope, session)
        rows.append(f"{_head(session)} {session.command[:200]}")
    return ToolResult(
        success=True, output="\n".join(rows) or "no sessions; start one", data={"sessions": [*sessions.by_id]}
    )


# ------------------------------------------------------------------------------------------------------------- reading


async def _update(scope: ToolScope, session: _Session) -> None:
    """Read and draw all output so far."""
    await _read(scope, session, wait_s=0, until="exit")


async def _read(
    scope: ToolScope,
    session: _Session,
    *,
    wait_s: float,
    until: Literal["exit", "output", "quiet"],
    quiet_s: float = QUIET_S,
) -> None:
    """Read and draw the program's output, and send the terminal's answers to its queries."""
    if session.finished:
        return
    try:
        state = await read(scope, session.id, offset=session.seen, wait_s=wait_s, until=until, quiet_s=quiet_s)
    except UnknownSession:
        session.finished = True  # how it ended was not read in time
        return
    session.state = state
    session.seen = state.offset + len(state.output)
    session.lost += state.dropped_bytes
    session.finished = not state.running and session.seen >= state.total_bytes
    if not state.output:
        return
    session.note("o", await off_loop(len(state.output), ON_LOOP_BYTES, session.screen.feed, state.output))
    answers = session.screen.answers()
    if answers and state.running:
        await scope.slot.run(wire.ProcWrite(id=session.id, data=answers))


async def _settle(scope: ToolScope, session: _Session, wait_s: float, *, quiet_s: float = QUIET_S) -> bool:
    """Wait up to `wait_s` until no output came for `quiet_s`; returns whether that happened."""
    deadline = time.monotonic() + wait_s
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        before = session.seen
        await _read(scope, session, wait_s=remaining_s, until="quiet", quiet_s=quiet_s)
        if session.finished or session.seen == before:
            return True
        drawn = session.state is not None and session.seen >= session.state.total_bytes
        if drawn and time.monotonic() < deadline - quiet_s:  # otherwise the slot's own wait may have ended it
            return True


def _head(session: _Session) -> str:
    code = None if session.state is None else session.state.exit_code
    row, column = session.screen.cursor
    if session.finished:
        doing = "ended" if code is None else f"ended with exit code {code}"
    else:
        doing = f"cursor at row {row}, column {column}"
    return f"[session {session.id}: {session.screen.cols}x{session.screen.rows}, {doing}]"


def _show(session: _Session, note: str = "", *, found: bool | None = None) -> ToolResult:
    lost = f"{plural(session.lost, 'byte')} of output came too fast and were dropped" if session.lost else ""
    notes = (lost,) if found is False else (note, lost)
    head = "\n".join([_head(session), *(f"[{part}]" for part in notes if part)])
    state = session.state
    data: dict[str, object] = {
        "session_id": session.id,
        "running": not session.finished,
        "screen": session.screen.text(),
        "cursor": list(session.screen.cursor),
    }
    if found is not None:
        data["found"] = found
    return ToolResult(
        success=found is not False,
        output=f"{head}\n{session.screen.text()}",
        error=note if found is False else None,
        exit_code=state.exit_code if state is not None and session.finished else None,
        truncated=bool(session.lost),
        dropped_bytes=session.lost,
        data=data,
    )
