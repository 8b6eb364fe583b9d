"""One client's share of a pool: what it may use, and what it uses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

from atropos.errors import ConfigError, QuotaReached
from atropos.images.reference import is_built
from atropos.slots.config import Quotas

if TYPE_CHECKING:
    from atropos.resources import Resources
    from atropos.wire import EgressSecret, ReleaseResult, SnapshotInfo

BASE = "(base)"
"""What usage is counted under where a slot started from no image."""
OTHERS = "(others)"
"""What usage is counted under once a share has used `MAX_IMAGES`."""
MAX_IMAGES = 100
DAILY = frozenset({"images", "egress_mib"})
"""Quotas that begin anew each day (UTC)."""
_QUOTAS = tuple(name for name in Quotas.model_fields if name != "weight")
_DAY_S = 86_400
_MIB = 1 << 20


@dataclass
class Usage:
    """What leases used.

    CPU time and bytes are of those that were given back: a lost container takes its counts with it.

    Attributes:
        slot_s: seconds for which they held their slots.
        egress_bytes: moved through the egress proxy, both ways.
    """

    leases: int = 0
    slot_s: float = 0.0
    cpu_s: float = 0.0
    egress_bytes: int = 0


@dataclass(frozen=True)
class QuotaUse:
    """A quota by its name, and what counts towards it now."""

    quota: str
    used: float
    most: float


@dataclass
class _Day:
    """What counts towards the quotas of a day (UTC)."""

    number: int
    images: set[str] = field(default_factory=set[str])
    egress_bytes: int = 0


class Claim(Protocol):
    """An acquire and then its lease (`fleet.Ticket`), as its share sees them."""

    room: Resources
    image: str
    cpu: float
    disk_mib: int
    network: bool
    granted_at: float | None


class Kept(Protocol):
    """A snapshot, as its share sees it."""

    @property
    def info(self) -> SnapshotInfo:
        """Its size."""
        ...

    @property
    def places(self) -> Iterable[object]:
        """Living containers that have it."""
        ...


class Share:
    """One client's share of a pool.

    Where several wait, the next free slot goes to the one that holds least by its weight.

    Args:
        quotas: what it may use.

    Attributes:
        quotas: may be replaced at any time; leases that it has go on.
        secrets: what the egress proxy puts into requests of its leases that have a network; the same holds of them.
        held_mib: memory of its leases and of grants under way.
        snapshots: that it keeps.
    """

    def __init__(self, quotas: Quotas | None = None) -> None:
        self.quotas = Quotas() if quotas is None else quotas
        if not isinstance(cast("object", self.quotas), Quotas):
            raise ConfigError(f"quotas: write a Quotas (got {type(quotas).__name__})")
        self.secrets: tuple[EgressSecret, ...] = ()
        self.held_mib = 0
        self.snapshots: set[Kept] = set()
        # Two sets: an acquire counts towards quotas while it waits, but holds room (and loses its turn) only with a
        # grant.
        self._held: set[Claim] = set()
        self._claims: set[Claim] = set()
        self._used: dict[str, Usage] = {}
        self._day = _Day(0)

    def __repr__(self) -> str:
        return f"<Share {len(self._claims)} acquires and leases, {self.held_mib} MiB held>"

    @property
    def load(self) -> float:
        """What it holds by its weight: the least goes first."""
        return self.held_mib / self.quotas.weight

    @property
    def slots(self) -> int:
        """Acquires and leases that count towards its quotas."""
        return len(self._claims)

    # ------------------------------------------------------------------------------------------------------- quotas

    def claim(self, claim: Claim) -> None:
        """Count an acquire towards the quotas, from before it waits until its lease ends.

        Raises:
            QuotaReached: one is used up.
        """
        # All checks come before anything is counted, so that a refused acquire leaves no trace.
        self._check("slots", 1)
        self._check("memory_mib", claim.room.memory_mib)
        self._check("cpu", claim.cpu)
        self._check("disk_mib", claim.disk_mib)
        if claim.network:
            self._check_egress()
        self.use_image(claim.image)
        self._claims.add(claim)

    def use_image(self, image: str) -> None:
        """Count an image towards those of today; built ones are made of those.

        Raises:
            QuotaReached: there have been too many.
        """
        images = self._today().images
        if self.quotas.images is not None and image != BASE and not is_built(image) and image not in images:
            self._check("images", 1)
            images.add(image)

    def check_snapshot(self, *, stays: bool = True) -> None:
        """Check that one more snapshot may be kept. `stays`: its slot continues beside it.

        Raises:
            QuotaReached: too many are, or they hold too much.
        """
        self._living()  # forgets those that are lost
        self._check("snapshots", 1)
        if stays:
            # What the snapshot will hold is known once it exists; one MiB asks whether anything is left.
            self._check("disk_mib", 1)

    def quota_use(self) -> list[QuotaUse]:
        """The quotas that it has."""
        return [QuotaUse(name, self._used_of(name), most) for name in _QUOTAS if (most := self._most(name)) is not None]

    def _most(self, quota: str) -> float | None:
        return getattr(self.quotas, quota)

    def _used_of(self, quota: str) -> float:
        match quota:
            case "slots":
                return len(self._claims)
            case "memory_mib":
                return sum(each.room.memory_mib for each in self._claims)
            case "cpu":
                return sum(each.cpu for each in self._claims)
            case "disk_mib":
                return self._kept_mib() + sum(each.disk_mib for each in self._claims)
            case "snapshots":
                return len(self._living())
            case "images":
                return len(self._today().images)
            case "egress_mib":
                return self._today().egress_bytes / _MIB
            case _:
                raise ValueError(quota)

    def _check(self, quota: str, more: float) -> None:
        if (most := self._most(quota)) is not None and (used := self._used_of(quota)) + more > most:
            name = f"{quota} (a day)" if quota in DAILY else quota
            raise QuotaReached(f"quota {name}: {used:.15g} of {most:.15g} are used, and {more:.15g} more asked for")

    def _check_egress(self) -> None:
        most = self.quotas.egress_mib
        # `>=`, not `_check`: nobody knows ahead how much a lease will move, and 0 more would pass at the bound.
        if most is not None and self._used_of("egress_mib") >= most:
            raise QuotaReached(f"quota egress_mib (a day): {most} of {most} MiB are used")

    def _living(self) -> set[Kept]:
        # A lost container ends its snapshots without a call to this share.
        self.snapshots = {each for each in self.snapshots if each.places}
        return self.snapshots

    def _kept_mib(self) -> int:
        return -(-sum(each.info.bytes for each in self._living()) // _MIB)

    def _today(self) -> _Day:
        # Wall-clock time: a quota a day is a promise to people, and the monotonic clock has no midnight.
        number = int(time.time() // _DAY_S)
        if self._day.number != number:
            self._day = _Day(number)
        return self._day

    # ------------------------------------------------------------------------------------------------------- leases

    def hold(self, claim: Claim) -> None:
        """Room is reserved for an acquire."""
        # A ticket is held at its reservation and again when that becomes a lease.
        if claim not in self._held:
            self._held.add(claim)
            self.held_mib += claim.room.memory_mib

    def let_go(self, claim: Claim) -> None:
        """An acquire or lease holds no room any more. Idempotent."""
        if claim in self._held:
            self._held.discard(claim)
            self.held_mib -= claim.room.memory_mib

    def end(self, claim: Claim, now: float, result: ReleaseResult | None = None) -> None:
        """An acquire failed or its lease ended (`result`: as the server said). Idempotent."""
        self.let_go(claim)
        if claim not in self._claims:
            return
        self._claims.discard(claim)
        # An acquire that got no slot used nothing.
        if claim.granted_at is None:
            return
        used = self._used_under(claim.image)
        used.leases += 1
        used.slot_s += now - claim.granted_at
        if result is not None:
            used.cpu_s += result.cpu_s or 0.0
            used.egress_bytes += result.egress_bytes
            # Counted on the day on which the lease ends: the server tells its bytes only then.
            self._today().egress_bytes += result.egress_bytes

    def _used_under(self, image: str) -> Usage:
        if image not in self._used and len(self._used) >= MAX_IMAGES:
            image = OTHERS
        return self._used.setdefault(image, Usage())

    def usage(self, now: float) -> dict[str, Usage]:
        """What it has used so far, by image; the seconds of its present leases among it."""
        totals = {image: replace(used) for image, used in self._used.items()}
        for claim in self._claims:
            if claim.granted_at is not None:
                image = claim.image if claim.image in totals or len(totals) < MAX_IMAGES else OTHERS
                used = totals.setdefault(image, Usage())
                used.leases += 1
                used.slot_s += now - claim.granted_at
        return totals
