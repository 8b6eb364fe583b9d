"""What is known of every call of one client: queued, running, or its answer until the client has it.

A call id is taken once. Sent again it finds its entry: the answer, or the run that goes on. Bounds and their effect:

- Answers that wait for their acknowledgement are bounded in number and bytes. At a bound the oldest answer of the lease
  that holds most is dropped; whoever asks for it again gets `OutcomeUnknown`. It never runs again.
- Ids whose answer is gone are remembered, `MAX_GONE` a lease. Beyond that the oldest id is forgotten. A client never
  sends again what it has acknowledged, so only where a *dropped* answer's id was forgotten does a call marked `resent`
  that isn't known end as `OutcomeUnknown`: it might be that one.
- Cancels that arrive before their call are remembered, `MAX_EARLY` a client.
- Answers that were given by HTTP under an id of the caller's are acknowledged by nobody. The latest are kept,
  `KEPT_BYTES` a client; older ones are dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from atropos.errors import OutcomeUnknown, SandboxError
from atropos.wire import Call, CommandResult, Fault, Reply

MAX_ANSWERS = 4096
"""Unacknowledged answers kept for one client."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Their size in memory together, roughly, in bytes. The newest answer is always kept, however large."""
GATE_BYTES = 32 * 1024 * 1024
"""With more than this waiting to be acknowledged, no further call of the client is started until it is less."""
KEPT_BYTES = 16 * 1024 * 1024
"""Answers kept for one client that it got by HTTP and may ask for again: below the gate, which waits for
acknowledgements."""
MAX_GONE = 10_000
"""Ids remembered of one lease after their answer was acknowledged or dropped."""
MAX_EARLY = 4096
"""Cancels remembered of one client whose call has not come."""
ANSWER_OVERHEAD = 400
"""Rough size of an answer without its bytes, so that empty answers count too."""


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One call. `number` names it inside the slot, so that a client's id never gets there."""

    call_id: str
    lease_id: str
    number: str
    state: Literal["queued", "running", "done"] = "queued"
    retained: bool = False
    answer: Reply | Fault | None = None
    size: int = 0
    traceparent: str | None = None
    came_at: float = 0.0
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])


@dataclass(slots=True)
class _Log:
    """The calls of one lease: the finished ones in order of completion, and open ids (True: dropped)."""

    bytes: int = 0
    done: dict[str, JournalEntry] = field(default_factory=dict[str, JournalEntry])
    gone: dict[str, bool] = field(default_factory=dict[str, bool])
    forgot: bool = False


