"""Metrics as plain data, and Prometheus' text of them. Without a dependency: the sandbox image has no client library.

Names follow Prometheus' practice: base units (seconds, bytes), `_total` for counters, labels from small fixed sets.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the text exposition format that `exposition` writes."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Upper bounds of every histogram's buckets, in seconds: from a call's overhead to an image's pull."""


@dataclass(frozen=True)
class Family:
    """One metric: its samples are (suffix of the name, labels, value)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[tuple[str, Mapping[str, str], float], ...]


class Histogram:
    """Durations by bucket, for each combination of label values. About a microsecond an observation.

    Args:
        name: ends in `_seconds`.
        help_text: one line.
        labels: their names; the values must come from small fixed sets.
    """

    __slots__ = ("_counts", "_sums", "help", "labels", "name")

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name, self.help, self.labels = name, help_text, labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *values: str) -> None:
        """Count a duration under these label values."""
        counts = self._counts.get(values)
        if counts is None:
            counts = self._counts[values] = [0] * (len(BUCKETS_S) + 1)
            self._sums[values] = 0.0
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sums[values] += seconds

    def family(self) -> Family:
        """Everything observed so far."""
        samples: list[tuple[str, Mapping[str, str], float]] = []
        for values, counts in self._counts.items():
            labels = dict(zip(self.labels, values, strict=True))
            total = 0
            for bound, count in zip((*BUCKETS_S, float("inf")), counts, strict=True):
                total += count
                samples.append(("_bucket", {**labels, "le": _number(bound)}, total))
            samples += [("_sum", labels, self._sums[values]), ("_count", labels, total)]
        return Family(self.name, "histogram", self.help, tuple(samples))


def percentiles(samples: Iterable[float], *shares: float) -> list[float]:
    """By the nearest-rank method; zeros without samples."""
    ordered = sorted(samples) or [0.0]
    return [ordered[max(0, math.ceil(len(ordered) * share) - 1)] for share in shares]


def counter(name: str, help_text: str, value: float | Mapping[str, float], label: str = "") -> Family:
    """What only grows; `name` ends in `_total`. A mapping holds the values by label value."""
    return Family(name, "counter", help_text, _samples(value, label))


def gauge(name: str, help_text: str, value: float | Mapping[str, float], label: str = "") -> Family:
    """What goes up and down. A mapping holds the values by label value."""
    return Family(name, "gauge", help_text, _samples(value, label))


def _samples(value: float | Mapping[str, float], label: str) -> tuple[tuple[str, Mapping[str, str], float], ...]:
    if isinstance(value, Mapping):
        return tuple(("", {label: name}, number) for name, number in value.items())
    return (("", {}, value),)


def build_info() -> Family:
    """`atropos_build_info`: which version runs, as labels of a constant 1."""
    labels = {"version": installed_version(), "python": platform.python_version()}
    return Family("atropos_build_info", "gauge", "Version that runs.", (("", labels, 1),))


def installed_version() -> str:
    """The package's version; "source" where it runs from a bare folder, as in the sandbox image."""
    try:
        return version("atropos")
    except PackageNotFoundError:
        return "source"


def exposition(families: Iterable[Family], **labels: str) -> str:
    """Prometheus' text exposition format, version 0.0.4.

    Args:
        families: each name once.
        labels: added to every sample.
    """
    lines: list[str] = []
    for family in families:
        lines += [f"# HELP {family.name} {_escape(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for suffix, own, value in family.samples:
            pairs = ",".join(f'{name}="{_escape(text, quoted=True)}"' for name, text in {**labels, **own}.items())
            labelled = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{family.name}{suffix}{labelled} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
