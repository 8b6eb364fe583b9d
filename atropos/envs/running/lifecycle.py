"""One way in and one way out for `process`, `serve` and `evaluate`: signals cancel, cleanup outlives cancellation.

atroposlib runs no `finally` on SIGTERM, and on Ctrl-C in `serve` runs env_manager's before its workers are cancelled.
Here both signals cancel the main task once; workers are cancelled and awaited, then executor, pool and files are
closed; a second signal changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

from atropos.aio import outlive

SIGNALS = (signal.SIGTERM, signal.SIGINT)
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
        self._main: asyncio.Task[Any] | None = None
        self._closing = False

    def abort(self, error: BaseException) -> None:
        """End the run because of an error in one of its tasks; the first one counts."""
        if self.fatal is None:
            self.fatal = error
            self._stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            self._stop()

    def _stop(self) -> None:
        if self._main is not None and not self._closing:
            self._main.cancel()

    @contextlib.asynccontextmanager
    async def running(self, close: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[None]:
        """Run the body until it ends, fails or is told to; then `close()`, whatever happens.

        Raises:
            BaseException: the fatal error, where a task reported one.
        """
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        handled = list(_install(loop, self._on_signal))
        try:
            yield
        except asyncio.CancelledError:
            if self.fatal is not None and self.signal is None:
                raise self.fatal from None
            raise
        finally:
            self._closing = True
            try:
                await outlive(close())
            finally:
                for number in handled:
                    loop.remove_signal_handler(number)
                self._main = None
                self._closing = False


def _install(loop: asyncio.AbstractEventLoop, handler: Callable[[signal.Signals], None]) -> Iterable[signal.Signals]:
    for number in SIGNALS:
        try:
            loop.add_signal_handler(number, handler, number)
        except (ValueError, RuntimeError, NotImplementedError):  # not in the main thread: its owner handles signals
            continue
        yield number


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run `work` while the body does, and end it with the body."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        await cancel_and_wait([task])


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until each is over; their errors are theirs."""
    alive = [task for task in tasks if task is not None and task is not asyncio.current_task()]
    for task in alive:
        task.cancel()
    await asyncio.gather(*alive, return_exceptions=True)


async def bounded(what: str, work: Awaitable[Any], seconds: float) -> None:
    """Await a step of a shutdown; when it fails or takes too long, say so and go on with the next."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        _log.warning("shutdown: %s took longer than %g s; left behind", what, seconds)
    except Exception:
        _log.exception("shutdown: %s failed", what)
