"""Which waiting acquire gets a slot of which container: plain data and no awaits, O(log n) a decision.

Counts are what this pool knows: its own leases exactly, other clients' by the containers' answers. A container that
refuses (409) corrects its count; a count can therefore be wrong for a moment, and never gives a slot to two, since the
container alone grants leases.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Seat:
    """A container as the fleet sees it.

    Attributes:
        key: the backend's id of the container.
        index: its place in the scaling order; the lowest with a free slot is used first, so that the highest get idle.
        slots: how many it has in all.
        free: slots thought leasable, those reserved by a grant under way not among them.
        reserved: grants under way.
        leased: leases that this pool holds.
        retired: slots the container has given up.
        pins: snapshots that are kept there; while there are any the container is in use.
        idle_since: when its last lease ended (or it joined), on the caller's monotonic clock, seconds.
    """

    key: str
    index: int
    slots: int = 0
    free: int = 0
    reserved: int = 0
    leased: int = 0
    retired: int = 0
    pins: int = 0
    idle_since: float = 0.0
    open: bool = False
    queued: bool = False

    @property
    def busy(self) -> bool:
        """Whether something of this pool stands on it."""
        return bool(self.leased or self.reserved or self.pins)


@dataclass(eq=False, slots=True)
class Ticket:
    """One waiting acquire. `pin`: only this container will do (it holds the snapshot)."""

    seq: int
    pin: Seat | None = None
    waiting: bool = False
    seat: Seat | None = None


@dataclass(eq=False)
class Fleet:
    """All containers and all waiting acquires, first come, first served.

    Attributes:
        expected: containers that are connected to, or being connected to.
        seats: of these, the ones that have joined, by their ids.
        ready: of these, the ones that take new leases.
        free / leased / reserved: slots of all seats.
        waiting / pinned_waiting: acquires that any container could serve, and those bound to one.
    """

    expected: set[Seat] = field(default_factory=set[Seat])
    seats: dict[str, Seat] = field(default_factory=dict[str, Seat])
    free: int = 0
    leased: int = 0
    reserved: int = 0
    ready: int = 0
    waiting: int = 0
    pinned_waiting: int = 0
    _open: list[tuple[int, str, int, Seat]] = field(default_factory=list[tuple[int, str, int, Seat]])
    _line: list[tuple[int, Ticket]] = field(default_factory=list[tuple[int, Ticket]])
    _pinned: dict[Seat, list[tuple[int, Ticket]]] = field(default_factory=dict[Seat, list[tuple[int, Ticket]]])
    _seq: Iterator[int] = field(default_factory=itertools.count)

    # ------------------------------------------------------------------------------------------------ containers

    def expect(self, seat: Seat) -> None:
        """A container is being connected to."""
        self.expected.add(seat)

    def join(self, seat: Seat, *, slots: int, free: int, now: float) -> None:
        """A container can be used from now on."""
        if seat.key in self.seats:
            raise ValueError(f"container {seat.key} is in the fleet already")
        self.seats[seat.key] = seat
        self.expected.add(seat)
        seat.slots = slots
        seat.idle_since = now
        seat.open = True
        self.ready += 1
        self._set_free(seat, free)

    def close(self, seat: Seat) -> list[Ticket]:
        """A container takes no new leases; those it has go on.

        Returns:
            The waiting tickets that only it could have served; they wait no more.
        """
        if seat.open:
            self._set_free(seat, 0)
            seat.open = False
            self.ready -= 1
        stranded = [ticket for _, ticket in self._pinned.pop(seat, [])]
        for ticket in stranded:
            self._served(ticket)
        return stranded

    def leave(self, seat: Seat) -> list[Ticket]:
        """A container is gone, and its leases with it. Returns as `close` does."""
        self.expected.discard(seat)
        stranded = self.close(seat)
        if self.seats.pop(seat.key, None) is not None:
            self.leased -= seat.leased
            self.reserved -= seat.reserved
            seat.leased = seat.reserved = 0
        return stranded

    # --------------------------------------------------------------------------------------------------- waiting

    def ticket(self, pin: Seat | None = None) -> Ticket:
        """A place in the line; `ask` puts it there."""
        return Ticket(next(self._seq), pin)

    def ask(self, ticket: Ticket) -> None:
        """Wait for a slot. Asking again, after a refusal, keeps the ticket's place."""
        if ticket.waiting:
            raise ValueError("the ticket waits already")
        ticket.waiting = True
        ticket.seat = None
        if ticket.pin is None:
            self.waiting += 1
            heapq.heappush(self._line, (ticket.seq, ticket))
        else:
            self.pinned_waiting += 1
            heapq.heappush(self._pinned.setdefault(ticket.pin, []), (ticket.seq, ticket))

    def wanted(self, seat: Seat) -> bool:
        """Whether somebody waits whom this container could serve."""
        return bool(self.waiting or self._pinned.get(seat))

    def withdraw(self, ticket: Ticket) -> None:
        """Wait no more; idempotent."""
        if not ticket.waiting:
            return
        self._served(ticket)
        if ticket.pin is not None:
            self._unpin(ticket, ticket.pin)
        elif len(self._line) > 2 * self.waiting + 64:  # the withdrawn leave the heap in bulk: O(1) amortised
            self._line = [entry for entry in self._line if entry[1].waiting]
            heapq.heapify(self._line)

    def match(self) -> Iterator[Ticket]:
        """Give free slots to the longest waiting; each yielded ticket has its `seat` and one slot reserved there."""
        while (ticket := self._longest()) is not None and (seat := self._best()) is not None:
            pinned = self._pinned.get(seat)
            if pinned and pinned[0][0] < ticket.seq:
                yield self._reserve(pinned[0][1], seat)
            else:
                heapq.heappop(self._line)
                yield self._reserve(ticket, seat)
        for seat in [seat for seat in self._pinned if seat.free > 0]:
            while seat.free > 0 and (line := self._pinned.get(seat)):
                yield self._reserve(line[0][1], seat)

    # ---------------------------------------------------------------------------------------------------- leases

    def granted(self, seat: Seat) -> None:
        """A reservation became a lease."""
        self._unreserve(seat)
        if seat.key in self.seats:
            seat.leased += 1
            self.leased += 1

    def refused(self, seat: Seat, *, free: int) -> None:
        """A reservation was refused: the container says how many slots it has free."""
        self._unreserve(seat)
        self._set_free(seat, max(0, free - seat.reserved))

    def cancel_reservation(self, seat: Seat) -> None:
        """A reservation was never used; the slot is free again."""
        self._unreserve(seat)
        self._set_free(seat, seat.free + 1)

    def abandon_reservation(self, seat: Seat) -> None:
        """A reservation ended without an answer; the slot counts as taken until the container says otherwise."""
        self._unreserve(seat)

    def returned(self, seat: Seat, *, clean: bool, now: float) -> None:
        """A lease ended. A slot that was not `clean` is retired and does not come back."""
        if seat.key not in self.seats:
            return
        seat.leased -= 1
        self.leased -= 1
        seat.idle_since = now
        if clean:
            self._set_free(seat, seat.free + 1)
        else:
            seat.retired += 1

    def counted(self, seat: Seat, *, slots: int, free: int, retired: int) -> None:
        """The container's own count, which may or may not include the grants under way: the smaller is believed."""
        seat.slots = slots
        seat.retired = retired
        self._set_free(seat, max(0, free - seat.reserved))

    # --------------------------------------------------------------------------------------------------- inside

    def _set_free(self, seat: Seat, free: int) -> None:
        if not seat.open:
            return
        free = min(free, max(0, seat.slots - seat.leased - seat.reserved))
        self.free += free - seat.free
        seat.free = free
        if free > 0 and not seat.queued:
            seat.queued = True
            # a container that is connected to anew has a new seat of the same key: the number tells them apart
            heapq.heappush(self._open, (seat.index, seat.key, next(self._seq), seat))

    def _reserve(self, ticket: Ticket, seat: Seat) -> Ticket:
        self._served(ticket)
        if ticket.pin is not None:
            self._unpin(ticket, seat)
        ticket.seat = seat
        seat.free -= 1
        seat.reserved += 1
        self.free -= 1
        self.reserved += 1
        return ticket

    def _unreserve(self, seat: Seat) -> None:
        if seat.key in self.seats:
            seat.reserved -= 1
            self.reserved -= 1

    def _served(self, ticket: Ticket) -> None:
        ticket.waiting = False
        if ticket.pin is None:
            self.waiting -= 1
        else:
            self.pinned_waiting -= 1

    def _unpin(self, ticket: Ticket, seat: Seat) -> None:
        line = self._pinned[seat]
        line.remove((ticket.seq, ticket))
        heapq.heapify(line)
        if not line:
            del self._pinned[seat]

    def _longest(self) -> Ticket | None:
        while self._line:
            ticket = self._line[0][1]
            if ticket.waiting:
                return ticket
            heapq.heappop(self._line)
        return None

    def _best(self) -> Seat | None:
        while self._open:
            seat = self._open[0][3]
            if seat.open and seat.free > 0:
                return seat
            seat.queued = False
            heapq.heappop(self._open)
        return None
