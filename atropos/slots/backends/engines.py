"""What backends of engines share: a flag for `changed()`, a rate limit, outages, blocking calls, retries."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from atropos.aio import Backoff, set_within
from atropos.errors import BackendUnavailable

log = logging.getLogger("atropos.slots")
T = TypeVar("T")


class ChangeFlag:
    """An event that each wait clears."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Something changed."""
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a change since the last wait, at most `timeout_s` seconds."""
        # Cleared only after a change: one that comes just as the time runs out stays for the next wait.
        if await set_within(self._event, timeout_s):
            self._event.clear()


class Pace:
    """A rate limit: `burst` turns at once, then one every `every_s` seconds.

    Attributes:
        every_s: may be changed between turns.
    """

    def __init__(self, every_s: float, *, burst: int) -> None:
        self.every_s = every_s
        self._burst = burst
        self._due = 0.0

    async def turn(self) -> None:
        """Wait for the next turn."""
        now = time.monotonic()
        # A token bucket as one number: the time of the next turn, at most `burst` turns in the past.
        self._due = max(self._due, now - self._burst * self.every_s) + self.every_s
        await asyncio.sleep(max(0.0, self._due - now))


class Outage:
    """Whether an engine answers, and for how long it hasn't; `patience_s` is the pool's `outage_s`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._cure = ""
        self._until = ""
        self.reason = ""
        """The last request's error; empty while the engine answers."""

    @property
    def away_s(self) -> float:
        """How long it has not answered, in seconds; 0 while it answers."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def noted(self, error: BackendUnavailable, until: str = "the engine answers") -> None:
        """A request failed; the first failure is logged. `until`: what ends the outage."""
        # The latest reason; only the first is logged.
        self.reason, self._until = str(error), until
        self._cure = ": restart the engine, or raise outage_s" if error.retryable else ""  # else the reason has it
        if self._since is None:
            self._since = time.monotonic()
            log.warning("%s; running containers stay in use, and none can be added until %s", self.reason, until)

    def over(self) -> bool:
        """A request was answered; whether that ends an outage."""
        if self._since is None:
            return False
        log.warning("%s again, after %.0f s", self._until, self.away_s)
        self._since, self.reason = None, ""
        return True

    def failure(self) -> BackendUnavailable | None:
        """An error once it has been away for longer than `outage_s`."""
        if self._since is None or self.away_s < self._patience_s:
            return None
        text = f"that has been so for longer than outage_s ({self._patience_s:g} s)"
        return BackendUnavailable(f"{self.reason}; {text}{self._cure}")


class BlockingCalls:
    """Runs an SDK's blocking calls in daemon threads.

    The end of a process waits for an executor's threads, which an engine that doesn't answer would delay.
    """

    def __init__(self, name: str, *, at_once: int) -> None:
        self._name = name
        self._turns = asyncio.Semaphore(at_once)
        self._pending: set[Future[object]] = set()

    async def run(self, call: Callable[[], T], *, changes: bool = False) -> T:
        """Run a call. It continues if the caller is cancelled; with `changes`, `settled` then waits for its end."""
        # Bounded here: there is no executor that would queue them.
        async with self._turns:
            future = in_thread(call, self._name)
            if changes:
                self._pending.add(future)  # type: ignore[arg-type]
                future.add_done_callback(self._pending.discard)  # type: ignore[arg-type]
            # Cancelling it reaches no running thread: the call goes on.
            return await asyncio.wrap_future(future)

    async def settled(self, within_s: float) -> None:
        """Wait for calls with `changes` whose callers were cancelled, so that their effects can be undone."""
        if waits := [asyncio.wrap_future(future) for future in self._pending]:
            await asyncio.wait(waits, timeout=within_s)
            for each in waits:
                if not each.cancel() and not each.cancelled():
                    each.exception()  # retrieved, since its caller is gone


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run a blocking call in a daemon thread."""
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, call), name=name, daemon=True).start()
    return future


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    # Cancelled before the thread began; afterwards a future can't be cancelled any more.
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    # BaseException, too: who awaits the future would wait forever.
    except BaseException as error:
        future.set_exception(error)


async def persist(action: Callable[[], Awaitable[None]], within_s: Callable[[BackendUnavailable], float]) -> None:
    """Retry an action that an engine refuses, for as many seconds as `within_s` returns for the error.

    Raises:
        BackendUnavailable: the engine still refuses, or the error is not retryable.
    """
    backoff = Backoff(first_s=0.2, longest_s=2)
    started = time.monotonic()
    while True:
        try:
            return await action()
        except BackendUnavailable as error:
            if not error.retryable or time.monotonic() > started + within_s(error):
                raise
        await asyncio.sleep(backoff.failed())
