"""What asyncio leaves to its users: owners of tasks, work that outlives a cancellation, retries, cheap reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")
log = logging.getLogger("atropos")
TICK_S = 1.0
"""How often an `Allowance` looks at the clock; what passes in between without a look is not counted."""
RECEIVE_BYTES = 65_536
"""Most bytes of one read. glibc maps a buffer of 128 KiB or more anew for each read and gives it back: on Linux 6.18 in
a virtual machine that takes 17 µs, ten times the read of a small frame."""


def receive_small(transport: asyncio.BaseTransport | None) -> None:
    """Have a transport of asyncio's own read at most `RECEIVE_BYTES` at once, instead of 256 KiB; others stay."""
    if hasattr(transport, "max_size"):
        transport.max_size = RECEIVE_BYTES  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def first_of(error: BaseException) -> BaseException:
    """The first error in a group, however deep it is; another error is returned as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.asynccontextmanager
async def task_group(
    last: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> AsyncGenerator[asyncio.TaskGroup]:
    """asyncio's, which raises its first error as it is; one of the kinds `last` only where there is no other."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        _, others = errors.split(last)
        # One error: callers catch kinds of errors, not groups. The others mostly follow from it.
        first = first_of(others or errors)
        raise first from first.__cause__


async def outlive(work: Coroutine[object, None, None]) -> None:
    """Finish `work` even when the caller is cancelled meanwhile; the cancellation follows it.

    Where the work fails as well, the cancellation is raised and its cause is that failure: neither is lost.
    """
    # A task of its own: cancelling the caller cancels the wait below, and not the work.
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            # Kept and raised at the end; the loop waits on, however often the caller is cancelled.
            cancelled = error
    if cancelled is None:
        task.result()
    else:
        raise cancelled from (None if task.cancelled() else task.exception())


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any] | None], seconds: float | None = None) -> bool:
    """Cancel tasks and wait until all have ended, at most this long; whether they have. Their errors are ignored.

    None among them and the current task are left out.
    """
    alive = [task for task in tasks if task is not None and task is not asyncio.current_task()]
    for task in alive:
        task.cancel()
    _, late = await asyncio.wait([asyncio.gather(*alive, return_exceptions=True)], timeout=seconds)
    return not late


async def race(*work: Coroutine[object, object, T]) -> T:
    """Run these side by side until the first has ended, and cancel the others; its result, or its error."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # Of all that have ended: where two end at once, an error must not be lost behind a result.
        results = [task.result() for task in tasks if task.done()]
        return results[0]
    finally:
        await cancel_and_wait(tasks)


class Tasks:
    """The tasks that one object started, which ends them before it ends itself: none is lost, none fails in silence.

    As a context, it cancels those that still run at the end of its body; unlike a `TaskGroup`, whose body waits for
    them and is cancelled when one fails.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    def spawn(self, work: Coroutine[object, object, T], name: str, *, awaited: bool = False) -> asyncio.Task[T]:
        """Start a task. Unless its caller awaits it (`awaited`), a failure is logged with its traceback."""
        task = asyncio.create_task(work, name=f"{self._owner}: {name}")
        self._tasks.add(task)
        # The set also keeps the task alive: the event loop has weak references alone (asyncio.create_task).
        task.add_done_callback(self._tasks.discard)
        if not awaited:
            task.add_done_callback(_log_failure)
        return task

    async def settle(self, timeout_s: float | None, cancelled_s: float | None = None) -> None:
        """Wait until all have ended, at most this long; then cancel the rest and await it, at most `cancelled_s`."""
        me = asyncio.current_task()
        if others := [task for task in self._tasks if task is not me]:
            await asyncio.wait(others, timeout=timeout_s)
        await self.cancel(cancelled_s)

    def stop(self) -> None:
        """Cancel all, and wait for none."""
        # A copy: `discard` runs as tasks end.
        for task in [*self._tasks]:
            task.cancel()

    async def cancel(self, seconds: float | None = None) -> None:
        """Cancel all and wait until they have ended, at most this long; their failures were logged."""
        await cancel_and_wait(self._tasks, seconds)


def _log_failure(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)


