"""How the calls of one lease run: in the order given, in one sandbox at a time.

There are three lanes. The *main* lane runs commands and file operations one after the other. The *process* lane takes
`proc_read`, `proc_write`, `proc_kill` and `proc_list`, so that a background process can be watched and ended while a
command runs; it keeps its own order, but a `proc_read` that waits lets the ones behind it go on. The *concurrent* lane
takes commands that ask for it (`Exec.concurrent`) and runs them side by side. A `Barrier` (a snapshot) runs alone: after
the calls before it in the main lane, once no concurrent command runs, with nothing in the process lane. Commands, the
only calls that start programs, also wait for their lease's turn in the server's `StartQueue`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.errors import OutcomeUnknown, SandboxError
from atropos.sandbox.contract import Sandbox
from atropos.sandbox.server.calls.file_streams import FileStream, FileStreams
from atropos.sandbox.server.calls.journal import Journal, JournalEntry, cancelled_reply
from atropos.sandbox.server.calls.start_queue import StartQueue
from atropos.sandbox.server.metrics import Meters
from atropos.wire import (
    Exec,
    Fault,
    Operation,
    OpError,
    OpResult,
    ProcKill,
    ProcList,
    ProcRead,
    ProcStart,
    ProcWrite,
    ReadStream,
    Reply,
    SetNetwork,
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
SIDE = (ProcRead, ProcWrite, ProcKill, ProcList, SetNetwork)
COMMANDS = (Exec, ProcStart)


@dataclass(slots=True, eq=False)
class Barrier:
    """Work on the sandbox itself, in the main lane's order. It may replace `lanes.sandbox`, unless it is `beside`.

    `beside`: what runs goes on meanwhile; nothing else starts.
    """

    work: Callable[[], Awaitable[None]]
    beside: bool
    done: asyncio.Future[None]


Work = tuple[JournalEntry, Operation]


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
        self.started_at = time.perf_counter()
        self._journal = journal
        self._answered = answered
        self._room = room
        self._starts = starts
        self._meters = meters
        self.streams = FileStreams()
        self._streaming: dict[str, FileStream] = {}
        """The stream of each running call that has one, by the call's id."""
        self._main: deque[Work | Barrier] = deque()
        self._side: deque[Work] = deque()
        self._concurrent: deque[Work] = deque()
        self._running: dict[str, JournalEntry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._main_busy = self._side_busy = False
        self._concurrent_running = 0
        self._barrier = self._congested = False
        self._closed: tuple[str, str] | None = None

    @property
    def queued(self) -> int:
        """Calls that wait or run."""
        return len(self._main) + len(self._side) + len(self._concurrent) + len(self._running)

    def submit(self, entry: JournalEntry, operation: Operation) -> None:
        """Queue a call; its answer comes by the journal. Never raises."""
        entry.came_at = time.perf_counter()
        if self._closed is not None:
            self._fault(entry, *self._closed)
        elif self.queued >= MAX_QUEUED:
            self._fault(entry, "sandbox_error", f"{MAX_QUEUED} calls wait in this lease already; it was not run")
        else:
            if isinstance(operation, SIDE):
                self._side.append((entry, operation))
            elif isinstance(operation, Exec) and operation.concurrent:
                self._concurrent.append((entry, operation))
            else:
                self._main.append((entry, operation))
            self.start_next()

    def barrier(self, work: Callable[[], Awaitable[None]], *, beside: bool = False) -> asyncio.Future[None]:
        """Queue work on the sandbox itself; the future ends as it does (or with SandboxError, when the lease ends)."""
        barrier = Barrier(work, beside, asyncio.get_running_loop().create_future())
        if self._closed is not None:
            barrier.done.set_exception(SandboxError(self._closed[1]))
        else:
            self._main.append(barrier)
            self.start_next()
        return barrier.done

    def cancel(self, entry: JournalEntry) -> None:
        """Cancel a call: a queued one is answered at once; a running one is killed, and its result says so."""
        if entry.state == "running":
            if entry.call_id in self._streaming:
                self._streaming[entry.call_id].close()
            self.sandbox.cancel(entry.number)
        elif entry.state == "queued":
            self._unqueue(entry)
            self._answer(entry, cancelled_reply(entry.call_id))

    def close(self, code: str, message: str) -> None:
        """Stop: answer each pending call with this fault. `join` waits for what ran."""
        if self._closed is not None:
            return
        self._closed = (code, message)
        waiting = [*self._main, *self._side, *self._concurrent]
        for lane in (self._main, self._side, self._concurrent):
            lane.clear()
        for item in waiting:
            if isinstance(item, Barrier):
                if not item.done.done():
                    item.done.set_exception(SandboxError(message))
            else:
                self._fault(item[0], code, message)
        for entry in list(self._running.values()):
            self._fault(entry, code, message)
            self.sandbox.forget(entry.number)
            self._starts.ended(entry)
        self._running.clear()
        self.streams.close()
        for task in self._tasks:
            task.cancel()

    async def join(self, timeout_s: float = 10) -> None:
        """Wait until a barrier's work has ended, after `close`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def start_next(self) -> None:
        """Start what may start. Results come by callbacks: a task for each call would cost more than the call's way."""
        while self._main and not self._main_busy:
            item = self._main[0]
            if isinstance(item, Barrier):
                if self._concurrent_running and not item.beside:
                    break
                self._main_busy = self._barrier = True
                self._spawn(self._run_barrier(item))  # which takes it from the queue: until then, `close` answers it
                break
            if not self._has_room() or not self._may_start(item[1]):
                break
            self._main.popleft()
            self._main_busy = self._begin(*item, self._main_ended)
        while self._side and not self._side_busy and not self._barrier and self._has_room():
            entry, operation = self._side.popleft()
            if isinstance(operation, ProcRead) and operation.wait_s > 0:
                self._begin(entry, operation, lambda: None)
            else:
                self._side_busy = self._begin(entry, operation, self._side_ended)
        while self._concurrent and self._concurrent_running < MAX_CONCURRENT and not self._barrier and self._has_room():
            if not self._starts.admit(self):
                break
            self._concurrent_running += self._begin(*self._concurrent.popleft(), self._concurrent_ended)

    # --------------------------------------------------------------------------------------------------------- inside

    def _unqueue(self, entry: JournalEntry) -> None:
        for lane in (self._main, self._side, self._concurrent):
            for place, item in enumerate(lane):
                if not isinstance(item, Barrier) and item[0] is entry:
                    del lane[place]
                    return

    def _main_ended(self) -> None:
        self._main_busy = False

    def _side_ended(self) -> None:
        self._side_busy = False

    def _concurrent_ended(self) -> None:
        self._concurrent_running -= 1

    def _may_start(self, operation: Operation) -> bool:
        return not isinstance(operation, COMMANDS) or self._starts.admit(self)

    def _has_room(self) -> bool:
        """Whether the journal takes more; else the lanes go on when it does."""
        if self._journal.congested and not self._congested:
            self._congested = True
            self._spawn(self._wait_for_room())
        return not self._congested

    async def _wait_for_room(self) -> None:
        try:
            await self._room()
        finally:
            self._congested = False
        self.start_next()

    def _spawn(self, work: Coroutine[object, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self, entry: JournalEntry, operation: Operation, free: Callable[[], None]) -> bool:
        """Whether the call runs now; `free` is called when it has ended."""
        entry.state = "running"
        began = time.perf_counter()

        def ended(result: OpResult | Exception) -> None:
            free()
            said = "fault" if isinstance(result, Exception) else outcome(result)
            ran_s = time.perf_counter() - began
            self._meters.operation.observe(ran_s, operation.op, said)
            self._running.pop(entry.call_id, None)
            self._ended(entry, operation, result, ran_s)
            self._starts.ended(entry)
            self.start_next()

        try:
            if isinstance(operation, COMMANDS):
                self._starts.started(self, entry)
            if isinstance(operation, ReadStream | WriteStream):
                self._begin_stream(entry, operation, ended)
            else:
                self.sandbox.begin(entry.number, operation, ended)
        except Exception as error:
            self._starts.ended(entry)
            self._ended(entry, operation, error, time.perf_counter() - began)
            return False
        self._running[entry.call_id] = entry
        return True

    def _begin_stream(self, entry: JournalEntry, operation: ReadStream | WriteStream, ended: OnResult) -> None:
        """Start an operation that has a stream."""

        def broke_off() -> None:
            self.streams.end(operation.stream)
            if entry.call_id in self._streaming:
                self.sandbox.cancel(entry.number)

        def over(result: OpResult | Exception) -> None:
            self._streaming.pop(entry.call_id, None)
            if isinstance(operation, WriteStream) or stream.closed:  # else what was read may still be on its way
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
        stream.far.close()

    def _ended(self, entry: JournalEntry, operation: Operation, result: OpResult | Exception, ran_s: float) -> None:
        on_purpose = self._barrier and not self.sandbox.died.done()
        if on_purpose and isinstance(operation, SIDE) and isinstance(result, OutcomeUnknown):
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
            self._fault(entry, "outcome_unknown", f"the sandbox server failed while the call ran: {result!r}")

    async def _run_barrier(self, barrier: Barrier) -> None:
        self._main.popleft()
        try:
            if not barrier.beside:
                for entry in list(self._running.values()):
                    self.sandbox.cancel(entry.number)
            await barrier.work()
            if not barrier.done.done():
                barrier.done.set_result(None)
        except asyncio.CancelledError:
            if not barrier.done.done():
                barrier.done.set_exception(SandboxError("the lease ended meanwhile"))
            raise
        except Exception as error:
            if not barrier.done.done():
                barrier.done.set_exception(error)
        finally:
            self._barrier = self._main_busy = False
            self.start_next()

    def _fault(self, entry: JournalEntry, code: str, message: str) -> None:
        if entry.state != "done":
            self._meters.faults[code] += 1
        self._answer(entry, Fault(call_id=entry.call_id, code=code, message=message))

    def _answer(self, entry: JournalEntry, answer: Reply | Fault) -> None:
        if entry.state != "done":
            self._journal.close(entry, answer)
            self._answered(entry)
