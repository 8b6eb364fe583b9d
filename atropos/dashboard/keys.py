"""What each key of a server has open, and has used since the server's start."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atropos.dashboard.live import LiveView
from atropos.dashboard.ordering import Columns
from atropos.dashboard.text import number
from atropos.slots.containers.share import QuotaUse, Usage

IMAGES = 5
"""Named of a key, those that held slots longest; one more row has the rest."""


@dataclass(frozen=True)
class KeyRow:
    """A key of a server.

    Attributes:
        open: sandboxes and trajectories that it has open now.
        part: of the slot time of all keys, its own.
        images: what it used by image, the longest slot time first.
        quotas: those that it has.
    """

    key: str
    open: int
    part: float
    used: Usage
    images: Sequence[tuple[str, Usage]]
    quotas: Sequence[QuotaUse]


KEYS: Columns[KeyRow] = {
    "key": lambda row: row.key,
    "open": lambda row: row.open,
    "leases": lambda row: row.used.leases,
    "slot": lambda row: row.used.slot_s,
    "cpu": lambda row: row.used.cpu_s,
    "egress": lambda row: row.used.egress_bytes,
}


def key_rows(view: LiveView) -> list[KeyRow]:
    """The keys that used something or have quotas, the longest slot time first."""
    by_key = defaultdict[str, list[tuple[str, Usage]]](list)
    for key, image, used in view.usage:
        by_key[key].append((image, used))
    quotas = defaultdict[str, list[QuotaUse]](list)
    for key, quota in view.quotas:
        quotas[key].append(quota)
    opened = Counter(each.key for each in view.in_flight)
    all_slot_s = sum(used.slot_s for _, _, used in view.usage) or 1.0
    rows: list[KeyRow] = []
    for key in [*by_key, *(quotas.keys() - by_key.keys())]:
        total = _total(used for _, used in by_key[key])
        rows.append(KeyRow(key, opened[key], total.slot_s / all_slot_s, total, _longest(by_key[key]), quotas[key]))
    return sorted(rows, key=lambda row: -row.used.slot_s)


def _longest(images: Iterable[tuple[str, Usage]]) -> list[tuple[str, Usage]]:
    ordered = sorted(images, key=lambda each: -each[1].slot_s)
    named, rest = ordered[:IMAGES], ordered[IMAGES:]
    return [*named, (number(len(rest), "more image"), _total(used for _, used in rest))] if rest else named


def _total(parts: Iterable[Usage]) -> Usage:
    total = Usage()
    for each in parts:
        total.leases += each.leases
        total.slot_s += each.slot_s
        total.cpu_s += each.cpu_s
        total.egress_bytes += each.egress_bytes
    return total
