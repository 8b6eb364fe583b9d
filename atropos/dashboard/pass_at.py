"""How often one of k attempts at an item passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from statistics import fmean


@dataclass
class Attempts:
    """The attempts at one item."""

    passing: float
    scores: list[float] = field(default_factory=list[float])

    @property
    def passed(self) -> int:
        """How many passed."""
        return sum(score >= self.passing for score in self.scores)

    def pass_at(self) -> dict[str, float]:
        """By k, a power of two up to the number of attempts: the chance that one of k drawn ones is a pass.

        The unbiased estimate of "Evaluating Large Language Models Trained on Code" (2021), section 2.1.
        """
        total, failed = len(self.scores), len(self.scores) - self.passed
        powers = [2**power for power in range(total.bit_length()) if 2**power <= total]
        return {str(k): round(1 - comb(failed, k) / comb(total, k), 4) for k in powers}

    def numbers(self) -> dict[str, object]:
        """As JSON."""
        mean = round(fmean(self.scores), 4)
        return {"trajectories": len(self.scores), "passed": self.passed, "mean_score": mean, "pass_at": self.pass_at()}

    def __str__(self) -> str:
        rates = "  ".join(f"pass@{k} {rate:g}" for k, rate in self.pass_at().items())
        return f"{self.passed} of {len(self.scores)}  mean {fmean(self.scores):.4g}  {rates}"


class PassRates:
    """Attempts by item. `passing`: the lowest score of a pass."""

    def __init__(self, passing: float) -> None:
        self._passing = passing
        self.items: dict[str, Attempts] = {}

    def add(self, item: str, score: float) -> None:
        """Count an attempt."""
        self.items.setdefault(item, Attempts(self._passing)).scores.append(score)

    def mean(self) -> dict[str, float]:
        """By k: the mean over the items with at least k attempts."""
        rates: dict[str, list[float]] = {}
        for attempts in self.items.values():
            for k, rate in attempts.pass_at().items():
                rates.setdefault(k, []).append(rate)
        return {k: round(fmean(values), 4) for k, values in rates.items()}
