"""How many containers there should be: data in, data out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atropos.slots.containers.seats import Seat


@dataclass(frozen=True)
class Limits:
    """The bounds of scaling. `idle_s`: a container unused for this long may be closed."""

    min_containers: int
    max_containers: int
    slots_per_container: int
    idle_s: float = 60.0


@dataclass(frozen=True)
class PoolState:
    """What scaling decides on.

    Attributes:
        containers: requested or seen, and not ending.
        ready: of these, the ones whose slots can be leased.
        closing: of these, the ones that take no new leases any more.
        waiting: slots that acquires wait for which any container could serve, a large lease counting as several; those
            bound to a snapshot's container are not among them. No free slot serves any of them, or it would be theirs.
            Those whose image is being prepared are among them as far as more of them wait than slots are free.
        needed: how many containers reach up to the highest-index one that is in use, or was within `idle_s`.
        late: requested containers that have not appeared although no acquire has waited for `idle_s`: the engine has no
            place for them, and shrinking does not wait for them.
    """

    containers: int
    ready: int
    waiting: int
    needed: int
    closing: int = 0
    late: int = 0

    @property
    def coming(self) -> int:
        """How many are expected that can't be leased from yet."""
        return max(0, self.containers - self.ready - self.closing)


@dataclass(frozen=True)
class Plan:
    """The number of containers to request; the state's own `containers` means no change."""

    target: int
    reason: str = ""


def plan(state: PoolState, limits: Limits) -> Plan:
    """How many containers there should be.

    Grows by what waits beyond the slots that are coming; shrinks only while nothing waits, and only by the
    highest-index containers that have long been idle, since those are the ones a backend ends first.
    """
    coming = state.coming * limits.slots_per_container
    lacking = -(-(state.waiting - coming) // limits.slots_per_container)  # containers, rounded up
    target = min(state.containers + lacking, limits.max_containers)
    if target > state.containers:
        return Plan(target, f"{state.waiting} slots waited for, {coming} coming")
    # After growth by demand, whose target may be higher than the minimum.
    if state.containers < limits.min_containers:
        return Plan(limits.min_containers, "below min_containers")
    # Never while containers are still coming: the engine ends the highest index, which may be the one that starts.
    if state.waiting == 0 and state.ready + state.closing + state.late >= state.containers:
        target = max(limits.min_containers, state.needed)
        if target < state.containers:
            return Plan(target, f"{state.containers - target} idle for {limits.idle_s:g} s")
    return Plan(state.containers)


def worn_out(state: PoolState, limits: Limits, seats: Iterable[Seat]) -> Seat | None:
    """The container to close and replace because its retired slots are needed and no further container is allowed.

    One at a time, the one with the most retired slots first; containers that keep snapshots stay.
    """
    if not state.waiting or state.containers < limits.max_containers or state.coming or state.closing:
        return None
    worn = (seat for seat in seats if seat.open and seat.retired and not seat.pins)
    return max(worn, key=lambda seat: (seat.retired, -seat.leased, seat.index), default=None)
