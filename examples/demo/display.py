"""The demo's output: a live view while it runs, a table at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

SHOWN = 6
"""Lines of finished trajectories in the live view."""


def colour(score: float) -> str:
    """Of a score between 0 and 1."""
    return "green" if score >= 0.999 else "red" if score <= 0.001 else "yellow"


class Display:
    """Collects an env's events; shows them live on a terminal, else one line a group."""

    def __init__(self, console: Console, env: Any) -> None:
        self.console = console
        self.env = env
        self.rollouts: dict[str, list[Any]] = defaultdict(list)
        self.dropped: dict[str, str] = {}
        self.retries = 0
        self.pool: Any = None
        """The pool's last numbers, for the table, which is made when the pool has ended."""
        self.started = time.perf_counter()
        self.first: float | None = None
        self.last = self.started
        self._recent: list[Text] = []
        self._progress = Progress(
            TextColumn("[bold]trajectories"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("trajectories", total=env.config.total_steps * env.config.group_size)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich__(self) -> Group:
        self.sample()
        return Group(self._progress, Text(self._situation(), style="dim"), *self._recent)

    def sample(self) -> None:
        """Keep the pool's numbers while there is one."""
        if self.env.pool is not None:
            self.pool = self.env.pool.stats()

    def _situation(self) -> str:
        calls, pool = self.env.metrics.calls, self.pool
        if pool is None:
            return "starting containers"
        seconds = max(1e-9, time.perf_counter() - (self.first or self.started))
        return (
            f"{pool.ready} containers, {pool.leased} of {pool.slots} slots leased, {pool.waiting} waiting · "
            f"{calls} calls, {calls / seconds:.0f}/s · {pool.releases} resets"
        )

    def see(self, event: Any) -> None:
        """An env's event."""
        self.sample()
        self.last = time.perf_counter()
        if event.kind == "trajectory":
            self.rollouts[event.item].append(event.rollout)
            played = len(self.env.items) - len(self.env.left_out)
            self._progress.update(self._task, total=played * self.env.config.group_size, advance=1)
            if self.first is None:
                self.first = self.last - event.rollout.seconds
            line = Text.assemble(
                (f"{event.rollout.score:5.2f} ", colour(event.rollout.score)),
                f"{event.rollout.trajectory_id}  ",
                (f"{event.rollout.steps} steps, {event.rollout.calls} calls, {event.rollout.seconds:.1f} s", "dim"),
            )
            self._recent = [*self._recent[1 - SHOWN :], line]
        elif event.kind == "group" and self._live is None:
            scores = " ".join(f"{rollout.score:.2f}" for rollout in event.rollouts)
            self.console.print(f"{event.item:<24} {scores}", highlight=False)
        elif event.kind == "dropped":
            self.dropped[event.item] = event.detail
            self.console.print(f"{event.item}: dropped: {event.detail}", style="red", highlight=False)
        elif event.kind == "retry":
            self.retries += 1


def summary(display: Display, jsonl: Path | None) -> dict[str, Any]:
    """The run in numbers, for people and `--json`."""
    metrics = display.env.metrics.as_dict()
    seconds = max(1e-9, display.last - (display.first or display.started))
    pool = display.pool
    scores = [rollout.score for rollouts in display.rollouts.values() for rollout in rollouts]
    return {
        "tasks": {
            name: {
                "scores": [rollout.score for rollout in rollouts],
                "steps": sum(rollout.steps for rollout in rollouts),
                "calls": sum(rollout.calls for rollout in rollouts),
                "seconds": round(sum(rollout.seconds for rollout in rollouts) / len(rollouts), 3),
            }
            for name, rollouts in (
                (n, sorted(r, key=lambda one: one.trajectory_id)) for n, r in sorted(display.rollouts.items())
            )
        },
        "trajectories": len(scores),
        "mean_score": sum(scores) / len(scores) if scores else 0.0,
        "dropped": display.dropped,
        "left_out": display.env.left_out,
        "retries": display.retries,
        "seconds": round(seconds, 3),
        "calls": metrics["env/tool_calls"],
        "calls_per_s": round(metrics["env/tool_calls"] / seconds, 1),
        "call_p50_ms": round(metrics["env/call_p50_s"] * 1000, 2),
        "call_p99_ms": round(metrics["env/call_p99_s"] * 1000, 2),
        "resets": pool.releases if pool else 0,
        "reset_p50_ms": round(pool.reset.p50_s * 1000, 2) if pool else 0.0,
        "acquire_p50_ms": round(pool.acquire.p50_s * 1000, 2) if pool else 0.0,
        "jsonl": str(jsonl) if jsonl else None,
        "page": str(jsonl.with_suffix(".html")) if jsonl else None,
    }


def show(console: Console, numbers: dict[str, Any], mistakes: float) -> None:
    """The table, the totals and where the files are."""
    table = Table(header_style="bold", title_justify="left")
    table.add_column("task")
    table.add_column("scores")
    for name in ("steps", "calls", "seconds"):
        table.add_column(name, justify="right")
    for name, row in numbers["tasks"].items():
        scores = Text(" ").join(Text(f"{score:.2f}", style=colour(score)) for score in row["scores"])
        table.add_row(name, scores, str(row["steps"]), str(row["calls"]), f"{row['seconds']:.2f}")
    for name in numbers["dropped"]:
        table.add_row(name, Text("dropped", style="red"), "", "", "")
    for name in numbers["left_out"]:
        table.add_row(name, Text("left out", style="yellow"), "", "", "")
    console.print(table)
    if numbers["left_out"]:
        names = ", ".join(numbers["left_out"])
        console.print(f"Left out, since their own solutions don't solve them on this base (reasons above): {names}")
    console.print(
        f"{numbers['trajectories']} trajectories, mean score {numbers['mean_score']:.2f}, in {numbers['seconds']:.1f} s"
    )
    if mistakes and numbers["mean_score"] < 1:
        console.print(f"A mean below 1 is intended: the scripted policy errs in {mistakes:.0%} of the trajectories.")
    console.print(
        f"{numbers['calls']} calls, {numbers['calls_per_s']:.0f}/s, p50 {numbers['call_p50_ms']:.1f} ms, "
        f"p99 {numbers['call_p99_ms']:.1f} ms · {numbers['resets']} resets, p50 {numbers['reset_p50_ms']:.1f} ms"
    )
    if numbers["jsonl"]:
        console.print(f"groups: {numbers['jsonl']}\npage:   {numbers['page']}", soft_wrap=True, highlight=False)