@dataclass(slots=True)
class Journal:
    """All calls of one client. Decisions only; running them is the lanes' work."""

    max_answers: int = MAX_ANSWERS
    max_answer_bytes: int = MAX_ANSWER_BYTES
    max_gone: int = MAX_GONE
    entries: dict[str, JournalEntry] = field(default_factory=dict[str, JournalEntry])
    bytes: int = 0
    answers: int = 0
    _logs: dict[str, _Log] = field(default_factory=dict[str, _Log])
    _early: dict[str, None] = field(default_factory=dict[str, None])
    _kept: deque[JournalEntry] = field(default_factory=deque[JournalEntry])
    _kept_bytes: int = 0
    _next: int = 0

    @property
    def open_calls(self) -> int:
        """Calls without an answer."""
        return len(self.entries) - self.answers

    @property
    def congested(self) -> bool:
        """Whether further calls should wait for acknowledgements."""
        return self.bytes > GATE_BYTES

    def look_up(self, call: Call) -> JournalEntry | Fault | None:
        """What is known of a call that arrived: its entry, why it can't run (again), or None: it is new."""
        entry = self.entries.get(call.call_id)
        log = self._logs.get(call.lease_id)
        code = OutcomeUnknown.code
        if entry is not None:
            # The same id in another lease is a client's mistake: answering would give it another call's result.
            if entry.lease_id == call.lease_id:
                return entry
            code, message = SandboxError.code, "this call_id was used for another lease; it was not run"
        elif log is not None and call.call_id in log.gone:
            message = "the call ran and its result was acknowledged or dropped; it was not run again"
        # A call that is sent for the first time can't have been dropped, so that it may run.
        elif log is not None and log.forgot and call.resent:
            message = "the journal forgot old calls of this lease, maybe this one; it was not run again"
        else:
            return None
        return Fault(call_id=call.call_id, code=code, message=message)

    def open(self, call: Call) -> JournalEntry:
        """Register a new call. One that was cancelled before it came is answered at once, and does not run."""
        self._next += 1
        entry = JournalEntry(call.call_id, call.lease_id, f"c{self._next}", traceparent=call.traceparent)
        self.entries[call.call_id] = entry
        if call.call_id in self._early:
            del self._early[call.call_id]
            self.close(entry, cancelled_reply(call.call_id))
        return entry

    def cancel_early(self, call_id: str) -> None:
        """Remember a cancel whose call is not known (yet)."""
        self._early[call_id] = None
        while len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def close(self, entry: JournalEntry, answer: Reply | Fault) -> None:
        """The call's one answer. A second one is ignored."""
        if entry.state == "done":
            return
        entry.state, entry.answer, entry.size = "done", answer, answer_size(answer)
        log = self._logs.get(entry.lease_id)
        if log is None:
            log = self._logs[entry.lease_id] = _Log()
        log.done[entry.call_id] = entry
        log.bytes += entry.size
        self.bytes += entry.size
        self.answers += 1
        for waiter in entry.waiters:
            if not waiter.done():
                waiter.set_result(None)
        entry.waiters.clear()
        # After the waiters were woken: they read the answer of the entry itself, dropped or not.
        self._shrink(entry)

    def ack(self, call_id: str) -> None:
        """The client has the answer."""
        entry = self.entries.get(call_id)
        if entry is not None and entry.state == "done":
            self._forget(entry)

    def keep(self, entry: JournalEntry) -> None:
        """Keep an answer given by HTTP, which nobody acknowledges, for a repeated request."""
        if entry.retained:
            return
        entry.retained = True
        self._kept.append(entry)
        self._kept_bytes += entry.size
        while self._kept_bytes > KEPT_BYTES:
            oldest = self._kept.popleft()
            self._kept_bytes -= oldest.size
            # Acknowledged, or dropped at another bound, meanwhile.
            if self.entries.get(oldest.call_id) is oldest:
                self._drop(oldest)

    def give_up(self, lease_id: str) -> list[JournalEntry]:
        """Drop all answers of a lease that will not be acknowledged.

        Returns its entries, which may still have waiters.
        """
        log = self._logs.get(lease_id)
        entries = list(log.done.values()) if log is not None else []
        for entry in entries:
            self._drop(entry)
        return entries

    def forget_lease(self, lease_id: str) -> None:
        """Forget everything about a lease."""
        log = self._logs.pop(lease_id, None)
        if log is not None:
            self.bytes -= log.bytes
            self.answers -= len(log.done)
            for call_id in log.done:
                del self.entries[call_id]

    def trim_lease(self, lease_id: str) -> None:
        """The lease is over: nothing more runs in it, so only its answers, and what was dropped, still matter."""
        log = self._logs.get(lease_id)
        if log is not None:
            log.gone = {call_id: dropped for call_id, dropped in log.gone.items() if dropped}
            if not (log.done or log.gone or log.forgot):
                del self._logs[lease_id]

    def lease_ids(self) -> list[str]:
        """The leases of which something is kept."""
        return list(self._logs)

    def _shrink(self, newest: JournalEntry) -> None:
        # The lease that holds most pays, so that one busy lease costs the others nothing.
        while self.answers > 1 and (self.bytes > self.max_answer_bytes or self.answers > self.max_answers):
            log = max(self._logs.values(), key=lambda each: each.bytes)
            entry = next((each for each in log.done.values() if each is not newest), None)
            if entry is None:  # the largest lease has only the newest: take the oldest of the others
                entry = next(e for each in self._logs.values() for e in each.done.values() if e is not newest)
            self._drop(entry)

    def _drop(self, entry: JournalEntry) -> None:
        self._forget(entry, dropped=True)
        # A connection may still have the entry queued: it then sends this fault, which is true and small.
        message = "the journal dropped the result; the call ran and was not run again"
        entry.answer = Fault(call_id=entry.call_id, code=OutcomeUnknown.code, message=message)

    def _forget(self, entry: JournalEntry, *, dropped: bool = False) -> None:
        log = self._logs[entry.lease_id]
        del self.entries[entry.call_id]
        del log.done[entry.call_id]
        log.bytes -= entry.size
        self.bytes -= entry.size
        self.answers -= 1
        log.gone[entry.call_id] = dropped
        if len(log.gone) > self.max_gone:
            # Only a dropped answer matters: an acknowledged one is never asked for again.
            log.forgot |= log.gone.pop(next(iter(log.gone)))


def cancelled_reply(call_id: str) -> Reply:
    """The answer of a call that was cancelled before it started."""
    return Reply(call_id=call_id, result=CommandResult(exit_code=None, output=b"", cancelled=True, duration_s=0))


def answer_size(answer: Reply | Fault) -> int:
    """Roughly what an answer holds in memory, in bytes."""
    if isinstance(answer, Fault):
        return ANSWER_OVERHEAD + len(answer.message)
    result = answer.result
    size = ANSWER_OVERHEAD
    match result.kind:
        case "exec_result":
            size += len(result.output) + len(result.stdout or b"") + len(result.stderr or b"")
        case "file_result":
            size += len(result.data)
        case "proc_state":
            size += len(result.output) + len(result.command)
        case "search_result":
            size += sum(ANSWER_OVERHEAD + len(m.text) + len(m.path) for m in result.matches)
        case "proc_listing":
            size += sum(ANSWER_OVERHEAD + len(p.command) for p in result.processes)
        case "op_error":
            size += len(result.message)
        case "done":
            pass
    return size
