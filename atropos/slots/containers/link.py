"""The pool's connection to one container: its client, its counts, and what this pool holds there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from atropos import wire
from atropos.aio import Backoff, backoff_s, set_within
from atropos.errors import ConfigError, IsolationUnavailable, LeaseExpired, SandboxError, SlotLost, from_code
from atropos.resources import Resources
from atropos.slots.backends.container import Container
from atropos.slots.client import SandboxClient
from atropos.slots.containers.seats import Seat, Ticket
from atropos.slots.containers.state import SharedState

log = logging.getLogger("atropos.slots")

CONNECT_PAUSE_S = (0.02, 1.0)
"""First and longest pause between attempts to reach a server that is still starting."""
RECHECK_S = (0.05, 2.0)
"""First and longest pause between polls of a container whose count is in doubt."""
CLOSE_S = 3.0
"""Longest that closing a client may take."""
RELEASE_TRIES = 6
"""Attempts to release a slot before its container counts as broken."""

ClientFactory = Callable[[Container, Callable[[wire.LeaseEnded], None], Callable[[Resources], None]], SandboxClient]
"""Makes the client of a container, from callbacks for ended leases and for free room; tests put a model in its
place."""


class LeasedSlot(Protocol):
    """A slot of this pool, as its container's link sees it."""

    @property
    def name(self) -> str:
        """The slot's name on its server."""
        ...

    @property
    def ticket(self) -> Ticket:
        """The acquire that it came of: what it takes of its container, and whose it is."""
        ...

    def end(self, reason: SandboxError) -> None:
        """End the lease for this reason."""
        ...

    def start_release(self) -> object:
        """Give it back in the background."""
        ...


class KeptSnapshot(Protocol):
    """A snapshot of this pool, as the link of a container that has it sees it."""

    @property
    def id(self) -> str:
        """Its name on the servers."""
        ...

    def start_drop(self) -> object:
        """Drop it in the background."""
        ...


