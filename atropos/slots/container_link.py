"""One container, as the pool is connected to it: from its address to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from atropos.errors import IsolationUnavailable, SandboxError, SlotLost, from_code
from atropos.slots.fleet import Seat

if TYPE_CHECKING:
    from atropos import wire
    from atropos.slots.backends.base import Container
    from atropos.slots.pool import SlotPool
    from atropos.slots.slot import Slot
    from atropos.slots.snapshots import Snapshot

log = logging.getLogger("atropos.slots")

CONNECT_PAUSE_S = (0.02, 1.0)
"""First and longest pause between attempts to reach a server that is still starting."""
RECHECK_S = (0.05, 2.0)
"""First and longest pause between looks at a container whose free slots are in doubt."""
CLOSE_S = 3.0
"""Longest a client's orderly close may take."""


class Client(Protocol):
    """What the pool needs of `SandboxClient`; tests put a model of a server in its place."""

    lost: asyncio.Event

    async def connect(self) -> None:
        """Open the stream, once."""
        ...

    async def close(self) -> None:
        """End the stream and everything that waits on it."""
        ...

    async def acquire(self, request: wire.LeaseRequest) -> wire.Lease:
        """Lease a slot; one whose answer is lost, or awaited no more, it gives back by itself."""
        ...

    async def release(self, lease: wire.Lease) -> wire.ReleaseResult:
        """Give a slot back; returns when it is reset."""
        ...

    async def call(self, lease: wire.Lease, operation: wire.Operation, *, call_id: str | None = None) -> wire.OpResult:
        """Run one operation."""
        ...

    async def snapshot(self, lease: wire.Lease) -> wire.SnapshotInfo:
        """Freeze a slot."""
        ...

    async def drop_snapshot(self, snapshot_id: str) -> None:
        """Forget a frozen slot."""
        ...

    def bound_frames(self, max_batch_size: int) -> None:
        """Change the most calls in a frame."""
        ...

    async def copy_snapshot(self, snapshot_id: str, to: Any) -> wire.SnapshotInfo:
        """Bring a frozen slot to another server, by its client."""
        ...

    async def capabilities(self) -> wire.Capabilities:
        """What the server can isolate."""
        ...

    async def status(self) -> wire.Status:
        """The server's own count."""
        ...


ClientFactory = Callable[["Container", Callable[["wire.LeaseEnded"], None], Callable[[int], None]], Client]
"""Makes the client of a container, given whom to tell of a lease that ended and of slots that came free."""


