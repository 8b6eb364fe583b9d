"""Sandboxes started ahead, so that a lease takes one from here instead of waiting for it.

The pool is kept filled to a target: the free slots and some spare ones, so that a slot can be leased again before its next
sandbox has started. There are two kinds, with a network and without, kept in the proportion of the last requests. Starts run a few at a time; failures back off, and too many in a row are reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable

from atropos.aio import done_within
from atropos.errors import BackendUnavailable, SandboxError
from atropos.sandbox.contract import Host, HostBroken, Sandbox, Stopped

log = logging.getLogger(__name__)
RECENT = 16
"""Latest requests, whose kinds decide which sandboxes are started ahead."""
KINDS = (False, True)
BACKOFF_S = (0.05, 0.2, 1.0, 2.0, 5.0)
"""Pauses after failed starts, in seconds. When one fails that began after the last pause, the pool is broken; a broken host has
none."""
STOP_S = 30.0
"""Longest stop of a sandbox before it counts as not clean, in seconds."""


class WarmPool:
    """Started sandboxes that nobody has used yet.

    Args:
        host: makes them.
        target: how many there should be right now.
        parallel: starts at once.
        broken: called with the reason when starts keep failing.
        network: the kind to start before the first request.
    """

    def __init__(
        self,
        host: Host,
        *,
        target: Callable[[], int],
        parallel: int,
        broken: Callable[[str], None],
        network: bool,
    ) -> None:
        self._host = host
        self._target = target
        self._broken = broken
        self._unasked = network
        self._slots = asyncio.Semaphore(parallel)
        self._names = itertools.count(1)
        self._ready: dict[bool, deque[Sandbox]] = {kind: deque() for kind in KINDS}
        self._waiting: dict[bool, deque[asyncio.Future[Sandbox]]] = {kind: deque() for kind in KINDS}
        self._starts: dict[asyncio.Task[None], bool] = {}
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._stops: set[asyncio.Task[None]] = set()
        self._failures = dict.fromkeys(KINDS, 0)
        self._paused_until = dict.fromkeys(KINDS, 0.0)
        self._closed = False
        self.started = 0

    @property
    def ready(self) -> int:
        """Sandboxes in the pool."""
        return sum(map(len, self._ready.values()))

    @property
    def warming(self) -> int:
        """Sandboxes being started for it."""
        return len(self._starts)

    def has(self, *, network: bool) -> bool:
        """Whether `take` finds one at once."""
        return bool(self._ready[network])

    def fill(self) -> None:
        """Start missing sandboxes in the background."""
        if self._closed:
            return
        for network, wanted in self._wanted().items():
            ready = self._ready[network]
            starting = sum(kind is network for kind in self._starts.values())
            for _ in range(wanted + len(self._waiting[network]) - len(ready) - starting):
                task = asyncio.get_running_loop().create_task(self._start_one(network=network))
                self._starts[task] = network
                task.add_done_callback(self._over)
            while len(ready) > wanted + RECENT // 4:  # the requests changed
                self.drop(ready.popleft(), "its kind is no longer requested")

    def _wanted(self) -> dict[bool, int]:
        """How many of each kind there should be, by the latest requests."""
        total = self._target()
        recent = self._recent or (self._unasked,)
        with_network = round(total * sum(recent) / len(recent))
        return {False: total - with_network, True: with_network}

    async def take(self, timeout_s: float, *, network: bool = False) -> Sandbox:
        """A warm sandbox, or the next one that starts.

        Raises:
            BackendUnavailable: none came within the time.
        """
        self._recent.append(network)
        ready, waiting = self._ready[network], self._waiting[network]
        while ready:
            sandbox = ready.popleft()
            if not sandbox.died.done():
                return sandbox
            self.drop(sandbox, "it died before it was used")
        if self._closed:
            raise BackendUnavailable("the sandbox server is ending")
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        self.fill()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException as error:
            with contextlib.suppress(ValueError):
                waiting.remove(future)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._put(future.result(), network=network)  # it started just as its taker was cancelled
            if not isinstance(error, TimeoutError):
                raise
            failures = f"{self._failures[network]} starts failed in a row"
            raise BackendUnavailable(f"no sandbox could be started within {timeout_s:g} s ({failures})") from None

    def drop(self, sandbox: Sandbox, why: str) -> None:
        """Stop an unused sandbox."""

        async def end() -> None:
            log.info("unused sandbox %s is dropped: %s", sandbox.name, why)
            stopped = await stop(sandbox)
            if not stopped.clean:
                log.error("unused sandbox %s could not be confirmed gone: %s", sandbox.name, stopped.detail)
            self.fill()

        task = asyncio.get_running_loop().create_task(end())
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def aclose(self) -> list[Stopped]:
        """Stop all sandboxes; returns how each stopped."""
        self._closed = True
        for future in itertools.chain(*self._waiting.values()):
            if not future.done():
                future.set_exception(BackendUnavailable("the sandbox server is ending"))
        if self._starts:
            # A start that is interrupted might leave something; one that ends puts its sandbox in the pool.
            await asyncio.wait(self._starts, timeout=STOP_S)
        for task in self._starts:
            task.cancel()
        if self._stops:
            await asyncio.wait(self._stops, timeout=STOP_S)
        sandboxes = list(itertools.chain(*self._ready.values()))
        for ready in self._ready.values():
            ready.clear()
        return list(await asyncio.gather(*(stop(sandbox) for sandbox in sandboxes)))

    # --------------------------------------------------------------------------------------------------------- inside

    async def _start_one(self, *, network: bool) -> None:
        began = time.monotonic()
        try:
            async with self._slots:
                if self._closed:
                    return
                began = time.monotonic()
                sandbox = await self._host.start(f"s{next(self._names)}", network=network)
        except Exception as error:
            if not isinstance(error, SandboxError):
                log.exception("a sandbox could not be started")
            if began >= self._paused_until[network]:  # else it is one failure with those that began beside it
                self._failed(error, network=network)
            await asyncio.sleep(max(0.0, self._paused_until[network] - time.monotonic()))
            return
        self._failures[network] = 0
        self.started += 1
        self._put(sandbox, network=network)

    def _failed(self, error: Exception, *, network: bool) -> None:
        self._failures[network] += 1
        failures = self._failures[network]
        log.warning("starting a sandbox failed (%d in a row): %s", failures, error)
        over = isinstance(error, HostBroken)
        if over or failures > len(BACKOFF_S):
            self._refuse_waiting(error, network=network)
            if network and not over:  # those without one may still start: this kind is stopped, until it is requested
                self._failures[network] = 0
                self._recent.clear()
                self._unasked = False
            else:
                self._broken(f"sandboxes can't be started any more: {error}")
            return
        self._paused_until[network] = time.monotonic() + BACKOFF_S[failures - 1]

    def _over(self, start: asyncio.Task[None]) -> None:
        """Remove an ended start from the count, and refill."""
        del self._starts[start]
        self.fill()

    def _refuse_waiting(self, error: Exception, *, network: bool) -> None:
        waiting = self._waiting[network]
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_exception(BackendUnavailable(f"sandboxes can't be started any more: {error}"))

    def _put(self, sandbox: Sandbox, *, network: bool) -> None:
        waiting = self._waiting[network]
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(sandbox)
                return
        self._ready[network].append(sandbox)
        sandbox.died.add_done_callback(lambda _: self._discard_dead(sandbox))

    def _discard_dead(self, sandbox: Sandbox) -> None:
        """Remove a sandbox that died unused."""
        for ready in self._ready.values():
            if sandbox in ready:
                ready.remove(sandbox)
                self.drop(sandbox, sandbox.died.result())


async def stop(sandbox: Sandbox) -> Stopped:
    """Stop a sandbox, bounded in time; a failure or a timeout is `not clean`."""
    stopping = asyncio.get_running_loop().create_task(sandbox.stop())
    if not await done_within(stopping, STOP_S):
        return Stopped(clean=False, seconds=STOP_S, detail=f"the sandbox did not end within {STOP_S:g} s")
    if (error := stopping.exception()) is not None:
        log.error("stopping sandbox %s failed", sandbox.name, exc_info=error)
        return Stopped(clean=False, seconds=0, detail=f"stopping failed: {error!r}")
    return stopping.result()
