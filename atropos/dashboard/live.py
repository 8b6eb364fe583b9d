"""What a running env shows of itself: plain data, taken when a page asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class InFlight:
    """A trajectory that runs. `doing` is its tool call, or `model` between calls; ages in seconds."""

    trajectory_id: str
    item: str
    age_s: float
    doing: str
    doing_s: float
    calls: int


@dataclass(frozen=True)
class LiveSample:
    """The numbers of one interval.

    Attributes:
        trajectories_per_min: finished in it, as a rate.
        calls_per_s: tool calls that ended in it, as a rate.
        call_p50_s / call_p99_s: their latency.
        leased / waiting: slots and acquires at its end.
    """

    trajectories_per_min: float = 0.0
    calls_per_s: float = 0.0
    call_p50_s: float = 0.0
    call_p99_s: float = 0.0
    leased: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class LiveView:
    """One look at a running env.

    Attributes:
        numbers: name and value of each headline figure.
        faults: (kind, code, count), for groups dropped, retries and hooks' errors.
        recent: (Unix seconds, kind, text) of the latest faults, the latest first.
        history: samples, the oldest first, `every_s` apart.
        trouble: why containers are not coming; empty when all is well.
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