class Link:
    """The pool's end of one container: its client, its place in the fleet, and what this pool holds there."""

    def __init__(self, pool: SlotPool, container: Container, make_client: ClientFactory, *, patience_s: float) -> None:
        self.pool = pool
        self.patience_s = patience_s
        self.container = container
        self.client = make_client(container, self._lease_ended, self._capacity)
        self.seat = Seat(container.id, container.index)
        self.slots: dict[str, Slot] = {}
        self.snapshots: set[Snapshot] = set()
        self.gone: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None
        self._look_again = asyncio.Event()

    def __repr__(self) -> str:
        seat = self.seat
        return f"<Link {self.container.id}: {seat.free} free, {seat.leased} leased of {seat.slots}>"

    # ------------------------------------------------------------------------------------------------------- life

    async def live(self) -> None:
        """Connect, join the fleet, and stay until the server is lost; runs as the link's own task."""
        try:
            async with asyncio.timeout(self.patience_s):
                await self._connect()
                await self._check_isolation()
                await self.pool.keeper.tidy(self)
                status = await self.client.status()
        except TimeoutError:
            reason = f"its sandbox server did not answer within {self.patience_s:g} s"
            await self.pool.keeper.condemn(self, reason)
            return
        except SandboxError as error:
            if isinstance(error, IsolationUnavailable):
                self.pool.refuse(error)
            await self.pool.keeper.condemn(self, f"the sandbox server did not become usable: {error}")
            return
        self.pool.joined(self, status)
        await self.client.lost.wait()
        self.pool.keeper.relink(self, "the sandbox server is gone or does not answer")

    async def _connect(self) -> None:
        """Until it succeeds or trying makes no sense; a container that disappears cancels this task."""
        pause, longest = CONNECT_PAUSE_S
        while True:
            try:
                return await self.client.connect()
            except SandboxError as error:
                if not error.retryable:
                    raise
                log.debug("container %s can't be reached yet: %s", self.container.id, error)
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(pause * 1.5, longest)

    async def _check_isolation(self) -> None:
        """A container that somebody else configured must give what this pool promises."""
        config = self.pool.config
        if not (config.require_sandbox or config.require_stateful_sandbox):
            return
        has = await self.client.capabilities()
        if config.require_sandbox and not has.isolated:
            lacking = [
                f"{feature.name} ({feature.fix or feature.detail})" for feature in has.features if not feature.ok
            ]
            raise IsolationUnavailable(f"require_sandbox: container {self.container.id} lacks {', '.join(lacking)}")
        if config.require_stateful_sandbox and not has.stateful:
            raise IsolationUnavailable(
                f"require_stateful_sandbox: container {self.container.id} can't keep sessions between calls"
            )

    def lose(self, reason: str) -> None:
        """The container is gone: its leases end now, and whoever waits for it alone is told."""
        if self.gone is not None:
            return
        self.gone = reason
        self.pool.doubtful.discard(self)
        for slot in self.slots.values():
            slot.end(SlotLost(f"slot {slot.name} of container {self.container.id} is lost: {reason}"))
        self.pool.counters.lost += len(self.slots)
        self.slots.clear()
        self.snapshots.clear()
        for ticket in self.pool.fleet.leave(self.seat):
            self.pool.strand(ticket, SlotLost(f"the container that holds the snapshot is gone: {reason}"))
        self.pool.tasks.spawn(self._close(), f"close {self.container.id}")
        for task in (self.task, self._look):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.client.close()

    # ----------------------------------------------------------------------------------------------------- counts

    def _lease_ended(self, message: wire.LeaseEnded) -> None:
        """The server ended a lease of ours."""
        slot = self.slots.pop(message.lease_id, None)
        if slot is None:
            return
        slot.end(from_code(message.code, message.message))
        self.pool.counters.lost += 1
        self.pool.fleet.returned(self.seat, clean=False, now=self.pool.now())
        self.look()

    def _capacity(self, free: int) -> None:
        """A slot came free in a container that had refused."""
        if self.gone is None and self.seat.key in self.pool.fleet.seats:
            self.pool.fleet.counted(self.seat, slots=self.seat.slots, free=free, retired=self.seat.retired)
            self.pool.serve()

    @property
    def unaccounted(self) -> bool:
        """Whether some slots are neither free nor this pool's: somebody else's, warming, or behind a lost answer."""
        seat = self.seat
        return seat.free + seat.leased + seat.reserved + seat.retired < seat.slots

    def look(self, *, wait: bool = False) -> None:
        """Ask the container for its own count soon, and again while somebody waits for a slot that it may have.

        Args:
            wait: not at once, since it was asked just now.
        """
        if self.gone is not None:
            return
        if self._look is None or self._look.done():
            self._look = self.pool.tasks.spawn(self._recount(wait=wait), f"count {self.container.id}")
        elif not wait:
            self._look_again.set()

    async def _recount(self, *, wait: bool) -> None:
        fleet, seat = self.pool.fleet, self.seat
        pause, longest = RECHECK_S
        while self.gone is None:
            if wait:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.7, 1.3)):
                        await self._look_again.wait()
                pause = min(pause * 2, longest)
            wait = True
            self._look_again.clear()
            try:
                status = await self.client.status()
            except SandboxError as error:
                log.debug("container %s did not give its count: %s", self.container.id, error)
                continue
            self.pool.counted(self, status)
            if not seat.open or not self.unaccounted:
                return
            if not fleet.waiting and not fleet.pinned_waiting:
                self.pool.doubtful.add(self)  # looked at again when somebody waits
                return
            if not seat.free and fleet.wanted(seat):
                # Asked all the same: a server tells of a slot, and keeps it for, only whom it has refused. Others that wait
                # in line would else take each slot in the moment in which they give it back.
                self._capacity(1)
