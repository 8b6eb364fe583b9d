"""Grants leases to waiting acquires, in the order of `fleet`. A cancelled acquire leaks nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from atropos import tracing, wire
from atropos.aio import Allowance
from atropos.errors import ImageUnavailable, PoolFull, SandboxError, SlotLost
from atropos.resources import NOTHING, Resources
from atropos.slots.containers.link import ContainerLink
from atropos.slots.containers.seats import Seat, Ticket
from atropos.slots.containers.share import BASE, Share
from atropos.slots.containers.state import SharedState
from atropos.slots.pool.images import PoolImages
from atropos.slots.slot import Slot
from atropos.slots.slot.snapshots import Snapshot

log = logging.getLogger("atropos.slots")
log_of_limits = logging.getLogger("atropos.slots.limits")
"""Says once a pool what its slots lack."""

REFUSED_S = 0.01
"""Pause before retrying a container that refuses although it reports room."""
IN_TURN_S = 0.1
"""Longest that an acquire waits for the one before it, in seconds."""


@dataclass(frozen=True)
class LeaseTerms:
    """What an acquire asks for, but for the image; each container is asked by a request of its own."""

    client_id: str
    trajectory_id: str
    ttl_s: float
    snapshot: Snapshot | None
    base: str | None
    network: bool
    limits: wire.LeaseLimits | None
    share: Share | None
    secrets: tuple[wire.EgressSecret, ...] = ()

    def request(self, image: str | None, joins: wire.Joining | None = None) -> wire.LeaseRequest:
        """To one container, under a new id."""
        return wire.LeaseRequest(
            # A new id for each attempt: after an answer that was lost, the old id may be a lease that nobody holds.
            lease_id=secrets.token_hex(16),
            client_id=self.client_id,
            trajectory_id=self.trajectory_id,
            ttl_s=self.ttl_s,
            snapshot=self.snapshot.id if self.snapshot else None,
            base=self.base,
            image=image,
            network=self.network,
            limits=self.limits,
            joins=joins,
            secrets=self.secrets,
        )


class Grants:
    """The acquires of a pool that are under way."""

    def __init__(self, state: SharedState, links: Mapping[str, ContainerLink], images: PoolImages) -> None:
        self._state = state
        self._links = links
        self._images = images
        self._limits_noted: set[str] = set()
        """The last logged limit that slots lack."""
        # Weak values: the entry goes with the grant's task, so that a container that ended leaves nothing behind.
        self._last = WeakValueDictionary[ContainerLink, asyncio.Task[Slot | None]]()
        """The latest grant under way in each container."""

    async def acquire(self, terms: LeaseTerms, image: str | None, timeout_s: float) -> Slot:
        """As `SlotPool.acquire`.

        Raises:
            TimeoutError: no slot came free in time.
        """
        ticket = self._ticket(terms, image)
        # Before the image is prepared and before the wait: a client over its quota shall neither pull nor wait.
        ticket.share.claim(ticket)
        try:
            return await self._on_image(terms, image, ticket, timeout_s)
        except BaseException:
            # BaseException: a cancelled acquire counts towards the quotas no longer, either.
            ticket.share.end(ticket, self._state.now())
            raise

    async def join(self, terms: LeaseTerms, image: str | None, slot: Slot, joins: wire.Joining) -> Slot:
        """As `SlotPool.join`."""
        state, link = self._state, slot.link
        ticket = replace(self._ticket(terms, image), room=NOTHING)  # the other one has it for both
        ticket.share.claim(ticket)
        try:
            name = None if image is None else await self._images.ready_in(link, image)
            request = terms.request(name, joins)
            lease = await link.client.acquire(request)
            # The container may have been lost while its answer was on the way; nothing would end this lease any more.
            if link.gone is not None:
                raise SlotLost(f"container {link.container.id} is lost: {link.gone}")
        except BaseException:
            ticket.share.end(ticket, state.now())
            raise
        state.fleet.joined(link.seat, ticket)
        ticket.granted_at = state.now()
        state.counters.granted()
        joined = link.slots[lease.lease_id] = Slot(link, lease, request, ticket)
        slot.group.append(joined)
        joined.group = slot.group
        if slot.lost is not None:  # released meanwhile, with all of its group
            joined.start_release()
            raise type(slot.lost)(*slot.lost.args)
        return joined

    def _ticket(self, terms: LeaseTerms, image: str | None) -> Ticket:
        config = self._state.config
        limits = config.limits if terms.limits is None else config.limits_of(terms.limits)
        ticket = self._state.fleet.ticket(room=config.room(terms.limits), share=terms.share)
        # A fork's use counts under the image that its snapshot started from, or forking would hide what a client uses.
        ticket.image = terms.snapshot.ticket.image if terms.snapshot is not None else image or terms.base or BASE
        ticket.cpu, ticket.disk_mib, ticket.network = limits.cpu_quota or 0.0, limits.disk_mib, terms.network
        return ticket

    async def _on_image(self, terms: LeaseTerms, image: str | None, ticket: Ticket, timeout_s: float) -> Slot:
        """Acquire once the image is there."""
        if image is None:
            return await self._acquire(terms, None, ticket, timeout_s)
        before: set[str] = set()
        while True:
            known = {*self._links}
            try:
                # Not before the loop: each round asks the containers that have come since.
                name = await self._images.ready(image, ticket.room)
            except SlotLost:  # by others, which the lease waits for
                name = await self._images.ready(image, ticket.room)
            try:
                return await self._acquire(terms, name, ticket, timeout_s)
            except ImageUnavailable:  # removed there for others, or in a container that came since
                if known == before:  # the same containers again: trying on would never end
                    raise
                before = known
                self._images.forget(name)

    async def _acquire(self, terms: LeaseTerms, image: str | None, ticket: Ticket, timeout_s: float) -> Slot:
        """`image`: its name in leases."""
        state, snapshot = self._state, terms.snapshot
        started = state.now()
        async with self._measured(ticket, snapshot, timeout_s):
            while True:
                # Each round, since `stop` fails only the tickets that are in line at that moment.
                state.require_running()
                # Also each round: a snapshot may have got copies, and an image may have become ready elsewhere.
                ticket.pin = self._pin(ticket.room, snapshot, image)
                request = terms.request(image)  # a request that can't be made reserves nothing
                link = await self._seat(ticket)
                if link is None:  # the container has left since it was chosen
                    continue
                if (slot := await self._finish(link, ticket, request, snapshot)) is not None:
                    state.counters.acquired(state.now() - started)
                    return slot

    def _pin(self, room: Resources, snapshot: Snapshot | None, image: str | None) -> Seat | None:
        """The container that a lease that takes `room` must go to; None: any."""
        if snapshot is not None:
            return snapshot.pin(room)
        return None if image is None else self._images.pin(image, room)

    @contextlib.asynccontextmanager
    async def _measured(self, ticket: Ticket, snapshot: Snapshot | None, timeout_s: float) -> AsyncGenerator[None]:
        """An acquire's time limit, and its place in the metrics."""
        counters = self._state.counters

        def observe(seconds: float, result: str) -> None:
            if snapshot is not None:
                counters.fork.observe(seconds, result)
            else:
                counters.acquire.observe(seconds, "cold" if ticket.waited else "warm", result)

        with counters.measure(observe), tracing.span("acquire slot", atropos__fork=snapshot is not None):
            # Not asyncio.timeout: a stall of this process would end acquires whose slot had come meanwhile.
            async with Allowance(timeout_s).once():
                yield

    async def _seat(self, ticket: Ticket) -> ContainerLink | None:
        """Wait for a container with a slot for this ticket; one slot is reserved there then.

        None: it is gone, or ending.
        """
        state = self._state
        with state.in_line(ticket) as served:
            state.serve()
            # `serve` may have found room at once, or (not done, no seat) none.
            if ticket.seat is None and not served.done():
                ticket.waited = True
                self._look_for_room(ticket)
            await served
        # By identity below: a container that was connected to anew has the same key, but another seat with its own
        # counts.
        link = None if ticket.seat is None else self._links.get(ticket.seat.key)
        return link if link is not None and link.seat is ticket.seat else None

    def _look_for_room(self, ticket: Ticket) -> None:
        """No free slot is known: request containers, and poll those whose count is in doubt."""
        state = self._state
        if (failure := state.hopeless()) is not None:
            state.fail(ticket, failure)
        state.replan()
        for container in state.doubted():
            if (link := self._links.get(container)) is not None:
                link.recount(wait=True)

    async def _grant(
        self, link: ContainerLink, ticket: Ticket, request: wire.LeaseRequest, snapshot: Snapshot | None
    ) -> Slot | None:
        """Lease a slot of a container; runs to its end even when the caller is cancelled."""
        state = self._state
        if snapshot is not None and not await self._bring_snapshot(snapshot, link, ticket):
            return None
        try:
            lease = await link.client.acquire(request)
        except PoolFull as error:
            state.fleet.refused(ticket, free=error.room)
            link.recount(wait=True)
            # It refuses although it reports room: the next try would come at once, and be refused again.
            if ticket.room.fits(error.room):
                await asyncio.sleep(REFUSED_S)
            return None
        except SandboxError as error:
            # A fork whose only container is lost can't be served anywhere; any other lease tries the next container.
            nowhere_else = snapshot is not None and {*snapshot.places} <= {link}
            if not error.retryable or (isinstance(error, SlotLost) and nowhere_else):
                state.fleet.cancel_reservation(ticket)
                state.serve()
                raise
            log.info("container %s refused a lease: %s", link.container.id, error)
            state.fleet.refused(ticket, free=NOTHING)  # nobody else is sent there before it has been polled
            link.recount(wait=True)
            return None
        except BaseException:  # whether it was granted is unknown
            state.fleet.abandon_reservation(ticket)
            raise
        # No reservation is undone: `leave` has forgotten all of the container's.
        if link.gone is not None:  # the lease has ended with its container
            return None
        state.fleet.granted(ticket)
        ticket.granted_at = state.now()
        state.counters.granted()
        if lease.limit_note is not None and lease.limit_note not in self._limits_noted:
            self._limits_noted.add(lease.limit_note)
            log_of_limits.warning("slots of container %s lack %s", link.container.id, lease.limit_note)
        slot = link.slots[lease.lease_id] = Slot(link, lease, request, ticket)
        return slot

    async def _bring_snapshot(self, snapshot: Snapshot, link: ContainerLink, ticket: Ticket) -> bool:
        """Copy the snapshot to the container, if it isn't there; False: wait for a slot of a container that has it.

        Raises:
            SandboxError: it can't be copied for another reason than room, and no slot is free where it is.
        """
        try:
            await snapshot.bring(link)
        except SandboxError as error:
            log.warning("snapshot %s could not be copied to %s: %s", snapshot.id, link.container.id, error)
            self._state.fleet.cancel_reservation(ticket)
            self._state.serve()
            home = snapshot.pin(ticket.room)
            # Room comes back, and so the acquire waits; anything else would fail in the same way again and again.
            if isinstance(error, PoolFull) or home is None or ticket.room.fits(home.free):
                return False
            raise SandboxError(
                f"snapshot {snapshot.id} can't be copied to another container, and its own has no free slot: {error}"
            ) from error
        return True

    async def _finish(
        self, link: ContainerLink, ticket: Ticket, request: wire.LeaseRequest, snapshot: Snapshot | None
    ) -> Slot | None:
        """Turn a reservation into a lease; None: try elsewhere.

        When cancelled, a slot that is still granted is released.
        """
        # Read before the task exists: a grant waits for its predecessor, never for itself.
        before = self._last.get(link) if snapshot is None else None

        async def in_turn() -> Slot | None:
            """A container's answers come over several connections and may overtake each other."""
            slot = await self._grant(link, ticket, request, snapshot)
            if before is not None and not before.done():
                # Bounded: an answer that is lost shall not hold up every later acquire for as long as its connection is
                # retried.
                await asyncio.wait([before], timeout=IN_TURN_S)
            return slot

        task = self._state.tasks.spawn(in_turn(), "grant", awaited=True)
        if snapshot is None:  # a fork may wait for a copy, which must not delay others
            self._last[link] = task
        try:
            # Cancelling the request would leave unknown whether the server has granted a lease; it runs on and is given
            # back.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._release_unwanted)
            raise

    def _release_unwanted(self, task: asyncio.Task[Slot | None]) -> None:
        if not task.cancelled() and task.exception() is None and (slot := task.result()) is not None:
            slot.start_release()
        self._state.serve()
