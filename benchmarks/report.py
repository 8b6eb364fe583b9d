"""A run as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .stats import Row

GOALS: dict[str, str] = {
    "sequential call": "at most 0.4 of what swe-rex adds to its shell",
    "32 trajectories over 1 container": "p99 at most 2.5x p50",
    "32 trajectories over 2 containers": "p99 at most 2.5x p50",
    "32 trajectories over 4 containers": "p99 at most 2.5x p50",
    "32 slots ready from nothing": "0.6 s",
    "acquire, warm pool": "2 ms",
    "release to lease, 1 files": "10 ms",
    "release to lease, 10,000 files": "10 ms",
    "release to lease, 100,000 files": "10 ms",
    "fork of a prepared workspace": "10 ms",
    "8 forks together": "20 ms",
    "32 forks together": "40 ms",
    "memory of an idle slot (PSS)": "half of that at commit c714036e",
}
"""As docs/benchmarks.md has them."""


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Our row beside each peer's of the same case: our time, and our calls a second, in units of the peer's."""
    found: list[dict[str, Any]] = []
    for base in (r for r in rows if r.base):
        for peer in (r for r in rows if r.case == base.case and not r.base):
            ratio: dict[str, Any] = {"case": base.case, "of": base.subject, "to": peer.subject}
            ratio["p50"] = base.p50 / peer.p50 if peer.p50 else math.nan
            ratio["p99"] = base.p99 / peer.p99 if peer.p99 else math.nan
            if base.throughput and peer.throughput:
                ratio["throughput"] = base.throughput / peer.throughput
            found.append(ratio)
    return found


def _number(value: float, unit: str) -> str:
    return f"{value:,.2f} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def table(rows: Sequence[Row]) -> Table:
    """One line a row; a peer's line says our ratio to it."""
    made = Table(title="atropos beside its peers, in one run", header_style="bold")
    for name, justify in (("case", "left"), ("subject", "left"), ("n", "right")):
        made.add_column(name, justify=justify)
    for name in ("p50", "p95", "p99", "longest", "calls/s", *(f"ours/theirs {of}" for of in ("p50", "p99", "calls"))):
        made.add_column(name, justify="right")
    made.add_column("goal or note")
    by_pair = {(r["case"], r["to"]): r for r in ratios(rows)}
    previous = ""
    for r in rows:
        if previous and r.case != previous:
            made.add_section()
        ratio = by_pair.get((r.case, r.subject), {})
        goal = GOALS.get(r.case, "") if r.base else ""
        made.add_row(
            r.case if r.case != previous else "",
            f"[bold]{r.subject}[/bold]" if r.base else r.subject,
            f"{r.n:,}",
            _number(r.p50, r.unit),
            _number(r.p95, r.unit),
            _number(r.p99, r.unit),
            _number(r.longest, r.unit),
            f"{r.throughput:,.0f}" if r.throughput else "",
            f"{ratio['p50']:.2f}" if "p50" in ratio else "",
            f"{ratio['p99']:.2f}" if "p99" in ratio else "",
            f"{ratio['throughput']:.2f}" if "throughput" in ratio else "",
            "; ".join(part for part in (goal, r.note) if part),
        )
        previous = r.case
    return made


def show(console: Console, machine: dict[str, Any], rows: Sequence[Row], problems: Sequence[str]) -> None:
    """Print the run."""
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, "
        f"{machine['bubblewrap']}, load before {machine['load_before']:.2f}"
    )
    console.print(table(rows))
    for problem in problems:
        console.print(f"[red]not measured:[/red] {problem}")


def write(path: Path, machine: dict[str, Any], rows: Sequence[Row], problems: Sequence[str]) -> None:
    """Write the run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "machine": machine,
        "rows": [r.as_json() for r in rows],
        "ratios": ratios(rows),
        "not_measured": list(problems),
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
