"""How scores went: their mean over time, and how often each item passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from atropos.dashboard.ordering import Cell, Columns, Order
from atropos.dashboard.pass_at import Attempts, PassRates
from atropos.dashboard.store import StoredTrajectory

POINTS = 60
"""Most points of a line of scores."""
PASSING = 1.0
"""Lowest score of a pass, unless a reader names another."""


@dataclass(frozen=True)
class ScoreHistory:
    """Mean scores of consecutive trajectories, the oldest first.

    Attributes:
        each: trajectories that a mean is of; of the last one there may be fewer.
        began / ended: when the first and the last one began, in Unix seconds; None: their records don't say.
    """

    means: Sequence[float]
    each: int
    began: float | None
    ended: float | None

    @classmethod
    def of(cls, entries: Sequence[StoredTrajectory]) -> ScoreHistory:
        """Of these trajectories, in the order in which they ended."""
        each = max(1, -(-len(entries) // POINTS))
        means = [fmean(one.score for one in entries[at : at + each]) for at in range(0, len(entries), each)]
        times = [entry.began for entry in entries if entry.began is not None]
        return cls(means, each, min(times, default=None), max(times, default=None))


@dataclass(frozen=True)
class ItemRates:
    """How often an item passed; `pass_at` by k, as far as it has so many attempts."""

    item: str
    attempts: int
    passed: int
    mean: float
    pass_at: dict[str, float]

    @classmethod
    def of(cls, item: str, rates: Attempts) -> ItemRates:
        """Of its attempts."""
        return cls(item, len(rates.scores), rates.passed, fmean(rates.scores), rates.pass_at())

    @property
    def rate(self) -> float:
        """The part of its attempts that passed."""
        return self.passed / self.attempts


@dataclass(frozen=True)
class RatesTable:
    """Pass rates by item.

    Attributes:
        ks: the columns of pass@k.
        overall: pass@k, the mean over the items with so many attempts.
    """

    rows: Sequence[ItemRates]
    ks: Sequence[str]
    overall: dict[str, float]
    order: Order[ItemRates]

    @classmethod
    def of(cls, entries: Sequence[StoredTrajectory], passing: float, asked: str = "") -> RatesTable:
        """Of these trajectories. `passing`: the lowest score of a pass; `asked`: as an address says an order."""
        rates = PassRates(passing)
        for entry in entries:
            rates.add(entry.item, entry.score)
        overall = rates.mean()
        ks = sorted(overall, key=int)
        order = Order.asked(asked, _columns(ks), "item")
        rows = [ItemRates.of(item, scores) for item, scores in rates.items.items()]
        return cls(order.sorted(rows), ks, overall, order)


def _columns(ks: Sequence[str]) -> Columns[ItemRates]:
    columns: dict[str, Callable[[ItemRates], Cell]] = {
        "item": lambda row: row.item,
        "attempts": lambda row: row.attempts,
        "passed": lambda row: row.passed,
        "rate": lambda row: row.rate,
        "mean": lambda row: row.mean,
    }
    return columns | {f"pass@{k}": partial(_pass_at, k) for k in ks}


def _pass_at(k: str, row: ItemRates) -> float:
    """Items with fewer attempts than `k` are below all others."""
    return row.pass_at.get(k, -1.0)
