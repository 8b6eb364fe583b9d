"""Counts and times of tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from atropos.metrics import Histogram, percentiles
from atropos.tools.models import ToolResult
from atropos.tools.trajectory import TrajectoryState

SAMPLES = 2048
"""Latest calls that the percentiles are computed from."""


@dataclass(frozen=True)
class ToolStats:
    """One tool's calls: how many, how many without success, and seconds in total."""

    calls: int
    errors: int
    seconds: float


@dataclass(frozen=True)
class ExecutorStats:
    """Counts since the start, the present state, and percentiles of the latest calls in seconds, waiting included."""

    calls: int
    errors: int
    trajectories: int
    leased: int
    broken: int
    running: int
    releasing: int
    p50_s: float
    p95_s: float
    p99_s: float
    tools: Mapping[str, ToolStats] = field(default_factory=dict[str, ToolStats])


class Meter:
    """Adds up calls; cheap enough for each one.

    Attributes:
        seconds: every call, its wait for its turn and for the slot included, by tool and result: ok, error, or the code
            of an infrastructure failure.
    """

    def __init__(self) -> None:
        self.seconds = Histogram("atropos_tool_call_seconds", "Time of tool calls.", "tool", "result")
        self._tools: dict[str, ToolStats] = {}
        self._latest: deque[float] = deque(maxlen=SAMPLES)

    def count(self, name: str, result: ToolResult, seconds: float) -> None:
        """One more call has ended."""
        so_far = self._tools.get(name, ToolStats(0, 0, 0.0))
        errors = so_far.errors + (not result.success)
        self._tools[name] = ToolStats(so_far.calls + 1, errors, so_far.seconds + seconds)
        self.seconds.observe(seconds, name, "ok" if result.success else "error")
        self._latest.append(seconds)

    def stats(self, trajectories: Collection[TrajectoryState], releasing: int) -> ExecutorStats:
        """Everything so far, with the present trajectories' state."""
        p50_s, p95_s, p99_s = percentiles(self._latest, 0.5, 0.95, 0.99)
        return ExecutorStats(
            calls=sum(tool.calls for tool in self._tools.values()),
            errors=sum(tool.errors for tool in self._tools.values()),
            trajectories=len(trajectories),
            leased=sum(one.slot is not None for one in trajectories),
            broken=sum(one.broken is not None for one in trajectories),
            running=sum(len(one.calls) for one in trajectories),
            releasing=releasing,
            p50_s=p50_s,
            p95_s=p95_s,
            p99_s=p99_s,
            tools=dict(sorted(self._tools.items())),
        )
