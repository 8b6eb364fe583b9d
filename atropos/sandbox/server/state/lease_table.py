"""Who holds which slot: decisions over plain data, without I/O and without a clock of its own.

The table is the only authority on a server's leases. Every method takes `now` (seconds of a monotonic clock, so that a
stepped wall clock changes nothing), decides at once and returns what is to be done; `Leasing` does it.

Room is what leases take of the container (`SandboxSettings.room`): every lease at least a slot's, a large one more, so
that what fits by room fits by the number of slots as well.

Fairness between clients that share a container: a refused request is remembered as wanted until a slot comes free, and
for `WANT_S` seconds from then on, in which its client is notified and asks again. Slots that come free go to the
wanting clients in the order (fewest leases, longest wanting), as many as each asked for but no more than its equal
share; a client further back is refused although a slot is free. So nobody starves, and a client that stopped asking
costs the others at most `WANT_S`. For a lease of several slots' room what comes free is kept while its client asks
again within `LARGE_WANT_S`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from atropos.errors import BackendUnavailable, LeaseExpired, NotSupported, PoolFull, from_code
from atropos.resources import NOTHING, Resources
from atropos.sandbox.contract import Stopped
from atropos.wire import LeaseRequest

WANT_S = 1.0
"""How long a slot is kept for a refused client after it last asked, or was notified of the slot, in seconds."""
LARGE_WANT_S = 3.0
"""The same for a lease larger than a slot, in seconds: longer than a pool's pause before it asks again."""
MAX_WANTING = 1024
"""Refused clients remembered; beyond that the first is forgotten. Of each, as many requests as there are slots."""
MAX_ENDED = 4096
"""Ended leases remembered, so that late calls and double releases get the right answer."""


@dataclass(slots=True)
class HeldLease:
    """A lease that holds a slot, from its grant until its slot is confirmed clean or retired."""

    request: LeaseRequest
    slot: int
    room: Resources
    epoch: int
    granted_at: float
    renewed_at: float
    gpus: tuple[int, ...] = ()
    """The numbers of its GPUs."""
    for_joins: Resources = NOTHING
    """The part of its room that is kept for leases that join it."""
    state: Literal["starting", "active", "ending"] = "starting"
    code: str = ""
    message: str = ""

    @property
    def lease_id(self) -> str:
        """The client's own name of it."""
        return self.request.lease_id

    @property
    def client_id(self) -> str:
        """Who holds it."""
        return self.request.client_id


@dataclass(frozen=True, slots=True)
class EndedLease:
    """What is remembered of a lease that is over.

    Attributes:
        code: why: `released`, or the code of an error.
        clean: whether its slot was confirmed empty.
    """

    lease_id: str
    client_id: str
    epoch: int
    code: str
    message: str
    at: float
    clean: bool = True
    reset_s: float = 0.0
    cpu_s: float | None = None
    egress_bytes: int = 0


@dataclass(slots=True)
class _Request:
    """A refused request: how much it asked for, and when it was last made, or offered a slot (once)."""

    room: Resources
    last: float
    keep_s: float
    offered: bool = False

    def fresh(self, now: float) -> bool:
        """Whether room is kept for it."""
        return now - self.last <= self.keep_s


@dataclass(slots=True)
class _Want:
    """The refused requests of one client."""

    first: float
    requests: dict[str, _Request] = field(default_factory=dict[str, _Request])

    def fresh(self, now: float) -> list[Resources]:
        """What is kept for each."""
        return [request.room for request in self.requests.values() if request.fresh(now)]


