"""By which column a table is sorted, as an address says it: `?sort=score`, or `?sort=-score` for the largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")
Cell = str | float
Columns = Mapping[str, Callable[[Row], Cell]]
"""What a row has in each column that can be sorted by."""


@dataclass(frozen=True)
class Order(Generic[Row]):
    """An order of a table's rows.

    Attributes:
        columns: that can be asked for.
        column: the one that rows are sorted by; empty: they stay as they are.
    """

    columns: Columns[Row]
    column: str
    descending: bool

    @classmethod
    def asked(cls, text: str, columns: Columns[Row], default: str = "") -> Order[Row]:
        """The order that an address asks for; the default's where it names no such column."""
        text = text if text.removeprefix("-") in columns else default
        return cls(columns, text.removeprefix("-"), text.startswith("-"))

    def __str__(self) -> str:
        """As an address says it."""
        return f"-{self.column}" if self.descending else self.column

    def sorted(self, rows: Iterable[Row]) -> list[Row]:
        """Rows in this order; equal ones stay as they are."""
        if not self.column:
            return list(rows)
        return sorted(rows, key=self.columns[self.column], reverse=self.descending)

    def direction(self, column: str) -> str:
        """How a heading says that its column is sorted; empty: it isn't."""
        return "" if column != self.column else "descending" if self.descending else "ascending"

    def next(self, column: str, *, largest_first: bool) -> str:
        """What a heading asks for: its column, and of the column that is sorted already the other direction."""
        descending = not self.descending if column == self.column else largest_first
        return f"-{column}" if descending else column
