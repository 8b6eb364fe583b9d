"""The state of a pool at one moment, for people, tests and metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from atropos.metrics import Family, gauge, percentiles

if TYPE_CHECKING:
    from atropos.slots.containers.link import ContainerLink
    from atropos.slots.slot import Slot


@dataclass(frozen=True)
class Percentiles:
    """Of the latest `n` durations, in seconds; zeros when there were none."""

    n: int = 0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, samples: Collection[float]) -> Percentiles:
        """Of these durations."""
        return cls(len(samples), *percentiles(samples, 0.5, 0.95, 0.99, 1.0))


@dataclass(frozen=True)
class PoolStats:
    """One consistent count of a pool.

    Attributes:
        containers: requested or seen; `ready` of them can be leased from.
        slots: of the ready containers; free + leased + retired is less while other clients hold some.
        leased: slots that this pool holds, those being granted included.
        waiting: acquires in line.
        leases / releases / lost / timeouts: counted since the pool started.
        acquire / reset: how long acquires took, and resets of slots on the server.
        trouble: why containers are not coming, in the backend's words; empty when all is well.
    """

    containers: int = 0
    ready: int = 0
    slots: int = 0
    free: int = 0
    leased: int = 0
    retired: int = 0
    waiting: int = 0
    snapshots: int = 0
    leases: int = 0
    releases: int = 0
    lost: int = 0
    timeouts: int = 0
    acquire: Percentiles = Percentiles()
    reset: Percentiles = Percentiles()
    trouble: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ContainerSlots:
    """A container's slots by state; `others` are held by other clients or unknown.

    A lease of several slots' memory counts as that many.
    """

    name: str
    leased: int
    free: int
    retired: int
    others: int
    ready: bool


def occupancy(links: Iterable[ContainerLink]) -> list[ContainerSlots]:
    """The slots of a pool's containers, by index."""
    return [_occupancy(link) for link in sorted(links, key=lambda link: link.seat.index)]


def container_name(links: Mapping[str, ContainerLink], slot: Slot | None) -> str:
    """How an operator finds the container of a pool's slot; empty: there is none."""
    link = None if slot is None else links.get(slot.container)
    return "" if link is None else link.container.name


def _occupancy(link: ContainerLink) -> ContainerSlots:
    seat = link.seat
    slot = seat.capacity // max(1, seat.slots)
    # By room and not by number, so that the states add up to `slots` where a lease takes several.
    leased = (seat.leased_room + seat.reserved_room).parts(slot)
    free = seat.free.holds(slot)
    # Rounding a large lease up to whole slots can exceed the rest.
    others = max(0, seat.slots - leased - free - seat.retired)
    return ContainerSlots(link.container.name, leased, free, seat.retired, others, ready=seat.open)


def gauges(stats: PoolStats, containers: Mapping[str, int]) -> list[Family]:
    """The current state as gauges; `containers`: their number by state."""
    slots = {"free": stats.free, "leased": stats.leased, "retired": stats.retired}
    return [
        gauge("atropos_pool_containers", "Containers by state.", containers, "state"),
        gauge("atropos_pool_containers_wanted", "Containers asked for.", stats.containers),
        gauge("atropos_pool_slots", "Slots by state, those that other clients hold not among them.", slots, "state"),
        gauge("atropos_pool_waiting", "Acquires that wait.", stats.waiting),
        gauge("atropos_pool_snapshots", "Snapshots kept, one for each container that has it.", stats.snapshots),
    ]