@dataclass(slots=True)
class LeaseTable:
    """All leases of one server.

    Args:
        slots: how many slots there are, retired ones included.
        slot_room: what a lease of a slot's own size takes.
        devices: what there is beside the slots' room.
        gpus: how many GPUs these are, each with the same number of leases.
    """

    slots: int
    slot_room: Resources
    devices: Resources = NOTHING
    gpus: int = 0
    draining: str = ""
    held: dict[str, HeldLease] = field(default_factory=dict[str, HeldLease])
    ended: OrderedDict[str, EndedLease] = field(default_factory=OrderedDict[str, EndedLease])
    retired: dict[int, Resources] = field(default_factory=dict[int, Resources])
    """Their numbers, and what each may still use."""
    epoch: int = 0
    room: Resources = NOTHING
    """What is unleased and may be leased."""
    _free: deque[int] = field(default_factory=deque[int])
    _seen: dict[str, float] = field(default_factory=dict[str, float])
    _counts: Counter[str] = field(default_factory=Counter[str])
    """Leases of each client."""
    _held_room: dict[str, Resources] = field(default_factory=dict[str, Resources])
    """What they take."""
    _wants: dict[str, _Want] = field(default_factory=dict[str, _Want])
    _free_gpus: Counter[int] = field(default_factory=Counter[int])
    """How many leases each can still be given to."""
    _retired_gpus: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Those of retired slots."""

    def __post_init__(self) -> None:
        self._free.extend(range(self.slots))
        self.room = self._capacity
        if self.gpus:
            self._free_gpus.update(dict.fromkeys(range(self.gpus), self.devices.gpus // self.gpus))

    @property
    def _capacity(self) -> Resources:
        return self.slot_room * self.slots + self.devices

    # ------------------------------------------------------------------------------------------------------- granting

    @property
    def free(self) -> int:
        """Leases of a slot's own size that there is room for."""
        return self.room.holds(self.slot_room)

    @property
    def retired_room(self) -> Resources:
        """What the retired slots may still use."""
        return sum(self.retired.values(), NOTHING)

    def grant(self, request: LeaseRequest, now: float, room: Resources, for_joins: Resources = NOTHING) -> HeldLease:
        """Decide a request for `room`, of which `for_joins` is for leases that join it.

        Asked again with its `lease_id`: the same lease, or why that is over.

        Raises:
            PoolFull: there is no room for this client now.
            BackendUnavailable: the server is draining.
            LeaseExpired: a lease of this id is over, or another client's; or the one that it joins is.
            NotSupported: the one that it joins keeps no such room.
            SandboxError: of the kind for which the server ended the lease.
        """
        held = self.held.get(request.lease_id)
        if held is not None and held.client_id != request.client_id:
            raise LeaseExpired(f"lease_id {request.lease_id!r} belongs to another client")
        if held is not None and held.state != "ending":
            held.renewed_at = now
            return held
        over = self.ended.get(request.lease_id)
        if over is not None and over.code != "released":
            raise from_code(over.code, over.message)
        if held is not None or over is not None:
            raise LeaseExpired(f"lease {request.lease_id!r} is over; a new lease needs a new lease_id")
        if self.draining:
            raise BackendUnavailable(self.draining)
        if request.joins is None:
            available = self.room - self._kept_from(request.client_id, now)
            if not room.fits(available):
                self._want(request, now, room)
                raise PoolFull(self._full_message(room), room=available)
            self._satisfy(request)
        else:
            self._take_kept(request.client_id, request.joins.lease_id, room)
        # Never reset, and over all leases: a call that names an old lease can't hit a new one (a fencing token).
        self.epoch += 1
        # The least shared first.
        gpus = tuple(number for number, _ in self._free_gpus.most_common(room.gpus)) if room.gpus else ()
        self._free_gpus.subtract(gpus)
        # popleft, with `append` in `restore`: a slot's name is used again as late as possible.
        held = HeldLease(request, self._free.popleft(), room, self.epoch, now, now, gpus, for_joins)
        self.held[request.lease_id] = held
        self.room -= room
        self._counts[request.client_id] += 1
        self._held_room[request.client_id] = self._held_room.get(request.client_id, NOTHING) + room
        # Not overwritten: asking for a lease renews no other one, heartbeats do.
        self._seen.setdefault(request.client_id, now)
        return held

    def _take_kept(self, client_id: str, joined_id: str, room: Resources) -> None:
        """Free some of the room that a lease keeps for those that join it."""
        joined = self.held.get(joined_id)
        if joined is None or joined.client_id != client_id or joined.state != "active":
            raise LeaseExpired(f"lease {joined_id!r}, which this one is to join, is over")
        if not room.fits(joined.for_joins):
            raise NotSupported(
                f"joins: {room} asked for, the lease keeps {joined.for_joins}; name it in limits.members"
            )
        joined.for_joins -= room
        # Moved from the joined lease to the free room, from which the grant takes it: the sum stays the same.
        joined.room -= room
        self.room += room
        self._held_room[client_id] -= room

    def _keep_again(self, held: HeldLease) -> None:
        """Give the room of a lease that could not join back to the one that kept it: had it joined, both would end."""
        joined = None if held.request.joins is None else self.held.get(held.request.joins.lease_id)
        if joined is not None and joined.state == "active":
            joined.for_joins += held.room
            joined.room += held.room
            self.room -= held.room
            self._held_room[held.client_id] += held.room

    def _kept_from(self, client_id: str, now: float) -> Resources:
        """What is kept for the wanting clients that come before this one."""
        for name, want in list(self._wants.items()):
            for lease_id in [key for key, each in want.requests.items() if each.offered and not each.fresh(now)]:
                del want.requests[lease_id]
            if not want.requests:
                del self._wants[name]
        wanting = {name: fresh for name, want in self._wants.items() if (fresh := want.fresh(now))}
        if not wanting:
            return NOTHING
        # All that have or want a lease: an equal share of a full container for each.
        sharing = {client_id, *wanting, *(name for name, count in self._counts.items() if count)}
        share = (self._capacity - self.retired_room) // len(sharing)
        mine = self._wants.get(client_id)
        # Fewest leases first, then longest wanting: a client that has none is never behind one that has some.
        rank = (self._counts[client_id], mine.first if mine else now)
        reserved = (
            sum(fresh, NOTHING).least(
                self.slot_room.most(*fresh, share - self._held_room.get(name, NOTHING)),
            )
            for name, fresh in wanting.items()
            if name != client_id and (self._counts[name], self._wants[name].first) < rank
        )
        return sum(reserved, NOTHING)

    def _want(self, request: LeaseRequest, now: float, room: Resources) -> None:
        want = self._wants.setdefault(request.client_id, _Want(now))
        want.requests.pop(request.lease_id, None)  # reinserted as the latest
        want.requests[request.lease_id] = _Request(room, now, WANT_S if room.fits(self.slot_room) else LARGE_WANT_S)
        if len(want.requests) > self.slots:
            del want.requests[next(iter(want.requests))]
        if len(self._wants) > MAX_WANTING:
            del self._wants[next(iter(self._wants))]

    def _satisfy(self, request: LeaseRequest) -> None:
        """One request less is wanted: this one, or, asked under a new id, the oldest."""
        want = self._wants.get(request.client_id)
        if want is not None:
            # Pools ask again under a new id (a refused one is never granted), so that the oldest stands for it.
            del want.requests[request.lease_id if request.lease_id in want.requests else next(iter(want.requests))]
            if not want.requests:
                del self._wants[request.client_id]

    def _full_message(self, room: Resources) -> str:
        counts = f"{len(self.held)} leased, {len(self.retired)} retired of {self.slots}"
        if not room.fits(self.slot_room):
            return f"no room for {room}: {self.room} free; {counts}"
        reserved = f", {self.free} kept for clients with fewer leases" if self.free else ""
        return f"no free slot: {counts}{reserved}"

    def wanting(self) -> list[str]:
        """The refused clients to notify of a free slot, in the order in which they are served."""
        return sorted(self._wants, key=lambda name: (self._counts[name], self._wants[name].first))

    def offer(self, now: float, is_connected: Callable[[str], bool]) -> list[str]:
        """Offer a free slot to the wanting clients. For those that can be notified it is kept for a while from now on.

        Returns:
            As `wanting`.
        """
        for name, want in self._wants.items():
            for request in want.requests.values():
                if not request.offered and is_connected(name):
                    request.last = now
                # Once: a client that doesn't come for it must not hold the slot for ever.
                request.offered = True
        return self.wanting()

    # --------------------------------------------------------------------------------------------------- keeping alive

    def seen(self, client_id: str, now: float) -> None:
        """Record that a client was heard, which renews all its leases."""
        self._seen[client_id] = now

    def clock_set_back(self, now: float) -> None:
        """The clock was set back to `now`: nothing was heard later than that."""
        for client_id, seen in self._seen.items():
            self._seen[client_id] = min(seen, now)
        for held in self.held.values():
            held.renewed_at = min(held.renewed_at, now)
        for want in self._wants.values():
            want.first = min(want.first, now)
            for request in want.requests.values():
                request.last = min(request.last, now)

    def holds(self, client_id: str) -> bool:
        """Whether a client holds a lease, also one that is ending."""
        return self._counts[client_id] > 0

    def last_seen(self, client_id: str) -> float | None:
        """When the client was last heard; None when it is not known."""
        return self._seen.get(client_id)

    def forget_client(self, client_id: str) -> None:
        """Drop what is kept of a client without leases."""
        if not self._counts[client_id]:
            self._seen.pop(client_id, None)
            self._wants.pop(client_id, None)
            # A Counter would keep the zero, and with it the client's name.
            del self._counts[client_id]
            self._held_room.pop(client_id, None)

    def expires_at(self, held: HeldLease) -> float:
        """When a lease ends unless it is renewed."""
        # By its own renewal or by anything that its client sent.
        return max(held.renewed_at, self._seen.get(held.client_id, held.renewed_at)) + held.request.ttl_s

    def due(self, now: float) -> list[HeldLease]:
        """The leases whose time is over; the caller ends each of them."""
        return [h for h in self.held.values() if h.state != "ending" and now >= self.expires_at(h)]

    # ---------------------------------------------------------------------------------------------------------- ending

    def find(self, lease_id: str, epoch: int | None) -> HeldLease | EndedLease | None:
        """The lease a client means. An older epoch finds what is over, never a newer lease."""
        held = self.held.get(lease_id)
        if held is None:
            return self.ended.get(lease_id)
        if epoch is not None and epoch != held.epoch:
            message = f"epoch {epoch} is not this lease's epoch {held.epoch}"
            return EndedLease(lease_id, held.client_id, epoch, LeaseExpired.code, message, held.granted_at)
        return held

    def begin_end(self, held: HeldLease, code: str, message: str) -> bool:
        """Mark a lease as ending: nothing runs in it any more. False when it was."""
        if held.state == "ending":
            return False
        held.state, held.code, held.message = "ending", code, message
        return True

    def finish_end(self, held: HeldLease, now: float, stopped: Stopped) -> EndedLease:
        """Its sandbox is gone (or, not `clean`, could not be confirmed gone: the slot is retired)."""
        del self.held[held.lease_id]
        self._counts[held.client_id] -= 1
        self._held_room[held.client_id] -= held.room
        # Retired first, restored if clean: one path gives the room back, now or when it is confirmed later.
        self.retired[held.slot], self._retired_gpus[held.slot] = held.room, held.gpus
        if stopped.clean:
            self.restore(held.slot)
            self._keep_again(held)
        ended = EndedLease(
            held.lease_id,
            held.client_id,
            held.epoch,
            held.code,
            held.message,
            now,
            stopped.clean,
            stopped.seconds,
            stopped.cpu_s,
            stopped.egress_bytes,
        )
        self._remember(ended)
        return ended

    def refuse_later(self, lease_id: str, now: float) -> None:
        """A release came before its acquire (another connection overtook it): the acquire must not be granted."""
        self._remember(EndedLease(lease_id, "", 0, "released", "released before it was granted", now))

    def _remember(self, ended: EndedLease) -> None:
        self.ended[ended.lease_id] = ended
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def unreported(self, client_id: str) -> list[EndedLease | HeldLease]:
        """The leases of a client that ended, or are ending, without its asking; repeated at each new connection."""
        ending = [held for held in self.held.values() if held.state == "ending"]
        over = [*self.ended.values(), *ending]
        return [each for each in over if each.client_id == client_id and each.code != "released"]

    def restore(self, slot: int) -> None:
        """A retired slot was confirmed clean after all."""
        if slot in self.retired:
            self.room += self.retired.pop(slot)
            self._free_gpus.update(self._retired_gpus.pop(slot))
            self._free.append(slot)
