"""Sandboxes started ahead, so that a lease takes one from here instead of waiting for it.

The pool is kept filled to a target: the free slots and some spare ones, so that a slot can be leased again before its
next sandbox has started. There are two kinds, with a network and without, kept in the proportion of the last requests.
Starts run a few at a time; failures back off, and too many in a row are reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atropos.aio import Tasks, done_within
from atropos.errors import BackendUnavailable, SandboxError
from atropos.sandbox.contract import Host, HostBroken, Sandbox, Stopped

log = logging.getLogger(__name__)
PARALLEL_STARTS = 4
"""Sandboxes started at once: measured on 2 cores, more only makes each slower."""
RECENT = 16
"""Latest requests, whose kinds decide which sandboxes are started ahead."""
BACKOFF_S = (0.05, 0.2, 1.0, 2.0, 5.0)
"""Pauses after failed starts, in seconds. When one fails that began after the last pause, the pool is broken; a broken
host has none."""
STOP_S = 30.0
"""Longest stop of a sandbox before it counts as not clean, in seconds."""


@dataclass(slots=True)
class _Kind:
    """The sandboxes with a network, or those without."""

    network: bool
    ready: deque[Sandbox] = field(default_factory=deque[Sandbox])
    waiting: deque[asyncio.Future[Sandbox]] = field(default_factory=deque["asyncio.Future[Sandbox]"])
    starts: Tasks = field(default_factory=lambda: Tasks("warm pool"))
    failures: int = 0
    """Failed starts in a row; those side by side are one."""
    paused_until: float = 0.0


class WarmPool:
    """Started sandboxes that nobody has used yet.

    Args:
        host: makes them.
        target: how many there should be right now.
        broken: called with the reason when starts keep failing.
        network: the kind to start before the first request.
    """

    def __init__(
        self,
        host: Host,
        *,
        target: Callable[[], int],
        broken: Callable[[str], None],
        network: bool,
    ) -> None:
        self._host = host
        self._target = target
        self._broken = broken
        self._unasked = network
        self._slots = asyncio.Semaphore(PARALLEL_STARTS)
        self._names = itertools.count(1)
        self._kinds = _Kind(network=False), _Kind(network=True)
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._stops = Tasks("warm pool")
        self._closed = False
        self.started = 0

    @property
    def ready(self) -> int:
        """Sandboxes in the pool."""
        return sum(len(kind.ready) for kind in self._kinds)

    @property
    def warming(self) -> int:
        """Sandboxes being started for it."""
        return sum(len(kind.starts) for kind in self._kinds)

    def has(self, *, network: bool) -> bool:
        """Whether `take` finds one at once."""
        return bool(self._kinds[network].ready)

    def fill(self) -> None:
        """Start missing sandboxes in the background."""
        if self._closed:
            return
        for kind, count in zip(self._kinds, self._wanted(), strict=True):
            for _ in range(count + len(kind.waiting) - len(kind.ready) - len(kind.starts)):
                # Each end looks again: a failed start is replaced, and the target may have changed meanwhile.
                kind.starts.spawn(self._start_one(kind), "start").add_done_callback(lambda _: self.fill())
            while len(kind.ready) > count + RECENT // 4:  # the requests changed
                self.drop(kind.ready.popleft(), "its kind is no longer requested")

    def _wanted(self) -> tuple[int, int]:
        """How many without and with a network there should be, by the latest requests."""
        total = self._target()
        recent = self._recent or (self._unasked,)
        # True counts as one.
        with_network = round(total * sum(recent) / len(recent))
        return total - with_network, with_network

    async def take(self, timeout_s: float, *, network: bool = False) -> Sandbox:
        """A warm sandbox, or the next one that starts.

        Raises:
            BackendUnavailable: none came within the time.
        """
        self._recent.append(network)
        kind = self._kinds[network]
        while kind.ready:
            sandbox = kind.ready.popleft()
            if not sandbox.died.done():
                return sandbox
            self.drop(sandbox, "it died before it was used")
        if self._closed:
            raise BackendUnavailable("the sandbox server is ending")
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        kind.waiting.append(future)
        self.fill()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException as error:
            with contextlib.suppress(ValueError):
                kind.waiting.remove(future)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._put(kind, future.result())  # it started just as its requester was cancelled
            if not isinstance(error, TimeoutError):
                raise
            failures = f"{kind.failures} starts failed in a row"
            raise BackendUnavailable(f"no sandbox could be started within {timeout_s:g} s ({failures})") from None

    def drop(self, sandbox: Sandbox, why: str) -> None:
        """Stop an unused sandbox."""

        async def end() -> None:
            log.info("unused sandbox %s is dropped: %s", sandbox.name, why)
            stopped = await stop(sandbox)
            if not stopped.clean:
                log.error("unused sandbox %s could not be confirmed gone: %s", sandbox.name, stopped.detail)
            self.fill()

        self._stops.spawn(end(), f"stop {sandbox.name}")

    async def aclose(self) -> list[Stopped]:
        """Stop all sandboxes; returns how each stopped."""
        self._closed = True
        for kind in self._kinds:
            self._refuse_waiting(kind, "the sandbox server is ending")
        # A start that is interrupted might leave something; one that ends puts its sandbox in the pool.
        await asyncio.gather(*(kind.starts.settle(STOP_S, 0) for kind in self._kinds))
        await self._stops.settle(STOP_S, 0)
        sandboxes = [sandbox for kind in self._kinds for sandbox in kind.ready]
        for kind in self._kinds:
            kind.ready.clear()
        return list(await asyncio.gather(*map(stop, sandboxes)))

    # --------------------------------------------------------------------------------------------------------- inside

    async def _start_one(self, kind: _Kind) -> None:
        began = time.monotonic()
        try:
            async with self._slots:
                if self._closed:
                    return
                # Again: the wait for a place is no part of the start that may fail.
                began = time.monotonic()
                sandbox = await self._host.start(f"s{next(self._names)}", network=kind.network)
        except Exception as error:
            if not isinstance(error, SandboxError):
                log.exception("a sandbox could not be started")
            if began >= kind.paused_until:  # otherwise it counts as one failure with those started at the same time
                self._failed(kind, error)
            await asyncio.sleep(max(0.0, kind.paused_until - time.monotonic()))
            return
        # One success proves that the host can.
        kind.failures = 0
        self.started += 1
        self._put(kind, sandbox)

    def _failed(self, kind: _Kind, error: Exception) -> None:
        kind.failures += 1
        log.warning("starting a sandbox failed (%d in a row): %s", kind.failures, error)
        over = isinstance(error, HostBroken)
        if not over and kind.failures <= len(BACKOFF_S):
            kind.paused_until = time.monotonic() + BACKOFF_S[kind.failures - 1]
            return
        reason = f"sandboxes can't be started any more: {error}"
        self._refuse_waiting(kind, reason)
        if kind.network and not over:  # those without a network may still start: pause this kind until it is requested
            kind.failures = 0
            self._recent.clear()
            self._unasked = False
        else:
            self._broken(reason)

    def _refuse_waiting(self, kind: _Kind, reason: str) -> None:
        while kind.waiting:
            future = kind.waiting.popleft()
            if not future.done():
                future.set_exception(BackendUnavailable(reason))

    def _put(self, kind: _Kind, sandbox: Sandbox) -> None:
        """Give a sandbox to who waits for one, or keep it ready."""
        while kind.waiting:
            future = kind.waiting.popleft()
            if not future.done():
                future.set_result(sandbox)
                return
        kind.ready.append(sandbox)
        # A dead one is replaced before a lease meets it.
        sandbox.died.add_done_callback(lambda _: self._discard_dead(kind, sandbox))

    def _discard_dead(self, kind: _Kind, sandbox: Sandbox) -> None:
        """Remove a sandbox that died unused."""
        if sandbox in kind.ready:
            kind.ready.remove(sandbox)
            self.drop(sandbox, sandbox.died.result())


async def stop(sandbox: Sandbox) -> Stopped:
    """Stop a sandbox, bounded in time; a failure or a timeout is `not clean`."""
    async with Tasks(f"sandbox {sandbox.name}") as tasks:
        stopping = tasks.spawn(sandbox.stop(), "stop", awaited=True)
        if not await done_within(stopping, STOP_S):
            return Stopped(clean=False, seconds=STOP_S, detail=f"the sandbox did not end within {STOP_S:g} s")
    if (error := stopping.exception()) is not None:
        log.error("stopping sandbox %s failed", sandbox.name, exc_info=error)
        return Stopped(clean=False, seconds=0, detail=f"stopping failed: {error!r}")
    return stopping.result()
