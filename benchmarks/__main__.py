"""`python -m benchmarks [--quick] [--only NAME] [--against REVISION] [--json FILE]`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import against, charts, machine, over_http, report
from .backends import present
from .cases import CASES, NEEDS_ENGINES
from .context import Context
from .stats import Row


async def _compare(revision: str, context: Context) -> list[Row]:
    """This checkout and an older one, taking turns in one run."""
    rows: list[Row] = []
    with against.checkout(revision) as older:
        checkouts = {"this checkout": against.HERE, revision: older}
        cases: dict[str, Callable[..., Awaitable[list[Row]]]] = {}
        cases["leases"] = partial(against.lives, leases=context.n(40), rounds=context.n(10, least=3))
        for parallel, containers in ((1, 1), (32, 1), (32, 2), (32, 4)):
            cases[f"{parallel} trajectories over {containers}"] = partial(
                against.measure,
                parallel=parallel,
                containers=containers,
                n=_calls(context, parallel),
                rounds=context.n(10, least=3),
            )
        for parallel in over_http.PARALLEL:
            cases[f"{parallel} trajectories over HTTP"] = partial(
                over_http.measure, parallel=parallel, n=_calls(context, parallel), rounds=context.n(12, least=8)
            )
        for name, measure in cases.items():
            try:
                rows += await measure(checkouts, say=context.say)
            except (RuntimeError, TimeoutError) as error:
                context.problems.append(f"against {revision}, {name}: {error!r}")
    return rows


def _calls(context: Context, parallel: int) -> int:
    return context.n(400 if parallel == 1 else 1600, least=parallel * 4)


async def _measure(names: list[str], context: Context) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        context.say(name)
        try:
            async for made in CASES[name](context):
                rows.append(made)  # noqa: PERF401 - a case that fails halfway keeps what it measured
        except Exception as error:
            context.problems.append(f"{name}: {type(error).__name__}: {error}")
    return rows


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a tenth of the samples: is everything there?")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"a case, may be given again: {', '.join(CASES)}")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the JSON goes")] = None,
    revision: Annotated[
        str | None, typer.Option("--against", help="this checkout beside that git revision, and nothing else")
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="our side alone, for profiling")] = False,
) -> None:
    """Measure atropos beside fork+exec, a fresh bwrap a call and SWE-ReX 1.4.0, in one run on this machine."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    names = only or [name for name in CASES if name not in NEEDS_ENGINES or present() != ["local"]]
    if unknown := [name for name in names if name not in CASES]:
        console.print(f"--only {unknown[0]}: there is no such case; there are {', '.join(CASES)}")
        raise typer.Exit(2)
    Path("bench-results").mkdir(exist_ok=True)
    path = json_path or Path("bench-results") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    described = machine.describe()
    with console.status("starting") as status:
        context = Context(scale=0.1 if quick else 1.0, say=status.update, skip_peers=no_peers)
        try:
            rows = asyncio.run(_measure(names, context) if revision is None else _compare(revision, context))
        except RuntimeError as error:  # git's own words
            console.print(f"--against {revision}: {error}")
            raise typer.Exit(2) from None
    report.show(console, described, rows, context.problems)
    for target in (path, Path("bench-results") / "last.json"):
        report.write(target, described, rows, context.problems)
    drawn = [row.as_json() for row in rows]
    charts.draw(drawn, path.with_suffix(""))
    whole = not only and not quick and revision is None and not no_peers
    if whole:
        charts.draw(drawn, Path("docs/benchmarks"))
    console.print(f"written to {path}; the picture beside it{' and in docs/' if whole else ''}")
    if context.problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
