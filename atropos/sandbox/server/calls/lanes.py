"""How the calls of one lease run: in the order given, in one sandbox at a time.

There are three lanes, and each operation names its own (`wire.SlotOperation.lane`). The *main* lane runs commands and
file operations one after the other. The *side* lane is for background processes, which are watched and ended while a
command runs; it keeps its own order, but a read that waits lets the ones behind it go on. The *concurrent* lane takes
programs that ask for it (`StartOperation.concurrent`) and runs them side by side. A barrier (a snapshot) is alone:
after the calls before it in the main lane, once no concurrent command runs, with nothing in the side lane. Operations
that start a program also wait for their lease's turn in the server's `StartQueue`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from atropos.aio import Tasks
from atropos.errors import LeaseExpired, OutcomeUnknown, SandboxError
from atropos.sandbox.contract import Sandbox
from atropos.sandbox.server.calls.file_streams import FileStream, FileStreams
from atropos.sandbox.server.calls.journal import Journal, JournalEntry, cancelled_reply
from atropos.sandbox.server.calls.start_queue import StartQueue
from atropos.sandbox.server.metrics import Meters
from atropos.wire import (
    Fault,
    Operation,
    OpError,
    OpResult,
    ReadStream,
    Reply,
    StartOperation,
    Timing,
    WriteStream,
    outcome,
)

if TYPE_CHECKING:
    from atropos.sandbox.contract import OnResult

log = logging.getLogger(__name__)
MAX_QUEUED = 1024
"""Calls that may wait in one lease; one more is refused, not run."""
MAX_CONCURRENT = 64
"""Concurrent commands that run at once in one lease; further ones wait. As many as it may have background processes."""

Work = tuple[JournalEntry, Operation]


@dataclass(slots=True, eq=False)
class Barrier:
    """A place in the main lane for work on the sandbox itself; see `Lanes.barrier`."""

    beside: bool
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its turn has come, or the lanes are closed."""


ItemT = TypeVar("ItemT", Work, Work | Barrier)


@dataclass(slots=True)
class Lane(Generic[ItemT]):
    """Calls that start in the order given, and run `most` at a time."""

    most: int
    waiting: deque[ItemT] = field(default_factory=deque[ItemT])
    running: int = 0


