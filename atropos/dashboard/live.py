"""What a running env or server shows of itself: plain data, taken when a page asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atropos.slots.containers.share import QuotaUse, Usage
from atropos.slots.pool.stats import ContainerSlots


@dataclass(frozen=True)
class InFlight:
    """A trajectory or sandbox that is open.

    Attributes:
        item: what a trajectory is about; empty: it is a server's, which doesn't know.
        age_s: since it was opened, in seconds.
        doing: its tool call, or `model` between calls; of a server's the latest call or command.
        doing_s: since that began, in seconds.
        calls: those that ended, of a trajectory; of a server's those that run or wait.
        key: whose it is, on a server with keys.
        image: what its slot starts from; empty: the base.
        container: where its slot is; empty: it has none now.
        state: as the server says, `running`, `paused` or `broken`.
    """

    trajectory_id: str
    item: str
    age_s: float
    doing: str
    doing_s: float
    calls: int
    key: str = ""
    image: str = ""
    container: str = ""
    state: str = ""


@dataclass(frozen=True)
class LiveSample:
    """The numbers of one interval; None: whatever is looked at doesn't count that.

    Attributes:
        trajectories_per_min: finished in it, as a rate.
        calls_per_s: tool calls that ended in it, as a rate.
        call_p50_s / call_p99_s: their latency.
        leased / waiting: slots and acquires at its end.
    """

    trajectories_per_min: float | None = None
    calls_per_s: float | None = None
    call_p50_s: float | None = None
    call_p99_s: float | None = None
    leased: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class LiveView:
    """One look at a running env or server.

    Attributes:
        numbers: name and value of each headline figure.
        in_flight: trajectories, of an env; of a server all that is open there.
        faults: (kind, code, count), for groups dropped, retries and hooks' errors.
        recent: (Unix seconds, kind, text) of the latest faults, the latest first.
        history: samples, the oldest first, `every_s` apart.
        trouble: why containers are not coming; empty when all is well.
        usage: (key, image, what it used), of a server with keys.
        quotas: (key, one of its quotas).
    """

    uptime_s: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    containers: Sequence[ContainerSlots] = ()
    in_flight: Sequence[InFlight] = ()
    waiting: int = 0
    faults: Sequence[tuple[str, str, int]] = ()
    recent: Sequence[tuple[float, str, str]] = ()
    history: Sequence[LiveSample] = ()
    every_s: float = 5.0
    trouble: str = ""
    usage: Sequence[tuple[str, str, Usage]] = ()
    quotas: Sequence[tuple[str, QuotaUse]] = ()
