"""Turning waiting into leases: first come, first served, and nothing leaks when a caller goes away."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from atropos.errors import PoolFull, SandboxError, SlotLost
from atropos.slots.slot import Slot

if TYPE_CHECKING:
    from atropos import wire
    from atropos.slots.container_link import Link
    from atropos.slots.fleet import Ticket
    from atropos.slots.pool import SlotPool
    from atropos.slots.snapshots import Snapshot

log = logging.getLogger("atropos.slots")

CONTRARY_S = 0.01
"""Pause before asking a container again that refuses though it says that it has room."""
IN_TURN_S = 0.1
"""Longest that an acquire whose answer came early waits for the one before it."""


class Grants:
    """The acquires of a pool that are under way."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._last: dict[Link, asyncio.Task[Slot | None]] = {}

    async def seat(self, ticket: Ticket) -> Link | None:
        """Wait for a container with a slot for this ticket; one slot is reserved there then. None: it is gone again."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = future
        self._pool.fleet.ask(ticket)
        try:
            self.serve()
            if ticket.seat is None and not future.done():
                self._look_for_room(ticket)
            await future
        except BaseException:
            self._pool.fleet.withdraw(ticket)
            if ticket.seat is not None:
                self._pool.fleet.forgone(ticket.seat)
                self.serve()
            raise
        finally:
            self._waiters.pop(ticket, None)
        assert ticket.seat is not None
        link = self._pool.keeper.links.get(ticket.seat.key)
        return link if link is not None and link.seat is ticket.seat else None

    def _look_for_room(self, ticket: Ticket) -> None:
        """Nothing is known to be free: ask for containers, and ask those whose count is in doubt."""
        if (failure := self._pool.hopeless()) is not None:
            self._pool.fleet.withdraw(ticket)
            self.strand(ticket, failure)
        self._pool.keeper.kick()
        while self._pool.doubtful:
            self._pool.doubtful.pop().look(wait=True)

    async def _grant(self, link: Link, request: wire.LeaseRequest, snapshot: Snapshot | None) -> Slot | None:
        """Runs to its end whatever becomes of the caller."""
        seat = link.seat
        if snapshot is not None:
            try:
                await snapshot.bring(link)
            except SandboxError as error:
                log.warning("snapshot %s could not be brought to %s: %s", snapshot.id, link.container.id, error)
                snapshot.stays = True
                self._pool.fleet.forgone(seat)
                self.serve()
                return None
        try:
            lease = await link.client.acquire(request)
        except PoolFull as error:
            self._pool.fleet.refused(seat, free=error.free)
            link.look(wait=True)
            if error.free > 0:
                await asyncio.sleep(CONTRARY_S)  # it refuses though it says that it has room: not at full speed
            return None
        except SandboxError as error:
            if not error.retryable or (snapshot is not None and _gone(error) and snapshot.places in ([], [link])):
                self._pool.fleet.forgone(seat)
                self.serve()
                raise
            log.info("container %s gave no lease: %s", link.container.id, error)
            self._pool.fleet.refused(seat, free=0)
            link.look(wait=True)
            return None
        except BaseException:
            self._pool.fleet.doubted(seat)
            raise
        if link.gone is not None:
            return None
        self._pool.fleet.granted(seat)
        self._pool.counters.leases += 1
        slot = link.slots[lease.lease_id] = Slot(link, lease, request.trajectory_id)
        return slot

    async def _in_turn(
        self,
        link: Link,
        request: wire.LeaseRequest,
        snapshot: Snapshot | None,
        before: asyncio.Task[Slot | None] | None,
    ) -> Slot | None:
        """As `_grant`, after the one before: a container's answers come over many connections and overtake each other."""
        slot = await self._grant(link, request, snapshot)
        if before is not None and not before.done():
            await asyncio.wait([before], timeout=IN_TURN_S)
        return slot

    async def finish(self, link: Link, request: wire.LeaseRequest, snapshot: Snapshot | None) -> Slot | None:
        """Turn a reservation into a lease; None: look elsewhere. Cancelled meanwhile, it gives back what it gets."""
        before = self._last.get(link) if snapshot is None else None
        task = self._pool.tasks.spawn(self._in_turn(link, request, snapshot, before), "grant", awaited=True)
        if snapshot is None:  # one that has to travel first holds nobody up
            self._last[link] = task
            task.add_done_callback(lambda ended: self._forget(link, ended))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)
            raise

    def _forget(self, link: Link, ended: asyncio.Task[Slot | None]) -> None:
        if self._last.get(link) is ended:
            del self._last[link]

    def _unwanted(self, task: asyncio.Task[Slot | None]) -> None:
        if not task.cancelled() and task.exception() is None and (slot := task.result()) is not None:
            self._pool.returns.begin(slot)
        self.serve()

    def serve(self) -> None:
        """Hand free slots to those who wait."""
        for ticket in self._pool.fleet.match():
            future = self._waiters[ticket]
            if not future.done():
                future.set_result(None)

    def strand(self, ticket: Ticket, error: Exception) -> None:
        """A waiting acquire can't be served any more."""
        future = self._waiters.get(ticket)
        if future is not None and not future.done():
            future.set_exception(error)

    def end_all(self, error: Exception) -> None:
        """Nobody who waits will be served."""
        for ticket in list(self._waiters):
            self._pool.fleet.withdraw(ticket)
            self.strand(ticket, error)


def _gone(error: SandboxError) -> bool:
    """Whether a refused fork means that its snapshot is not there (any more)."""
    return isinstance(error, SlotLost) or type(error) is SandboxError
