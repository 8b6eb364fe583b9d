"""An event loop in a thread of its own, for programs that have none or start one for each call, and its objects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from types import CoroutineType
from typing import Any, Generic, ParamSpec, TypeVar

from atropos.errors import SandboxError

P = ParamSpec("P")
T = TypeVar("T")
RELEASE_WAIT_S = 60.0
"""How long the process waits at its end for slots and pools."""
WORKERS = 8
"""Threads for the blocking calls of all pools."""
ENDING = "the process ends, and has given its slots back"


class EventLoop:
    """Runs the pools of a process, whatever its threads and their event loops do."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Not asyncio's own, whose threads start as they are needed; see `started_executor`.
        self._loop.set_default_executor(started_executor())
        self._held: dict[object, Callable[[], Coroutine[Any, Any, None]]] = {}
        """What is given back before the process ends, and how."""
        self._releases: set[Future[None]] = set()
        self._working: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._submitting = threading.Lock()
        """Held so that no work is submitted beside `close`, which would not see it."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="atropos-pools", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; an interrupt cancels it.

        Raises:
            SandboxError: the process ends.
        """
        call = _Interruptible(work)
        try:
            return self._submit(call.result()).result()
        except BaseException:
            # KeyboardInterrupt may strike before `_submit` has returned, when there is no future yet to cancel.
            self._loop.call_soon_threadsafe(call.interrupt)
            raise

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine in another event loop; its cancellation cancels it.

        Raises:
            SandboxError: the process ends.
        """
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._submitting:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(self._work(work), self._loop)
        # A coroutine that is never awaited warns when it is collected.
        work.close()
        raise SandboxError(ENDING)

    async def _work(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._closing:
                raise SandboxError(ENDING) from None
            raise
        finally:
            self._working.discard(task)

    def hold(self, held: object, give_back: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Give something back before the process ends, unless `release` did before."""
        self._held[held] = give_back

    def release(self, held: object) -> Future[None] | None:
        """Give it back in the background: this may run in any thread, where garbage is collected. Idempotent."""
        # One operation of a dict, which no other thread can be in the middle of.
        give_back = self._held.pop(held, None)
        if give_back is None:
            return None
        future = asyncio.run_coroutine_threadsafe(give_back(), self._loop)
        self._releases.add(future)
        future.add_done_callback(self._releases.discard)
        return future

    def close(self) -> None:
        """End what other threads wait for, and give everything back that is held."""
        with self._submitting:
            self._closing = True
        given_back = asyncio.run_coroutine_threadsafe(self._give_back(), self._loop)
        # Bounded: an engine that hangs must not keep the process.
        concurrent.futures.wait([given_back], timeout=RELEASE_WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _give_back(self) -> None:
        working = [*self._working]
        for task in working:
            task.cancel()
        # Before the slots go back: work that is cancelled may still use them.
        await asyncio.gather(*working, return_exceptions=True)
        for held in [*self._held]:
            self.release(held)
        await asyncio.gather(*map(asyncio.wrap_future, self._releases), return_exceptions=True)


class _Interruptible(Generic[T]):
    """A coroutine in the event loop, which its caller may interrupt before it has a future to cancel."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._interrupted = False

    async def result(self) -> T:
        """The coroutine's."""
        self._task = asyncio.current_task()
        if self._interrupted:
            self._work.close()
            raise asyncio.CancelledError
        return await self._work

    def interrupt(self) -> None:
        """Cancel it, where it hasn't ended."""
        # Before it has begun there is no task to cancel: then `result` looks here.
        self._interrupted = True
        if self._task is not None:
            self._task.cancel()


def started_executor() -> ThreadPoolExecutor:
    """An executor with all its threads started: an exiting process can start none, and pools need them to close."""
    executor = ThreadPoolExecutor(WORKERS, "atropos-pools")
    # A thread is started only where none is idle: each must wait until all are there.
    started = threading.Barrier(WORKERS + 1)
    for _ in range(WORKERS):
        executor.submit(started.wait)
    started.wait()
    return executor


class _Process:
    """The event loop of this process, if it was asked for. `starting`: held while it is made."""

    loop: EventLoop | None
    starting: threading.Lock

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """There is no loop, as in a child that was just forked: the threads are its parent's, and so are the slots."""
        self.loop, self.starting = None, threading.Lock()

    def close(self) -> None:
        """The process ends."""
        if self.loop is not None:
            self.loop.close()


_process = _Process()
os.register_at_fork(after_in_child=_process.begin)
# `atexit` comes too late: by then executors take no more work.
threading._register_atexit(_process.close)  # type: ignore[attr-defined]  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]


def event_loop() -> EventLoop:
    """The process's, started on first use; hosts' workers may ask for it at the same time."""
    with _process.starting:
        if _process.loop is None:
            _process.loop = EventLoop()
        return _process.loop


def release(held: object) -> Future[None] | None:
    """Give something back in the background.

    None: it was, or it is that of the process that this one was forked from.
    """
    return None if _process.loop is None else _process.loop.release(held)


def in_event_loop(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, CoroutineType[Any, Any, T]]:
    """Run a method in the process's event loop, and wait for it in any."""

    @wraps(method)
    async def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        return await event_loop().wait(method(*args, **kwargs))

    return waiting
