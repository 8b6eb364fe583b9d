"""`python -m benchmarks.over_http REVISION`: the executor server of this checkout beside an older one's, taking turns.

`--against` of `python -m benchmarks` has it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import against, machine, ours, report
from .executor_server import ExecutorServer, executor_server
from .stats import Row, row

PARALLEL = (1, 32)
SLOWER = 1.05
"""A round that takes so many times the other checkout's is counted."""


async def measure(
    checkouts: Mapping[str, Path], *, parallel: int, n: int, rounds: int, say: Callable[[str], None]
) -> list[Row]:
    """Rounds of `n` calls of `parallel` trajectories in each checkout: the median of each, and its calls a second.

    The first checkout is the base of the ratios. Of each pair of rounds the other one begins in turn.
    """
    p50s, rates, cpu = (defaultdict[str, list[float]](list) for _ in range(3))
    async with contextlib.AsyncExitStack() as stack:
        calls = {
            subject: await _calls(await stack.enter_async_context(executor_server(parallel, path)), parallel)
            for subject, path in checkouts.items()
        }
        for number in range(rounds):
            for subject in [*calls][:: 1 if number % 2 else -1]:
                say(f"{parallel} over HTTP: {subject}, round {number + 1} of {rounds}")
                server, call = calls[subject]
                before = server.cpu_s()
                samples, seconds = await ours.closed_loop(call, parallel, n)
                p50s[subject].append(statistics.median(samples))
                rates[subject].append(len(samples) / seconds)
                cpu[subject].append((server.cpu_s() - before) / len(samples))
    what = f"over HTTP, {parallel} trajector{'y' if parallel == 1 else 'ies'}"
    base, *others = checkouts
    slower = [
        f"{sum(mine > SLOWER * theirs for mine, theirs in zip(p50s[base], p50s[other], strict=True))} of {rounds} "
        f"above {SLOWER:g} times {other}'s"
        for other in others
    ]
    return [
        row(
            case,
            subject,
            found[subject],
            unit,
            base=subject == base,
            note="; ".join(slower) if noted == subject else "",
        )
        for case, found, unit, noted in (
            (f"{what}: p50 of a round", p50s, "ms", base),
            (f"{what}: calls a second of a round", rates, "calls/s", None),
            (f"{what}: CPU a call", cpu, "ms", None),
        )
        for subject in checkouts
    ]


async def _calls(server: ExecutorServer, parallel: int) -> tuple[ExecutorServer, Callable[[int], Awaitable[None]]]:
    """A server with open trajectories, and what does a call of one by its number; the first calls are done."""
    trajectories = [await server.open() for _ in range(parallel)]

    async def call(index: int) -> None:
        await server.call(trajectories[index])

    await ours.closed_loop(call, parallel, parallel * 10)
    return server, call


async def _compare(revision: str, rounds: int, calls: int, say: Callable[[str], None]) -> list[Row]:
    with against.checkout(revision) as older:
        checkouts = {"this checkout": against.HERE, revision: older}
        measured = partial(measure, checkouts, rounds=rounds, say=say)
        return [
            made for count in PARALLEL for made in await measured(parallel=count, n=calls * (1 if count == 1 else 4))
        ]


def main(
    revision: Annotated[str, typer.Argument(help="of git, to measure beside this checkout")],
    rounds: Annotated[int, typer.Option(min=1, help="pairs of rounds")] = 12,
    calls: Annotated[
        int, typer.Option(min=1, help="calls of a round of one trajectory; of 32 four times as many")
    ] = 400,
) -> None:
    """Calls through the executor server's HTTP, beside an older commit's, as ratios."""
    console = Console(width=180)
    described = machine.describe()
    with console.status("starting") as status:
        rows = asyncio.run(_compare(revision, rounds, calls, status.update))
    report.show(console, described, rows, [])


if __name__ == "__main__":
    typer.run(main)
