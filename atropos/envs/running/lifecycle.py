"""Start and shutdown of `process`, `serve` and `evaluate`: signals cancel, cleanup outlives cancellation.

atroposlib runs no `finally` on SIGTERM, and on Ctrl-C in `serve` runs that of env_manager before it cancels its
workers. Here both signals cancel the main task once. Workers are cancelled and awaited, then executor, pool and files
are closed. A second signal changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any

from atropos import aio
from atropos.aio import Tasks, outlive
from atropos.envs.running.hooks import Interrupted, in_hook
from atropos.envs.running.rollout import GroupDropped

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BLOCKED_S = 1.0
"""A hook that has blocked the event loop this long is interrupted by a signal, as are later ones that block it."""
SENDS_S = 30.0
"""How long a shutdown waits for groups that are being sent to the trajectory API, all together."""
WORKERS_S = 45.0
"""How long it waits for cancelled workers, these sends included."""

_Handler = Callable[[int, FrameType | None], Any] | int | None
"""What `signal.signal` takes and returns."""

_log = logging.getLogger(__name__)


class Lifetime:
    """The running state of one command.

    Attributes:
        signal: the signal that ended it, if one did.
        fatal: the error that ended it from elsewhere than the main task.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.fatal: BaseException | None = None
        self._main: asyncio.Task[object] | None = None
        """What a signal or an error cancels; None before the run, and from where it is closed."""

    def abort(self, error: BaseException) -> None:
        """End the run because of an error in one of its tasks; the first one counts."""
        # The first: what follows while the run ends is its consequence.
        if self.fatal is None:
            self.fatal = error
            self._stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            self._stop()

    def _stop(self) -> None:
        # Cancelled, not killed: `finally` blocks release slots on the way out.
        if self._main is not None:
            self._main.cancel()

    @contextlib.asynccontextmanager
    async def running(self, close: Callable[[], Coroutine[object, object, None]]) -> AsyncGenerator[None]:
        """Run the body until it ends, fails or is cancelled by a signal; then `close()`, whatever happens.

        Existing objects are frozen for good (`gc.freeze`): with the modules of atroposlib and transformers, a full
        collection blocked the event loop for a third of a second.

        Raises:
            BaseException: the fatal error, where a task reported one.
        """
        self._main = asyncio.current_task()
        signals = _Signals(asyncio.get_running_loop(), self._on_signal)
        # First, or garbage would be frozen with the rest and never freed.
        gc.collect()
        gc.freeze()
        try:
            yield
        except asyncio.CancelledError:
            # After a signal the user expects the end of a cancelled command, not an error.
            if self.fatal is not None and self.signal is None:
                raise self.fatal from None
            raise
        finally:
            # From here on a second signal, or an error of a task that ends, must not cancel the cleanup.
            self._main = None
            try:
                # Others may cancel this task, too: atroposlib, or `asyncio.run` at the end.
                await outlive(close())
            finally:
                signals.close()


class _Signals:
    """Hands signals to the event loop, and interrupts a hook that blocks it.

    asyncio's own handlers wait for the loop, so that Ctrl-C does nothing while a hook is in `time.sleep`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handler: Callable[[signal.Signals], None]) -> None:
        self._loop = loop
        self._handler = handler
        self._before: dict[signal.Signals, _Handler] = {}
        self._alive_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = threading.Event()
        self._repeating: threading.Thread | None = None
        for number in SIGNALS:
            with contextlib.suppress(ValueError):  # not in the main thread: its owner handles signals
                self._before[number] = signal.signal(number, self._arrived)
        if self._before:
            self._beat()

    def _beat(self) -> None:
        self._alive_at = time.monotonic()
        self._timer = self._loop.call_later(BLOCKED_S / 4, self._beat)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        # Python runs signal handlers between bytecodes of the main thread; `call_soon` would not wake a loop that
        # sleeps in epoll_wait(2).
        self._loop.call_soon_threadsafe(self._handler, signal.Signals(number))
        if self._repeating is None:
            self._repeating = threading.Thread(target=self._repeat, args=(number,), daemon=True)
            self._repeating.start()
        # Nowhere else: an exception out of a handler could strike in the middle of asyncio's own bookkeeping.
        if time.monotonic() - self._alive_at > BLOCKED_S and in_hook(frame):
            raise Interrupted(f"interrupted by {signal.Signals(number).name}")

    def _repeat(self, number: int) -> None:
        """Send the signal again whenever the loop is blocked: other tasks' hooks run before the loop cancels them."""
        main = threading.main_thread().ident
        assert main is not None
        while not self._closed.wait(BLOCKED_S):
            if time.monotonic() - self._alive_at > BLOCKED_S:
                # To the main thread, as it must interrupt a blocking system call there (pthread_kill(3)).
                signal.pthread_kill(main, number)

    def close(self) -> None:
        """Put the former handlers back."""
        self._closed.set()
        if self._repeating is not None:
            # Before the handlers are put back: its last signal would meet the former ones.
            self._repeating.join()
        if self._timer is not None:
            self._timer.cancel()
        for number, before in self._before.items():
            signal.signal(number, before)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[object, object, None]) -> AsyncGenerator[None]:
    """Run `work` while the body does, and end it with the body."""
    async with Tasks("env") as tasks:
        tasks.spawn(work, work.__qualname__)
        yield


def task_group() -> AbstractAsyncContextManager[asyncio.TaskGroup]:
    """asyncio's, which raises one of its errors: a fatal one before a dropped group."""
    return aio.task_group(last=GroupDropped)


async def bounded(what: str, work: Awaitable[object], seconds: float) -> None:
    """Await one step of a shutdown. Log a failure or a timeout, and return, so that the next step runs."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        _log.warning("shutdown: %s took longer than %g s and is abandoned", what, seconds)
    except Exception:
        _log.exception("shutdown: %s failed", what)
