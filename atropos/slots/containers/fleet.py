"""Which waiting acquire gets room in which container: plain data, no awaits, O(log n) for leases of one slot.

Acquires of one share are served in the order in which they came. Between shares, the one that holds least memory by its
weight goes first, so that each gets its part of a full pool however many of another's wait, and for however long that
one keeps what it gets.

Room is what leases take of a container: each a slot's, a large one more (`SandboxSettings.room`). A large lease, or one
with GPUs, that fits nowhere has one container kept for it: what it needs of what is or comes free there waits for it,
while those behind it go on in the rest and in the others. So it is passed only by leases that could not have helped it,
and for as long as that container's leases last.

Counts are what this pool knows: its own leases exactly, other clients' by the containers' answers. A container that
refuses (409) corrects its count; a count can therefore be wrong for a moment, and never gives a slot to two, since the
container alone grants leases.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from atropos.resources import NOTHING, Resources
from atropos.slots.containers.seats import Seat, Ticket
from atropos.slots.containers.share import Share


@dataclass(eq=False)
class Fleet:
    """All containers and all waiting acquires.

    Attributes:
        share: of acquires that name none.
        expected: containers that are connected to, or being connected to.
        seats: of these, the ones that have joined, by their ids.
        architectures: how many of these are of each.
        ready: of these, the ones that take new leases.
        waiting: acquires that any container could serve.
        waiting_room: what these ask for.
        unprepared_room: what acquires ask for that are not in line yet, for want of their image.
        slot_room: what a lease of a slot's own size takes.
        devices: what each container has beside the room of its slots.
    """

    slot_room: Resources
    share: Share = field(default_factory=Share)
    devices: Resources = NOTHING
    expected: set[Seat] = field(default_factory=set[Seat])
    seats: dict[str, Seat] = field(default_factory=dict[str, Seat])
    architectures: Counter[str] = field(default_factory=Counter[str])
    ready: int = 0
    waiting: int = 0
    waiting_room: Resources = NOTHING
    unprepared_room: Resources = NOTHING
    _kept: set[Seat] = field(default_factory=set[Seat])
    _grown: set[Seat] = field(default_factory=set[Seat])
    """Containers that got more room while some were kept, and those that are kept no more."""
    # A heap of containers that may have room, lowest index first; those that have none are popped when met.
    _open: list[tuple[int, str, int, Seat]] = field(default_factory=list[tuple[int, str, int, Seat]])
    _lines: dict[Share, list[tuple[int, Ticket]]] = field(default_factory=dict[Share, "list[tuple[int, Ticket]]"])
    """Acquires of each share that any container could serve: heaps by their numbers, which the withdrawn leave
    later."""
    _pinned: dict[Seat, list[Ticket]] = field(default_factory=dict[Seat, "list[Ticket]"])
    _seq: Iterator[int] = field(default_factory=itertools.count)

    @property
    def mixed(self) -> bool:
        """Whether its containers are of several architectures."""
        return sum(count > 0 for count in self.architectures.values()) > 1

    @property
    def free(self) -> int:
        """Leases of a slot's own size that there is room for."""
        return sum(seat.free.holds(self.slot_room) for seat in self.seats.values())

    @property
    def leased(self) -> int:
        """Leases that this pool holds."""
        return sum(seat.leased for seat in self.seats.values())

    @property
    def reserved(self) -> int:
        """Grants under way."""
        return sum(seat.reserved for seat in self.seats.values())

    @property
    def pinned_waiting(self) -> int:
        """Waiting acquires that are bound to a container."""
        return sum(map(len, self._pinned.values()))

    # ------------------------------------------------------------------------------------------------ containers

    def expect(self, seat: Seat) -> None:
        """A container is being connected to."""
        self.expected.add(seat)

    def join(self, seat: Seat, *, slots: int, free: Resources, now: float, architecture: str = "") -> None:
        """A container can be used from now on."""
        if seat.key in self.seats:
            raise ValueError(f"container {seat.key} is already in the fleet")
        self.seats[seat.key] = seat
        seat.architecture = architecture
        self.architectures[architecture] += 1
        self.expected.add(seat)
        seat.slots = slots
        seat.capacity = self.slot_room * slots + self.devices
        seat.idle_since = now
        seat.open = True
        self.ready += 1
        self._set_free(seat, free)

    def close(self, seat: Seat) -> list[Ticket]:
        """A container takes no new leases; its current ones stay.

        Returns:
            The waiting tickets that only it could have served; they wait no more.
        """
        if seat.open:
            self._set_free(seat, NOTHING)
            seat.open = False
            self.ready -= 1
        # Whether it was open or not: a large lease must not wait for room that will never come free here.
        self._put_back(seat)
        stranded = self._pinned.pop(seat, [])
        for ticket in stranded:
            self._served(ticket)
        return stranded

    def leave(self, seat: Seat) -> list[Ticket]:
        """A container is gone, and its leases with it. Returns as `close` does."""
        self.expected.discard(seat)
        stranded = self.close(seat)
        if self.seats.pop(seat.key, None) is not None:
            self.architectures[seat.architecture] -= 1
        seat.leased = seat.reserved = 0  # their ends, which come later, are not counted any more
        seat.leased_room = seat.reserved_room = NOTHING
        return stranded

    # --------------------------------------------------------------------------------------------------- waiting

    def ticket(self, pin: Seat | None = None, room: Resources | None = None, share: Share | None = None) -> Ticket:
        """A place in the line, for a slot's room or `room`; `ask` puts it there."""
        return Ticket(next(self._seq), room or self.slot_room, share or self.share, pin)

    def ask(self, ticket: Ticket) -> None:
        """Wait for a slot. Asking again, after a refusal, keeps the ticket's place."""
        if ticket.waiting:
            raise ValueError("the ticket is already waiting")
        ticket.waiting = True
        ticket.seat = None
        # A refused grant held room until now; counted on, it would put its own share behind the others.
        # A grant whose container was lost still holds its room; nothing has undone that reservation.
        ticket.share.let_go(ticket)
        if ticket.pin is None:
            self.waiting += 1
            self.waiting_room += ticket.room
            self._put_in_line(ticket)
        else:
            self._pinned.setdefault(ticket.pin, []).append(ticket)

    def missed(self, seat: Seat) -> Resources:
        """What this container's next waiter wants, where the container is thought to have less free."""
        # In the order in which `match` would serve them.
        line = [seat.kept_for, self._first_pinned(seat), self._next()]
        room = next((ticket.room for ticket in line if ticket is not None), NOTHING)
        return NOTHING if room.fits(seat.free) else room

    @property
    def wanted_slots(self) -> int:
        """Slots that unpinned acquires wait for, or will once their images are there.

        What is free after `match` serves none of those in line, and the others as far as it goes.
        """
        unprepared = self.unprepared_room.parts(self.slot_room)
        return self.waiting_room.parts(self.slot_room) + (max(0, unprepared - self.free) if unprepared else 0)

    @contextmanager
    def unprepared(self, room: Resources) -> Generator[None]:
        """Around the wait of an acquire that is not in line yet, for want of its image."""
        self.unprepared_room += room
        try:
            yield
        finally:
            self.unprepared_room -= room

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a ticket from the line. Idempotent."""
        if not ticket.waiting:
            return
        self._served(ticket)
        for seat in [seat for seat in self._kept if seat.kept_for is ticket]:
            self._unkeep(seat)
        if ticket.pin is not None:
            self._unpin(ticket, ticket.pin)
        elif (
            len(line := self._lines.get(ticket.share, [])) > 2 * self.waiting + 64
        ):  # they leave in bulk: O(1) amortised
            line[:] = [entry for entry in line if entry[1].waiting]
            heapq.heapify(line)

    def match(self) -> Iterator[Ticket]:
        """Give free room to those whose turn it is; each yielded ticket has its `seat`, where its room is reserved."""
        # Only where something grew: without new room no kept container can serve its ticket.
        if self._grown:
            yield from self._match_kept()
        yield from self._match_others()

    def _match_kept(self) -> Iterator[Ticket]:
        """Serve the large tickets that containers are kept for, and all that have waited longer than one of them."""
        served = True
        while served:  # this leaves room for older ones in the kept container
            served = False
            reserved = sorted(
                (seat.kept_for.seq, seat.kept_for, seat) for seat in self._kept if seat.kept_for is not None
            )
            for seq, ticket, seat in reserved:
                # Older tickets go first, or a large one that came later would take room that they could use.
                yield from self._match_others(before=seq)
                if (room := self._room_for_kept(ticket, seat)) is not None:
                    self._unkeep(seat)
                    yield self._reserve(ticket, room)
                    served = True
                    break  # what was kept for it is free for others: look again from the first
        self._grown.clear()

    def _match_others(self, *, before: float = math.inf) -> Iterator[Ticket]:
        """Serve tickets that no container is kept for, with numbers below `before`."""
        unplaced: list[Ticket] = []
        while (ticket := self._next(before)) is not None:
            if (seat := self._place(ticket)) is None:
                if self._lowest() is None:
                    break
                heapq.heappop(self._lines[ticket.share])
                unplaced.append(ticket)  # no container can be kept for it now, so others need not wait
                continue
            # A fork can go nowhere else, and competes with the common line here by its rank like everyone.
            pinned = self._first_pinned(seat)
            if (
                pinned is not None
                and pinned.rank < ticket.rank
                and (seat.kept_for is None or seat.has_room(pinned.room))
            ):
                ticket = pinned
            else:
                heapq.heappop(self._lines[ticket.share])
            if seat.kept_for is not None and not seat.has_room(ticket.room):
                # `_place` chose a container that is kept for a later ticket, which goes back in line.
                self._put_back(seat)
            if ticket.room.fits(seat.free):
                yield self._reserve(ticket, seat)
            else:
                self._keep(seat, ticket)
        # Only now: put back at once, they would be met again by `_next` in the same loop without end.
        for ticket in unplaced:
            self._put_in_line(ticket)
        for seat in [seat for seat in self._pinned if seat.free]:
            while seat.free and (ticket := self._first_pinned(seat, before)) is not None:
                if seat.has_room(ticket.room):
                    yield self._reserve(ticket, seat)
                elif seat.kept_for is None:
                    self._keep(seat, ticket)
                else:
                    break

    def _room_for_kept(self, ticket: Ticket, seat: Seat) -> Seat | None:
        """Where the large ticket that `seat` is kept for has room now: there, or in another container."""
        if ticket.room.fits(seat.free):
            return seat
        others = self._grown if ticket.pin is None else ()
        return min((each for each in others if each.has_room(ticket.room)), key=lambda each: each.index, default=None)

    # ---------------------------------------------------------------------------------------------------- leases

    def granted(self, ticket: Ticket) -> None:
        """A reservation became a lease."""
        seat = self._unreserve(ticket)
        if seat is not None:
            seat.leased += 1
            seat.leased_room += ticket.room
        ticket.share.hold(ticket)

    def joined(self, seat: Seat, ticket: Ticket) -> None:
        """A lease joined another one, which has the room of both."""
        # No room is added: the joined lease reserved it ahead (`LeaseLimits.members`).
        seat.leased += 1
        ticket.share.hold(ticket)

    def refused(self, ticket: Ticket, *, free: Resources) -> None:
        """A reservation was refused: the container says what it has free."""
        if (seat := self._unreserve(ticket)) is not None:  # other grants under way there may not be in its count yet
            self._set_free(seat, free - seat.reserved_room)

    def cancel_reservation(self, ticket: Ticket) -> None:
        """A reservation was never used; its room is free again."""
        if (seat := self._unreserve(ticket)) is not None:
            self._set_free(seat, seat.free + ticket.room)

    def abandon_reservation(self, ticket: Ticket) -> None:
        """A reservation ended without an answer; its room counts as taken until the container says otherwise."""
        # It stays out of `free`, too: the server may have granted the lease, and two acquires must not count on it.
        self._unreserve(ticket)

    def returned(self, seat: Seat, room: Resources, *, clean: bool, now: float) -> None:
        """A lease that took `room` ended.

        Unless its slot is `clean`, its room counts as taken until the container says otherwise.
        """
        # The container is gone or was connected to anew: its counts of then are not those of now.
        if self.seats.get(seat.key) is not seat:
            return
        seat.leased -= 1
        seat.leased_room -= room
        seat.used(now)
        if clean:
            self._set_free(seat, seat.free + room)

    def counted(self, seat: Seat, free: Resources) -> None:
        """The container's own count of what is free, grants under way among it or not: the smaller is believed."""
        # The answer can't say which grants under way it includes. Too small a count is corrected by the next poll, too
        # large a one costs a refused request.
        self._set_free(seat, free - seat.reserved_room)
        # Slots that retired since have taken room for good: the large lease would wait here for nothing.
        if seat.kept_for is not None and seat.kept_for.pin is None and not seat.can_hold(seat.kept_for.room):
            self._put_back(seat)

    # --------------------------------------------------------------------------------------------------- inside

    def _set_free(self, seat: Seat, free: Resources) -> None:
        # A late answer must not give room back to a container that is closing.
        if not seat.open:
            return
        # the container's count may be older than leases that it has granted since
        free = free.least(seat.capacity - seat.leased_room - seat.reserved_room)
        if self._kept and not free.fits(seat.free):
            self._grown.add(seat)
        seat.free = free
        if free and not seat.queued:
            seat.queued = True
            # a container that was reconnected has a new seat of the same key: the number distinguishes them
            heapq.heappush(self._open, (seat.index, seat.key, next(self._seq), seat))

    def _reserve(self, ticket: Ticket, seat: Seat) -> Ticket:
        self._served(ticket)
        if ticket.pin is not None:
            self._unpin(ticket, seat)
        ticket.seat = seat
        ticket.share.hold(ticket)
        seat.reserved += 1
        seat.reserved_room += ticket.room
        self._set_free(seat, seat.free - ticket.room)
        return ticket

    def _unreserve(self, ticket: Ticket) -> Seat | None:
        """End a reservation. Returns its container, unless that is gone."""
        ticket.share.let_go(ticket)
        seat = ticket.seat
        if seat is None or self.seats.get(seat.key) is not seat:
            return None
        seat.reserved -= 1
        seat.reserved_room -= ticket.room
        return seat

    def _keep(self, seat: Seat, ticket: Ticket) -> None:
        """Reserve what comes free in this container for a large lease."""
        seat.kept_for = ticket
        self._kept.add(seat)

    def _unkeep(self, seat: Seat) -> Ticket | None:
        ticket, seat.kept_for = seat.kept_for, None
        self._kept.discard(seat)
        if self._kept:  # a lease that another container is kept for may fit here now
            self._grown.add(seat)
        self._set_free(seat, seat.free)  # others may use it again
        return ticket

    def _put_back(self, seat: Seat) -> None:
        """The large lease that this container was kept for, if any, waits for another one."""
        if (ticket := self._unkeep(seat)) is not None and ticket.pin is None:
            self._put_in_line(ticket)

    def _served(self, ticket: Ticket) -> None:
        ticket.waiting = False
        if ticket.pin is None:
            self.waiting -= 1
            self.waiting_room -= ticket.room

    def _put_in_line(self, ticket: Ticket) -> None:
        # By number and not by rank: within a share all loads are equal, and a heap's keys must not change.
        heapq.heappush(self._lines.setdefault(ticket.share, []), (ticket.seq, ticket))

    def _unpin(self, ticket: Ticket, seat: Seat) -> None:
        line = self._pinned[seat]
        line.remove(ticket)
        if not line:
            del self._pinned[seat]

    def _first_pinned(self, seat: Seat, before: float = math.inf) -> Ticket | None:
        # A scan, where the common line has heaps: tickets of several shares compete here by loads that change.
        line = (ticket for ticket in self._pinned.get(seat, ()) if ticket.seq < before)
        return min(line, key=lambda ticket: ticket.rank, default=None)

    def _next(self, before: float = math.inf) -> Ticket | None:
        """Whose turn it is, of those whose number is lower than `before`."""
        # a share's load changes with each of its leases, so that no heap over shares would stay in order
        first: list[Ticket] = []
        for share, line in list(self._lines.items()):
            while line and not line[0][1].waiting:
                heapq.heappop(line)
            if not line:
                del self._lines[share]
            elif line[0][0] < before:
                first.append(line[0][1])
        return min(first, key=lambda ticket: ticket.rank, default=None)

    def _place(self, ticket: Ticket) -> Seat | None:
        """The container for the ticket whose turn it is; for a large one that fits nowhere, the one to keep for it.

        That may be one which is kept for a later ticket.
        """
        # The usual lease: the heap answers in O(log n). A large one has to look at all containers.
        if ticket.room.fits(self.slot_room):
            return self._lowest()
        roomy = (entry for entry in self._open if entry[3].has_room(ticket.room))
        if (best := min(roomy, default=None)) is not None:
            return best[3]
        # Best to keep: one that is kept for nobody, then the one with most free slots, then the lowest index.
        fitting = (seat for seat in self.seats.values() if seat.open and seat.can_hold(ticket.room))
        may = (seat for seat in fitting if seat.kept_for is None or seat.kept_for.comes_after(ticket))
        return max(
            may, key=lambda seat: (seat.kept_for is None, seat.free.holds(self.slot_room), -seat.index), default=None
        )

    def _lowest(self) -> Seat | None:
        while self._open:
            seat = self._open[0][3]
            if seat.open and seat.has_room(self.slot_room):
                return seat
            # Its entry is stale; `_set_free` pushes a new one as soon as room comes back.
            seat.queued = False
            heapq.heappop(self._open)
        return None