class ContainerLink:
    """The pool's end of one container: its client, its place in the fleet, and what this pool holds there.

    Args:
        state: the pool's.
        container: as the backend listed it.
        make_client: how it is connected to.
        condemn: replaces a container that can't be used any more.

    Attributes:
        architecture: what programs it can run, as images name it; empty until it is connected to.
        slots: leased here, by lease id.
        snapshots: kept here.
        gone: why it can't be used any more; None while it can.
        task: what connects it and waits for its end.
    """

    def __init__(
        self,
        state: SharedState,
        container: Container,
        make_client: ClientFactory,
        condemn: Callable[[ContainerLink, str], Awaitable[None]],
    ) -> None:
        self.state = state
        self.container = container
        # A client for each link: after a loss, a new link has its own connection, leases and boot_id.
        self.client = make_client(container, self._lease_ended, self._capacity)
        self.seat = Seat(container.id, container.index)
        self.slots: dict[str, LeasedSlot] = {}
        self.snapshots: set[KeptSnapshot] = set()
        self.architecture = ""
        self.gone: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._condemn = condemn
        self._polling: asyncio.Task[None] | None = None
        self._poll_again = asyncio.Event()
        # While it is expected, a failure elsewhere is not final for the acquires that wait (`SharedState.hopeless`).
        state.fleet.expect(self.seat)

    def __repr__(self) -> str:
        seat = self.seat
        return f"<ContainerLink {self.container.id}: {seat.free} of {seat.capacity} free, {seat.leased} leased>"

    # ------------------------------------------------------------------------------------------------------- life

    async def connect(self) -> None:
        """Connect, with retries, and check that the server is what the pool's configuration requires.

        Raises:
            ConfigError, SandboxError: trying again would change nothing.
        """
        backoff = Backoff(*CONNECT_PAUSE_S)
        while True:
            try:
                await self.client.connect()
                break
            except SandboxError as error:
                if not error.retryable:
                    raise
                log.debug("container %s can't be reached yet: %s", self.container.id, error)
            await asyncio.sleep(backoff.failed())
        # After each connection, not once a pool: containers of a shared job may come from other settings.
        await self._check()

    async def _check(self) -> None:
        """Refuse a container of another architecture, or of another process that isolates less than this pool promises.

        Raises:
            ConfigError, IsolationUnavailable: it is refused.
        """
        config = self.state.config
        has = await self.client.capabilities()
        self.architecture = has.architecture
        if config.architecture not in {None, has.architecture}:
            raise ConfigError(
                f"architecture: {config.architecture} is set, and container {self.container.id} is {has.architecture}; "
                "set what its machine is"
            )
        refusal = has.refusal(
            self.container.id, sandbox=config.require_sandbox, stateful=config.require_stateful_sandbox
        )
        if refusal:
            raise IsolationUnavailable(refusal)

    def join(self, status: wire.Status) -> None:
        """Add the connected container to the fleet."""
        state = self.state
        state.fleet.join(
            self.seat, slots=status.slots, free=status.room, now=state.now(), architecture=self.architecture
        )
        self.seat.count_retired(status.retired, status.retired_room)
        # Other clients' leases, or slots that still warm up: neither announces its end to this pool.
        if self.seat.unaccounted:
            state.doubt(self.container.id)
        if status.draining:
            self.close()
        # A usable container proves that the configuration can be met, whatever an earlier one lacked.
        state.accept()
        state.serve()
        state.replan()

    def close(self) -> None:
        """Take no new leases from the container, which is about to end."""
        for ticket in self.state.fleet.close(self.seat):
            self.state.wake(ticket)
        self.state.serve()
        self.state.replan()

    async def condemn(self, reason: str) -> None:
        """Replace the container, which can't be used any more."""
        await self._condemn(self, reason)

    def lose(self, reason: str) -> None:
        """End its leases: the container is gone."""
        if self.gone is not None:
            return
        # First: the callbacks below may come back here, and grants under way look at it.
        self.gone = reason
        state = self.state
        state.trust(self.container.id)
        for slot in self.slots.values():
            slot.end(SlotLost(f"slot {slot.name} of container {self.container.id} is lost: {reason}"))
            slot.ticket.share.end(slot.ticket, state.now())
        state.counters.lost_leases(len(self.slots))
        # Those that never joined, and those that `stop` ends, were not lost.
        if self.seat.key in state.fleet.seats and state.phase == "running":
            state.counters.lost_container()
        self.slots.clear()
        self.snapshots.clear()
        for ticket in state.fleet.leave(self.seat):
            state.wake(ticket)
        # In the background: `lose` runs in callbacks, and closing may wait for a host that doesn't answer.
        state.tasks.spawn(self._close_client(reason), f"close {self.container.id}")
        for task in (self.task, self._polling):
            # `lose` may run inside one of them; cancelling itself would end the clean-up halfway.
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    async def _close_client(self, reason: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.client.close(f"container {self.container.id} is lost: {reason}")

    # --------------------------------------------------------------------------------------------------- releases

    async def release(self, lease: wire.Lease) -> None:
        """Release a slot, retrying until the server confirms it; one that never does is replaced."""
        for attempt in range(RELEASE_TRIES):
            if self.gone is not None:
                return
            try:
                result = await self.client.release(lease)
            # The server knows no such lease: it is over, and its slot was reset without us.
            except (LeaseExpired, SlotLost):
                self._returned(lease, None)
                return
            except SandboxError as error:
                log.info("slot %s could not be released yet: %s", lease.slot, error)
                await asyncio.sleep(backoff_s(attempt, first_s=0.1, longest_s=3.2))
                continue
            self.state.counters.released(result)
            self._returned(lease, result)
            return
        # Its slot would stay leased until the TTL, and whoever can't be told to release can't be told anything else.
        await self.condemn(f"slot {lease.slot} could not be given back")

    def _returned(self, lease: wire.Lease, result: wire.ReleaseResult | None) -> None:
        state = self.state
        if (slot := self.slots.pop(lease.lease_id, None)) is None:
            return  # counted as lost
        clean = result is not None and result.released and result.clean
        state.counters.returned()
        slot.ticket.share.end(slot.ticket, state.now(), result)
        state.fleet.returned(self.seat, slot.ticket.room, clean=clean, now=state.now())
        # Retired, or reset without an answer: the container alone knows what it has now.
        if not clean:
            self.recount()
        # A closed container may have become empty, and so replaceable.
        if not self.seat.open:
            state.replan()
        state.serve()

    # ----------------------------------------------------------------------------------------------------- counts

    def _lease_ended(self, message: wire.LeaseEnded) -> None:
        """The server ended a lease of ours."""
        slot = self.slots.pop(message.lease_id, None)
        if slot is None:
            return
        slot.end(from_code(message.code, message.message))
        self.state.counters.lost_leases(1)
        slot.ticket.share.end(slot.ticket, self.state.now())
        self.state.fleet.returned(self.seat, slot.ticket.room, clean=False, now=self.state.now())
        self.recount()

    def _capacity(self, room: Resources) -> None:
        """A slot came free in a container that had refused."""
        # The stream may deliver it before `join`, which takes the count from the server's status.
        if self.gone is None and self.seat.key in self.state.fleet.seats:
            self.state.fleet.counted(self.seat, room)
            self.state.serve()

    def recount(self, *, wait: bool = False) -> None:
        """Poll the container's count of free room soon, and repeatedly while acquires wait for a slot that it may have.

        Args:
            wait: pause first, since it was just polled.
        """
        if self.gone is not None:
            return
        if self._polling is None or self._polling.done():
            self._polling = self.state.tasks.spawn(self._poll(wait=wait), f"count {self.container.id}")
        # The poll that sleeps is woken; one that is to pause first changes nothing for it.
        elif not wait:
            self._poll_again.set()

    def _counted(self, status: wire.Status) -> None:
        """Record the container's own count."""
        self.seat.count_retired(status.retired, status.retired_room)
        self.state.fleet.counted(self.seat, status.room)
        if status.draining:
            self.close()
        self.state.serve()

    async def _poll(self, *, wait: bool) -> None:
        fleet, seat = self.state.fleet, self.seat
        backoff = Backoff(*RECHECK_S)
        while self.gone is None:
            if wait:
                await set_within(self._poll_again, backoff.failed())
            wait = True
            # Before the request, so that a wish that comes while the answer is on the way leads to one more.
            self._poll_again.clear()
            try:
                status = await self.client.status()
            except SandboxError as error:
                log.debug("container %s did not answer a status request: %s", self.container.id, error)
                continue
            self._counted(status)
            if not seat.open or not seat.unaccounted:
                return
            if not fleet.waiting and not fleet.pinned_waiting:
                self.state.doubt(self.container.id)  # polled again when an acquire waits
                return
            if missed := fleet.missed(seat):
                # Request a lease anyway: a server reserves a free slot only for clients that it has refused. Without
                # that, other clients would take back each slot at the moment they release it.
                self._capacity(missed)