@contextlib.contextmanager
def cancelled_from_outside(kind: type[Exception] = RuntimeError) -> Generator[None]:
    """Around code that isn't ours: a cancellation that is not its task's is an error, else the task would just vanish.

    Raises:
        Exception: of this kind: the code awaited something that others cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        # `cancelling` counts the requests to this very task (Python 3.11); a subclass is our own, as `Interrupted`.
        if type(error) is not asyncio.CancelledError or task is None or task.cancelling():
            raise
        raise kind("what it awaited was cancelled, and not by its caller") from error


async def done_within(future: asyncio.Future[Any], seconds: float) -> bool:
    """Wait until a future is done, at most this long, and cancel nothing; whether it is.

    Time in which this process did not run (it was stopped, its container frozen) is not counted: what should have ended
    the wait did not run then either, or could not be seen.
    """
    while seconds > 0 and not future.done():
        # In steps, each of which counts at most as itself however long the process stood still within it.
        step = min(seconds, 0.5)
        await asyncio.wait([future], timeout=step)
        seconds -= step
    return future.done()


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, at most this long (None: without end); whether it came.

    `wait_for` may swallow a cancellation.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Allowance:
    """A time limit that counts at most a second of a stall, in which this process had no CPU or some code blocked.

    What the body waits for may have arrived during the stall, unseen.

    Attributes:
        expired: whether a `limit` ended its body.
    """

    def __init__(self, seconds: float | None) -> None:
        self.expired = False
        self._loop = asyncio.get_running_loop()
        self._seen = self._loop.time()
        self._end = math.inf if seconds is None else self._seen + seconds
        self._limit: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._end < math.inf:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left_s(self) -> float:
        """What is left, in seconds."""
        self._look()
        return self._end - self._loop.time()

    def extend(self, seconds: float) -> None:
        """Give back time that was not the body's; not within a `limit`."""
        self._end += seconds

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """End the body with `TimeoutError` when nothing is left; one at a time."""
        async with asyncio.timeout(self.left_s) as limit:
            self._limit = limit
            try:
                yield
            finally:
                self.expired = limit.expired()
                self._limit = None

    @contextlib.asynccontextmanager
    async def once(self) -> AsyncGenerator[None]:
        """`limit` of the only body that there is."""
        if self._end == math.inf:
            yield
            return
        with self:
            async with self.limit():
                yield

    def _tick(self) -> None:
        self._look()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _look(self) -> None:
        now = self._loop.time()
        passed, self._seen = now - self._seen, now
        # Later than the timer could be by itself: the loop stood still.
        if passed > 2 * TICK_S:
            self._end += passed - TICK_S
            # asyncio refuses to reschedule a time-out that has struck.
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._end)


async def off_loop(size: int, most: int, work: Callable[..., T], *arguments: object) -> T:
    """Call `work` on an input of this size: in a thread if it is larger than `most`, so that no other task waits."""
    return work(*arguments) if size <= most else await asyncio.to_thread(work, *arguments)


def backoff_s(attempt: int, *, first_s: float, longest_s: float) -> float:
    """Seconds to wait after failure number `attempt`, from 0: doubling from `first_s`, half of it at random.

    The random half keeps clients that failed together from coming back together (AWS' "equal jitter").
    """
    # min: after a day of failures the power would exceed a float.
    return min(longest_s, first_s * 2 ** min(attempt, 30)) * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Seconds from now that a Retry-After header asks for, as a number or a date; 0 where it asks for none."""
    from email.utils import parsedate_to_datetime  # which the programs of a sandbox server do without

    try:
        seconds = float(header or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header or "").timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    # `float` also reads "inf" and "nan", which no comparison holds for.
    return seconds if 0 < seconds < math.inf else 0.0


@dataclass
class Backoff:
    """The pauses of `backoff_s` between attempts of which some succeed.

    Attributes:
        failures: in a row.
    """

    first_s: float
    longest_s: float
    failures: int = 0
    _until: float = 0.0

    def failed(self) -> float:
        """Count a failure; returns how long to wait, in seconds."""
        pause = backoff_s(self.failures, first_s=self.first_s, longest_s=self.longest_s)
        self.failures += 1
        self._until = time.monotonic() + pause
        return pause

    def worked(self) -> None:
        """Reset after a success."""
        self.failures, self._until = 0, 0.0

    @property
    def left_s(self) -> float:
        """Time until the next attempt, in seconds."""
        return max(0.0, self._until - time.monotonic())
