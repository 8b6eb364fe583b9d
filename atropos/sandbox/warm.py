"""Sandboxes started ahead, so that a lease takes one from the shelf instead of waiting for it.

The shelf is kept filled to a target (the free slots and some spare ones, so that a slot that is released can be leased
again before its successor has started). Starts run a few at a time; failures back off, and too many in a row say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from atropos.errors import BackendUnavailable, SandboxError
from atropos.sandbox.contract import Host, Layer, Sandbox, Stopped

log = logging.getLogger(__name__)
BACKOFF_S = (0.05, 0.2, 1.0, 2.0, 5.0)
"""Pauses after failed starts; their number is how many may fail in a row before the shelf is called broken."""
STOP_S = 30.0
"""Longest a stop is waited for before the sandbox counts as not clean, in seconds."""


class Shelf:
    """Started sandboxes that nobody has used yet.

    Args:
        host: makes them.
        target: how many there should be right now.
        parallel: starts at once.
        broken: called when starts keep failing, with the reason.
    """

    def __init__(
        self,
        host: Host,
        *,
        target: Callable[[], int],
        parallel: int,
        broken: Callable[[str], None],
        network: bool = False,
    ) -> None:
        self._host = host
        self._target = target
        self._broken = broken
        self.network = network
        """Whether what stands on the shelf has a network."""
        self._slots = asyncio.Semaphore(parallel)
        self._names = itertools.count(1)
        self._ready: deque[Sandbox] = deque()
        self._waiting: deque[asyncio.Future[Sandbox]] = deque()
        self._starts: set[asyncio.Task[None]] = set()
        self._stops: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._closed = False
        self.started = 0

    @property
    def ready(self) -> int:
        """Sandboxes on the shelf."""
        return len(self._ready)

    @property
    def warming(self) -> int:
        """Sandboxes being started for the shelf."""
        return len(self._starts)

    def fill(self) -> None:
        """Start what is missing; returns at once."""
        if self._closed:
            return
        missing = self._target() + len(self._waiting) - len(self._ready) - len(self._starts)
        for _ in range(missing):
            task = asyncio.get_running_loop().create_task(self._start_one())
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def take(self, timeout_s: float) -> Sandbox:
        """A sandbox that was started ahead, or the next one to come.

        Raises:
            BackendUnavailable: none came within the time.
        """
        while self._ready:
            sandbox = self._ready.popleft()
            if not sandbox.died.done():
                return sandbox
            self._drop(sandbox)
        if self._closed:
            raise BackendUnavailable("the sandbox server is ending")
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.fill()
        taken = False
        try:
            async with asyncio.timeout(timeout_s):
                sandbox = await future
            taken = True
            return sandbox
        except TimeoutError:
            message = f"no sandbox could be started within {timeout_s:g} s ({self._failures} starts failed in a row)"
            raise BackendUnavailable(message) from None
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(future)
            if not taken and not future.cancel() and not future.cancelled() and future.exception() is None:
                self._put(future.result())  # it came in the moment in which the taker gave up

    async def start(self, layers: Sequence[Layer], base: str | None, *, network: bool) -> Sandbox:
        """Start one to order, not from the shelf.

        Raises:
            SandboxError: it could not be started.
        """
        async with self._slots:
            sandbox = await self._host.start(self._name(), layers=layers, base=base, network=network)
        self.started += 1
        return sandbox

    async def aclose(self) -> list[Stopped]:
        """Stop everything on the shelf. Returns what was found of each."""
        self._closed = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(BackendUnavailable("the sandbox server is ending"))
        if self._starts:
            # A start that is interrupted might leave something; one that ends puts its sandbox on the shelf.
            await asyncio.wait(self._starts, timeout=STOP_S)
        for task in self._starts:
            task.cancel()
        if self._stops:
            await asyncio.wait(self._stops, timeout=STOP_S)
        sandboxes = list(self._ready)
        self._ready.clear()
        return list(await asyncio.gather(*(stop(sandbox) for sandbox in sandboxes)))

    # --------------------------------------------------------------------------------------------------------- inside

    def _name(self) -> str:
        return f"s{next(self._names)}"

    async def _start_one(self) -> None:
        try:
            async with self._slots:
                if self._closed:
                    return
                sandbox = await self._host.start(self._name(), network=self.network)
        except Exception as error:
            if not isinstance(error, SandboxError):
                log.exception("a sandbox could not be started")
            await self._failed(error)
            return
        self._failures = 0
        self.started += 1
        self._put(sandbox)

    async def _failed(self, error: Exception) -> None:
        self._failures += 1
        log.warning("starting a sandbox failed (%d in a row): %s", self._failures, error)
        if self._failures > len(BACKOFF_S):
            self._broken(f"sandboxes can't be started any more: {error}")
            self._refuse_waiting(error)
            return
        await asyncio.sleep(BACKOFF_S[self._failures - 1])
        # This task still counts as a start; its successor is begun once it is over.
        asyncio.get_running_loop().call_soon(self.fill)

    def _refuse_waiting(self, error: Exception) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(BackendUnavailable(f"sandboxes can't be started any more: {error}"))

    def _put(self, sandbox: Sandbox) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(sandbox)
                return
        self._ready.append(sandbox)
        sandbox.died.add_done_callback(lambda _: self._unshelve(sandbox))

    def _unshelve(self, sandbox: Sandbox) -> None:
        """A sandbox died before anybody used it."""
        if sandbox in self._ready:
            self._ready.remove(sandbox)
            self._drop(sandbox)

    def _drop(self, sandbox: Sandbox) -> None:
        async def end() -> None:
            log.warning("an unused sandbox died: %s", sandbox.died.result() if sandbox.died.done() else "")
            await stop(sandbox)
            self.fill()

        task = asyncio.get_running_loop().create_task(end())
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)


async def stop(sandbox: Sandbox) -> Stopped:
    """Stop a sandbox, bounded in time; whatever goes wrong is `not clean`."""
    try:
        async with asyncio.timeout(STOP_S):
            return await asyncio.shield(sandbox.stop())
    except TimeoutError:
        return Stopped(clean=False, seconds=STOP_S, detail=f"the sandbox did not end within {STOP_S:g} s")
    except Exception as error:
        log.exception("stopping sandbox %s failed", sandbox.name)
        return Stopped(clean=False, seconds=0, detail=f"stopping failed: {error!r}")
