"""Seats and tickets: a container and a waiting acquire, as the fleet counts them."""

from __future__ import annotations

from dataclasses import dataclass

from atropos.resources import NOTHING, Resources
from atropos.slots.containers.share import BASE, Share


@dataclass(eq=False, slots=True)
class Seat:
    """A container as the fleet sees it.

    Attributes:
        key: the backend's id of the container.
        index: its place in the scaling order; the lowest with a free slot is used first, so that the highest get idle.
        slots: how many it has in all.
        capacity: all room.
        free: room thought leasable, that of grants under way not among it.
        reserved, reserved_room: grants under way, and what they take.
        leased, leased_room: leases that this pool holds.
        retired, retired_room: slots that the container has retired.
        pins: snapshots that are kept there, and images that are being prepared; while there are any the container is in
            use.
        idle_since: when it was last in use (or it joined), on the caller's monotonic clock, seconds.
        kept_for: the large lease that gets what comes free here.
        architecture: what programs it can run, as images name it.
    """

    key: str
    index: int
    slots: int = 0
    capacity: Resources = NOTHING
    free: Resources = NOTHING
    reserved: int = 0
    reserved_room: Resources = NOTHING
    leased: int = 0
    leased_room: Resources = NOTHING
    retired: int = 0
    retired_room: Resources = NOTHING
    pins: int = 0
    idle_since: float = 0.0
    open: bool = False
    queued: bool = False
    kept_for: Ticket | None = None
    architecture: str = ""

    @property
    def unaccounted(self) -> bool:
        """Whether some room is neither free nor this pool's: another client's, warming, or of a lost answer."""
        # Asked this way round because subtraction of `Resources` stops at zero and would hide a surplus.
        return not self.capacity.fits(self.free + self.reserved_room + self.leased_room + self.retired_room)

    def has_room(self, room: Resources) -> bool:
        """Whether a lease that takes so much may go here now: what is kept for a large one is no room."""
        return room.fits(self.free if self.kept_for is None else self.free - self.kept_for.room)

    def can_hold(self, room: Resources) -> bool:
        """Whether a lease that takes so much fits here once all others have ended."""
        return room.fits(self.capacity - self.retired_room)

    @property
    def busy(self) -> bool:
        """Whether this pool uses it."""
        return bool(self.leased or self.reserved or self.pins)

    def pin(self) -> None:
        """Something is kept or prepared there."""
        self.pins += 1

    def unpin(self, now: float) -> None:
        """It is no more."""
        self.pins -= 1
        self.used(now)

    def used(self, now: float) -> None:
        """It was in use until now."""
        self.idle_since = now

    def count_retired(self, retired: int, room: Resources) -> None:
        """The container's own count of its retired slots."""
        self.retired, self.retired_room = retired, room


@dataclass(eq=False, slots=True)
class Ticket:
    """One acquire, and its lease, which takes `room`.

    Attributes:
        share: whose it is.
        pin: the only container that can serve it, since it has the snapshot; None: any.
        waited: whether room was not there at once.
        image, cpu, disk_mib, network: what the lease starts from, and what it may use.
        granted_at: when the lease began, on the pool's clock; None: there is none yet.
    """

    seq: int
    room: Resources
    share: Share
    pin: Seat | None = None
    waiting: bool = False
    seat: Seat | None = None
    waited: bool = False
    image: str = BASE
    cpu: float = 0.0
    disk_mib: int = 0
    network: bool = False
    granted_at: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Whose turn it is: the lowest first."""
        return self.share.load, self.seq

    def comes_after(self, other: Ticket) -> bool:
        """Whether it gives way to the other one; a pinned one doesn't, as it can be served nowhere else."""
        # By number alone: with loads, which change all the time, two large tickets could displace each other forever.
        return self.pin is None and self.seq > other.seq
