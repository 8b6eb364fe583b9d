"""What a measurement is: samples in, percentiles out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Unit = Literal["ms", "calls/s", "MB", "s"]


@dataclass(frozen=True)
class Row:
    """One subject in one case.

    Attributes:
        case: what was measured, with its parameter: `throughput, 32 trajectories`.
        subject: who: `atropos`, `swe-rex` …
        unit: of p50, p95, p99 and longest.
        n: samples.
        throughput: calls a second over the whole measurement, where that means something.
        base: whether ratios of the case are formed against this row (ours).
        curve: quantiles 0, 0.01 … 1, where there are samples enough for them.
        extra: anything else worth keeping in the JSON.
    """

    case: str
    subject: str
    unit: Unit
    n: int
    p50: float
    p95: float
    p99: float
    longest: float
    throughput: float | None = None
    base: bool = False
    note: str = ""
    curve: list[float] = field(default_factory=list[float])
    extra: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The smallest sample that at least the share `q` of samples doesn't exceed (nearest rank)."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def row(case: str, subject: str, samples: Sequence[float], unit: Unit = "ms", **more: Any) -> Row:
    """Summarise samples; seconds become milliseconds when the unit is ms."""
    scale = 1000.0 if unit == "ms" else 1.0
    ordered = sorted(s * scale for s in samples)
    return Row(
        case=case,
        subject=subject,
        unit=unit,
        n=len(ordered),
        p50=percentile(ordered, 0.50),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        longest=percentile(ordered, 1),
        curve=[percentile(ordered, at / 100) for at in range(101)] if len(ordered) >= 100 else [],
        **more,
    )
