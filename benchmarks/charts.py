"""Runs as a picture: `python -m benchmarks.charts RUN.json... [--out docs/benchmarks]`.

One has the medians in units of ours; the other, with `-tails` in its name, how calls are distributed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

OURS, THEIRS = "#1f6feb", "#9aa4af"
CALLS = re.compile(r"^(sequential call|throughput, |\d+ trajectories over )")
"""Cases that time calls."""


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, str, float, bool]]:
    """Case, subject, median in units of ours, and whether it is ours; cases without a peer have none."""
    found: list[tuple[str, str, float, bool]] = []
    for at, base in enumerate(rows):
        if not (base["base"] and base["p50"]):
            continue
        end = next(
            (n for n in range(at + 1, len(rows)) if rows[n]["base"] or rows[n]["case"] != base["case"]), len(rows)
        )
        case = rows[at:end]
        if len(case) > 1:
            found += [(row["case"], row["subject"], row["p50"] / base["p50"], row["base"]) for row in case]
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write `path`.png and .svg, of medians, and `path`-tails.png and .svg, of distributions."""
    _draw_medians(rows, path)
    _draw_tails(rows, path.with_name(f"{path.name}-tails"))


def _draw_medians(rows: list[dict[str, Any]], path: Path) -> None:
    """Nothing where no case has a peer."""
    if not (found := bars(rows)):
        return
    figure, (axes,) = _subplots(1, (9, 1 + 0.24 * len(found)))
    at, ticks, labels, previous = 0.0, list[float](), list[str](), ""
    for case, subject, value, own in found:
        at += 0.6 if case != previous else 0
        axes.barh(at, value, color=OURS if own else THEIRS, height=0.8)
        axes.text(value * 1.05, at, f"{value:.2f}", va="center", fontsize=7)
        ticks.append(at)
        labels.append(f"{case}: {subject}" if case != previous else subject)
        at, previous = at + 1, case
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(1, color=OURS, linewidth=0.8)
    axes.set_xlabel(
        "median, in units of atropos's in the same run\n(log scale; longer is slower, or takes more memory)", fontsize=8
    )
    _save(figure, path)


def _draw_tails(rows: list[dict[str, Any]], path: Path) -> None:
    """Of each case of calls, which share of them took at most how long."""
    called = [row for row in rows if row["curve"] and CALLS.search(row["case"])]
    cases = list(dict.fromkeys(row["case"] for row in called))
    if not cases:
        return
    figure, plots = _subplots(len(cases), (9, 2.2 * -(-len(cases) // 2)))
    for case, axes in zip(cases, plots, strict=False):
        for shade, row in enumerate(row for row in called if row["case"] == case):
            color = OURS if row["base"] else str(0.25 + 0.6 * min(shade, 6) / 7)
            dashes = "-" if row["base"] else ("--", "-.", ":")[shade % 3]
            axes.plot(
                row["curve"], [at / 100 for at in range(101)], dashes, color=color, linewidth=1, label=row["subject"]
            )
        axes.set_title(case, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=6, frameon=False, loc="best")
    for axes in plots[len(cases) :]:
        axes.set_visible(False)
    figure.supxlabel("ms (log scale)", fontsize=8)
    figure.supylabel("share of calls that took at most as long", fontsize=8)
    _save(figure, path)


def _subplots(count: int, inches: tuple[float, float]) -> tuple[Any, list[Any]]:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "atropos", "svg.fonttype": "none"}  # the same run gives the same file, a small one
    from matplotlib import pyplot as plt

    columns = min(count, 2)
    figure, grid = plt.subplots(-(-count // columns), columns, figsize=inches, layout="constrained", squeeze=False)
    plots = list(grid.flat)
    for axes in plots:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, plots


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=120, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def main(
    runs: Annotated[list[Path], typer.Argument(help="JSON files of runs")],
    out: Annotated[Path, typer.Option(help="the picture, without its suffix")] = Path("docs/benchmarks"),
) -> None:
    """Draw runs."""
    draw([row for run in runs for row in json.loads(run.read_text())["rows"]], out)


if __name__ == "__main__":
    typer.run(main)
