"""Several env processes on one Nomad job of many containers: `python -m benchmarks.fleet --job CONTAINERS`.

Real: each process's pool and Nomad backend, and every request to Nomad over HTTP. Not real: Nomad and the containers,
which `nomad_cluster` and `fleet_member` stand in for. What is measured: acquires before and during churn, requests to
Nomad by phase, and how long a pool lacks containers after half of the nodes vanished.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console
from rich.table import Table

PATIENCE_S = 1800.0
ACQUIRES = 2000
CHURN, CHURN_PAUSE_S = 100, 0.2
"""Containers that end and are replaced, and the time between them, in seconds."""


class Process:
    """A child that answers each line with one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
        if not line:
            raise RuntimeError("a process of the fleet ended")
        return json.loads(line)


@contextlib.asynccontextmanager
async def started(module: str, *words: int) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, words)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        process.kill()
        await process.wait()


async def measure(containers: int, processes: int, console: Console) -> list[dict[str, Any]]:
    """One row a phase."""
    phases: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(started("benchmarks.nomad_cluster", containers))
        port = (await cluster.answer())["port"]
        began = time.perf_counter()

        async def phase(name: str, **found: Any) -> None:
            nonlocal began
            seconds = time.perf_counter() - began
            asked = (await cluster.ask())["asked"]
            a_minute = sum(asked.values()) / processes / max(seconds, 60) * 60
            phases.append({"phase": name, "seconds": seconds, "asked": asked, "a_minute_each": a_minute, **found})
            console.print(f"{name}: {seconds:.1f} s, {found}, {asked}")
            began = time.perf_counter()

        members = [
            await stack.enter_async_context(started("benchmarks.fleet_member", port, containers))
            for _ in range(processes)
        ]
        await phase("start", ready_s=[(await each.answer())["ready_s"] for each in members])
        await phase("at rest", acquire_us=[(await each.ask(acquires=ACQUIRES))["acquire_us"] for each in members])
        churning = asyncio.create_task(cluster.ask(churn=CHURN, pause_s=CHURN_PAUSE_S))
        busy = [(await each.ask(acquires=ACQUIRES))["acquire_us"] for each in members]
        churned = (await churning)["asked"]
        await phase("churn", acquire_us=busy, during=churned)
        whole = [asyncio.create_task(each.ask(whole=PATIENCE_S)) for each in members]
        vanished = (await cluster.ask(vanish=0.5))["asked"]
        await phase("half of the nodes vanish", whole_s=[(await each)["whole_s"] for each in whole], during=vanished)
        await phase("after", acquire_us=[(await each.ask(acquires=ACQUIRES))["acquire_us"] for each in members])
    for each in phases:  # what the cluster counted within a phase
        for kind, number in each.pop("during", {}).items():
            each["asked"][kind] = each["asked"].get(kind, 0) + number
        each["a_minute_each"] = sum(each["asked"].values()) / processes / max(each["seconds"], 60) * 60
    return phases


def show(console: Console, containers: int, slots: int, processes: int, phases: list[dict[str, Any]]) -> None:
    table = Table(title=f"{processes} env processes on one Nomad job of {containers:,} containers of {slots} slots")
    for column in (
        "phase",
        "seconds",
        "acquire, CPU µs",
        "whole after s",
        "requests a minute and process",
        "stops of all",
    ):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for each in phases:
        times = each.get("whole_s") or each.get("ready_s") or []
        table.add_row(
            each["phase"],
            f"{each['seconds']:.1f}",
            f"{max(each['acquire_us']):.0f}" if "acquire_us" in each else "",
            f"{max(times):.1f}" if times else "",
            f"{each['a_minute_each']:.0f}",
            str(each["asked"].get("stop an allocation", 0)),
        )
    console.print(table)
