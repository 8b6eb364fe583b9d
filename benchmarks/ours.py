"""Our side: pools and executors on the local backend, as a user would start them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, build_tool_registry

from .peers import COMMAND


@contextlib.asynccontextmanager
async def pool(slots: int, containers: int = 1) -> AsyncIterator[SlotPool]:
    """A pool of sandbox servers that have `slots` slots together."""
    config = SlotPoolConfig(
        backend="local",
        slots_per_container=slots // containers,
        min_containers=containers,
        max_containers=containers,
    )
    async with SlotPool(config) as made:
        yield made


@contextlib.asynccontextmanager
async def executor(slots: int, containers: int = 1) -> AsyncIterator[ToolExecutor]:
    """A ToolExecutor over such a pool, with the default tools."""
    async with (
        pool(slots, containers) as slot_pool,
        ToolExecutor(pool=slot_pool, tools=build_tool_registry(["default"]), config=ToolExecutorConfig()) as made,
    ):
        yield made


async def execute(runner: ToolExecutor, trajectory: str) -> None:
    """One terminal call, its answer checked."""
    # a call of its own each time: the same id again would be answered from memory
    result = await runner.execute(trajectory, ToolCall(name="terminal", arguments={"command": COMMAND}))
    if not result.success or result.output != "hi\n":
        raise RuntimeError(f"atropos answered {result!r}")


async def execute_at(runner: ToolExecutor, index: int) -> None:
    """The same by the trajectory of that number."""
    await execute(runner, f"bench-{index}")


async def closed_loop(call: Callable[[int], Awaitable[None]], parallel: int, n: int) -> tuple[list[float], float]:
    """`parallel` workers, each with one call in flight, `n` calls in all: seconds of each, and of all together."""
    samples: list[float] = []

    async def worker(index: int) -> None:
        for _ in range(n // parallel):
            start = time.perf_counter()
            await call(index)
            samples.append(time.perf_counter() - start)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(parallel):
            group.create_task(worker(index))
    return samples, time.perf_counter() - began


def children(pid: int) -> list[int]:
    """All descendants of a process, as /proc tells."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        new = parents.get(queue.pop(), [])
        found += new
        queue += new
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size: a page shared by k processes counts 1/k. 0 when the process is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of processes, and of those that they have waited for."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def our_processes() -> list[int]:
    """Everything that this benchmark's process started."""
    return children(os.getpid())


def command_line(pid: int) -> str:
    """The words of a process, spaces between; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
