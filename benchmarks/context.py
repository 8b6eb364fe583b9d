"""What every case gets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from .stats import Row


@dataclass
class Context:
    """How much a case measures, and where it says what it does.

    Attributes:
        scale: factor on all sample counts; 1.0 for a full run.
        say: tells what is being done now.
        skip_peers: leave the peers out (profiling our side alone).
        problems: what a case couldn't measure, a line each.
    """

    scale: float
    say: Callable[[str], None]
    skip_peers: bool = False
    problems: list[str] = field(default_factory=list[str])

    def n(self, full: int, least: int = 8) -> int:
        return max(least, int(full * self.scale))


Case = Callable[[Context], AsyncIterator[Row]]
