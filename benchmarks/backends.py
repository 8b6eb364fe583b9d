"""The same calls, starts and growth on each backend: what a container around the server, and the engine, cost.

Needs engines: `python scripts/engines.py local,docker,nomad python -m benchmarks --only backends`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tools import ToolExecutor, ToolExecutorConfig, build_tool_registry
from atropos.wire import SlotLimits

from . import ours
from .context import Context
from .stats import Row, row

GROWN = 5
"""Containers at the end of the scale-up."""


def present() -> list[str]:
    """The backends that this run has, as scripts/engines.py says."""
    return [name for name in os.environ.get("ATROPOS_BACKENDS", "local").replace(" ", ",").split(",") if name]


def config(backend: str, **changes: Any) -> SlotPoolConfig:
    """A pool of small containers with one slot each, under a name of its own."""
    values: dict[str, Any] = {
        "backend": backend,
        "job_id": f"atropos-bench-{secrets.token_hex(4)}",
        "slots_per_container": 1,
        "limits": SlotLimits(memory_mib=256, pids=128),
        "acquire_timeout_s": 120.0,
        "start_timeout_s": 120.0,
    }
    return SlotPoolConfig(**(values | changes))


async def backends(ctx: Context) -> AsyncIterator[Row]:
    """Calls of all backends in turns, so that a slow minute hits them all; then starts and growth, one by one."""
    names = present()
    if names == ["local"]:
        raise RuntimeError(
            "no engines: python scripts/engines.py local,docker,nomad python -m benchmarks --only backends"
        )
    async for made in _calls(ctx, names):
        yield made
    for title, measure in (
        ("cold start: nothing running to first answer", _cold_start),
        (f"scale-up: 1 to {GROWN} containers, all answering", _scale_up),
    ):
        samples: dict[str, list[float]] = {name: [] for name in names}
        for number in range(ctx.n(5, least=2)):
            for name in names:
                ctx.say(f"{title}, on {name}, {number + 1}")
                samples[name].append(await measure(name))
        for name in names:
            yield row(title, name, samples[name], unit="s", note=_against(samples, name))


def _against(samples: dict[str, list[float]], name: str) -> str:
    """How many times local's median this is."""
    if name == "local" or "local" not in samples:
        return ""
    return f"{statistics.median(samples[name]) / statistics.median(samples['local']):.2f}x of local"


async def _calls(ctx: Context, names: list[str]) -> AsyncIterator[Row]:
    samples: dict[str, list[float]] = {name: [] for name in names}
    async with contextlib.AsyncExitStack() as stack:
        runners: dict[str, ToolExecutor] = {}
        for name in names:
            ctx.say(f"calls: starting {name}")
            pool = await stack.enter_async_context(SlotPool(config(name, max_containers=1)))
            made = ToolExecutor(pool=pool, tools=build_tool_registry(["default"]), config=ToolExecutorConfig())
            runners[name] = await stack.enter_async_context(made)
            for _ in range(30):
                await ours.execute(made, "bench")
        rounds = 20
        for number in range(rounds):
            ctx.say(f"calls, round {number + 1} of {rounds}")
            for name in names:
                for _ in range(ctx.n(1200) // rounds):
                    start = time.perf_counter()
                    await ours.execute(runners[name], "bench")
                    samples[name].append(time.perf_counter() - start)
        for name in names:
            await runners[name].release_trajectory("bench", reset_workspace=True)
    for name in names:
        yield row("one call after the other", name, samples[name], note=_against(samples, name))


async def _cold_start(name: str) -> float:
    """Seconds from a pool that is only configured to the first call's answer; the image is there."""
    began = time.perf_counter()
    async with SlotPool(config(name)) as pool, pool.lease("first") as slot:
        await slot.exec("true")
        return time.perf_counter() - began


async def _scale_up(name: str) -> float:
    """Seconds from one busy container to five that have each answered a call."""
    async with SlotPool(config(name, max_containers=GROWN)) as pool, pool.lease("first"):
        began = time.perf_counter()
        slots = await asyncio.gather(*(pool.acquire(f"grown-{n}") for n in range(GROWN - 1)))
        await asyncio.gather(*(slot.exec("true") for slot in slots))
        taken = time.perf_counter() - began
        await asyncio.gather(*(slot.release() for slot in slots))
    return taken