class Lanes:
    """Runs one lease's calls and gives each its answer.

    Args:
        sandbox: where they run.
        journal: records every answer.
        answered: called after an answer is in the journal.
        room: waits while the journal is congested.
        starts: the server's queue of commands to start.
        meters: measures every call.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        journal: Journal,
        answered: Callable[[JournalEntry], None],
        room: Callable[[], Awaitable[None]],
        starts: StartQueue,
        meters: Meters,
    ) -> None:
        self.sandbox = sandbox
        # As if it had just started a command: a new lease waits its turn, and doesn't jump the queue.
        self.started_at = time.perf_counter()
        self._journal = journal
        self._answered = answered
        self._room = room
        self._starts = starts
        self._meters = meters
        self.streams = FileStreams()
        self._streaming: dict[str, FileStream] = {}
        """The stream of each running call that has one, by the call's id."""
        self._main = Lane[Work | Barrier](1)
        self._side = Lane[Work](1)
        self._concurrent = Lane[Work](MAX_CONCURRENT)
        self._lanes = self._main, self._side, self._concurrent
        self._running: dict[str, JournalEntry] = {}
        self._barrier: Barrier | None = None
        """The one whose turn it is."""
        self._tasks = Tasks("lanes")
        self._congested = False
        """Whether the journal takes no more."""
        self._closed: tuple[str, str] | None = None

    @property
    def queued(self) -> int:
        """Calls that wait or run."""
        main, side, concurrent = self._lanes
        return len(main.waiting) + len(side.waiting) + len(concurrent.waiting) + len(self._running)

    def submit(self, entry: JournalEntry, operation: Operation) -> None:
        """Queue a call; its answer comes by the journal. Never raises."""
        entry.came_at = time.perf_counter()
        if self._closed is not None:
            self._fault(entry, *self._closed)
        elif self.queued >= MAX_QUEUED:
            self._fault(entry, SandboxError.code, f"{MAX_QUEUED} calls wait in this lease already; it was not run")
        else:
            lane = {"main": self._main, "side": self._side, "concurrent": self._concurrent}[operation.lane]
            lane.waiting.append((entry, operation))
            self.start_next()

    @contextlib.asynccontextmanager
    async def barrier(self, *, beside: bool = False) -> AsyncGenerator[None]:
        """Around work on the sandbox itself: after the calls before it, alone. It may replace `sandbox`.

        The end of the lease doesn't interrupt the work: who closes the lanes waits for it.

        Args:
            beside: what runs goes on meanwhile, in the same sandbox; nothing else starts.

        Raises:
            LeaseExpired: the lease ended before its turn came.
        """
        barrier = Barrier(beside)
        self._main.waiting.append(barrier)
        self.start_next()
        try:
            if self._closed is None:  # otherwise its turn may never come: running calls are not waited for
                await barrier.turn.wait()
            if self._closed is not None:
                raise LeaseExpired(f"the lease ended before its turn came: {self._closed[1]}")
            # Calls of the side lane wait for their processes, which the work on the sandbox is about to end.
            if not beside:
                for entry in list(self._running.values()):
                    self.sandbox.cancel(entry.number)
            yield
        finally:
            # It had its turn; one whose waiter was cancelled before that is still in the lane.
            if self._barrier is barrier:
                self._barrier = None
            elif barrier in self._main.waiting:
                self._main.waiting.remove(barrier)
            self.start_next()

    def cancel(self, entry: JournalEntry) -> None:
        """Cancel a call: a queued one is answered at once; a running one is killed, and its result says so."""
        if entry.state == "running":
            if entry.call_id in self._streaming:
                # The child in the slot sees the end of its stream and undoes its work.
                self._streaming[entry.call_id].close()
            self.sandbox.cancel(entry.number)
        elif entry.state == "queued":
            self._unqueue(entry)
            self._answer(entry, cancelled_reply(entry.call_id))

    def close(self, code: str, message: str) -> None:
        """Stop: answer each pending call with this fault."""
        if self._closed is not None:
            return
        # First: answers below may lead to further calls.
        self._closed = (code, message)
        waiting = [item for lane in self._lanes for item in lane.waiting]
        for lane in self._lanes:
            lane.waiting.clear()
        for item in waiting:
            if isinstance(item, Barrier):
                item.turn.set()
            else:
                self._fault(item[0], code, message)
        for entry in list(self._running.values()):
            self._fault(entry, code, message)
            self.sandbox.forget(entry.number)
            self._starts.ended(entry)
        self._running.clear()
        self.streams.close()
        self._tasks.stop()

    def start_next(self) -> None:
        """Start what may start. Results come by callbacks: a task for each call would cost more than the call's way."""
        if self._barrier is not None:
            return
        main, side, concurrent = self._lanes
        while main.waiting and main.running < main.most:
            item = main.waiting[0]
            if isinstance(item, Barrier):
                # Commands of the concurrent lane may still change the workspace that is to be frozen.
                if concurrent.running and not item.beside:
                    break
                main.waiting.popleft()
                self._barrier = item
                item.turn.set()
                return
            # It stays at the head: nothing behind it in this lane may overtake it.
            if not self._has_room() or not self._may_start(item[1]):
                break
            main.waiting.popleft()
            self._begin(*item, main)
        while side.waiting and side.running < side.most and self._has_room():
            entry, operation = side.waiting.popleft()
            # A read that waits is not counted, so that a write or kill behind it can end the wait.
            self._begin(entry, operation, None if operation.waits else side)
        while concurrent.waiting and concurrent.running < concurrent.most and self._has_room():
            if not self._starts.admit(self):
                break
            self._begin(*concurrent.waiting.popleft(), concurrent)

    # --------------------------------------------------------------------------------------------------------- inside

    def _unqueue(self, entry: JournalEntry) -> None:
        for lane in self._lanes:
            for place, item in enumerate(lane.waiting):
                if not isinstance(item, Barrier) and item[0] is entry:
                    del lane.waiting[place]
                    return

    def _may_start(self, operation: Operation) -> bool:
        return not isinstance(operation, StartOperation) or self._starts.admit(self)

    def _has_room(self) -> bool:
        """Whether the journal has room; otherwise the lanes continue once it has."""
        if self._journal.congested and not self._congested:
            self._congested = True
            self._tasks.spawn(self._wait_for_room(), "room")
        return not self._congested

    async def _wait_for_room(self) -> None:
        await self._room()
        self._congested = False
        self.start_next()

    def _begin(self, entry: JournalEntry, operation: Operation, lane: Lane[Work] | Lane[Work | Barrier] | None) -> None:
        """Start a call, which counts as running in this lane; one that can't be started has its answer."""
        entry.state = "running"
        began = time.perf_counter()

        def ended(result: OpResult | Exception) -> None:
            if lane is not None:
                lane.running -= 1
            status = "fault" if isinstance(result, Exception) else outcome(result)
            ran_s = time.perf_counter() - began
            self._meters.operation.observe(ran_s, operation.op, status)
            self._running.pop(entry.call_id, None)
            self._ended(entry, operation, result, ran_s)
            self._starts.ended(entry)
            self.start_next()

        try:
            if isinstance(operation, StartOperation):
                self._starts.started(self, entry)
            if isinstance(operation, ReadStream | WriteStream):
                self._begin_stream(entry, operation, ended)
            else:
                self.sandbox.begin(entry.number, operation, ended)
        except Exception as error:
            self._starts.ended(entry)
            self._ended(entry, operation, error, time.perf_counter() - began)
            return
        self._running[entry.call_id] = entry
        if lane is not None:
            lane.running += 1

    def _begin_stream(self, entry: JournalEntry, operation: ReadStream | WriteStream, ended: OnResult) -> None:
        """Start an operation that has a stream."""

        def broke_off() -> None:
            self.streams.end(operation.stream)
            if entry.call_id in self._streaming:
                self.sandbox.cancel(entry.number)

        def over(result: OpResult | Exception) -> None:
            self._streaming.pop(entry.call_id, None)
            if isinstance(operation, WriteStream) or stream.closed:  # otherwise the data read may still be in transit
                self.streams.end(operation.stream)
            if isinstance(result, OpError):
                result = stream.failure(result, operation.path)
            ended(result)

        max_bytes = operation.max_bytes if isinstance(operation, ReadStream) else 0
        stream = self._streaming[entry.call_id] = self.streams.open(operation.stream, broke_off, max_bytes)
        try:
            self.sandbox.begin(entry.number, operation, over, stream=stream.far.fileno())
        except BaseException:
            del self._streaming[entry.call_id]
            self.streams.end(operation.stream)
            raise
        # The slot has its own copy; with ours open, the end of its process would not end the stream.
        stream.far.close()

    def _ended(self, entry: JournalEntry, operation: Operation, result: OpResult | Exception, ran_s: float) -> None:
        # A read of a background process whose sandbox a snapshot has replaced: the program is gone, nothing is unknown.
        on_purpose = self._barrier is not None and not self.sandbox.died.done()
        if on_purpose and operation.lane == "side" and isinstance(result, OutcomeUnknown):
            result = OpError(error="unknown_process", message="a snapshot was taken, which ends background processes")
        if not isinstance(result, Exception):
            timing = None
            if entry.traceparent is not None:
                waited_s = max(0.0, time.perf_counter() - entry.came_at - ran_s)
                timing = Timing(waited_s=waited_s, ran_s=ran_s)
            self._answer(entry, Reply(call_id=entry.call_id, result=result, timing=timing))
        elif isinstance(result, SandboxError):
            self._fault(entry, result.code, str(result))
        else:  # a fault of ours: reported as unknown, never as a result
            trace = entry.traceparent or "none"
            log.error("call %s failed inside the server (trace %s)", entry.number, trace, exc_info=result)
            self._fault(entry, OutcomeUnknown.code, f"the sandbox server failed while the call ran: {result!r}")

    def _fault(self, entry: JournalEntry, code: str, message: str) -> None:
        if entry.state != "done":
            self._meters.faults[code] += 1
        self._answer(entry, Fault(call_id=entry.call_id, code=code, message=message))

    def _answer(self, entry: JournalEntry, answer: Reply | Fault) -> None:
        if entry.state != "done":
            self._journal.close(entry, answer)
            self._answered(entry)
