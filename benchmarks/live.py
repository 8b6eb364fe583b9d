"""`python -m benchmarks.fleet --live N`: N real slots on this machine at once, all doing calls; none is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from rich.console import Console
from rich.table import Table

from atropos.slots import Slot, SlotPool, SlotPoolConfig

from . import ours
from .stats import percentile

PATIENCE_S = 1800.0
"""Longest that the last of the slots may take to come, in seconds."""


@dataclass
class Live:
    """What was seen of one run.

    Attributes:
        ready_s: from nothing to the last slot leased.
        start_cpu_s: CPU of everything that this run started and of its client until then, shared among the slots.
        calls: answered, each by the right slot.
        calls_s: seconds that they took together.
        p50_s, p99_s: of one call, with one in flight in every slot.
        processes: all that the run started, at its height.
        pss_mib: their proportional set size together.
        left: what was still there at the end, in words; must be empty.
    """

    slots: int
    containers: int
    ready_s: float = 0
    start_cpu_s: float = 0
    calls: int = 0
    calls_s: float = 0
    p50_s: float = 0
    p99_s: float = 0
    processes: int = 0
    pss_mib: float = 0
    closed_s: float = 0
    left: tuple[str, ...] = ()


async def measure(slots: int, containers: int, rounds: int, console: Console) -> Live:
    """Lease them all, let each do `rounds` calls, look at their memory, give them back, look for what is left."""
    live = Live(slots, containers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))
    started = {os.getpid()}
    config = SlotPoolConfig(
        backend="local",
        slots_per_container=-(-slots // containers),
        min_containers=containers,
        max_containers=containers,
        acquire_timeout_s=PATIENCE_S,
        start_timeout_s=PATIENCE_S,
        warm=0,
    )
    cpu_before = own_cpu_s()
    began = time.perf_counter()
    async with SlotPool(config) as pool:
        leased = await asyncio.gather(*(pool.acquire(f"live-{number}") for number in range(slots)))
        live.ready_s = time.perf_counter() - began
        live.start_cpu_s = (own_cpu_s() - cpu_before) / slots
        console.print(f"{slots} slots leased after {live.ready_s:.1f} s")
        await _calls(live, leased, rounds)
        console.print(f"{live.calls} calls answered in {live.calls_s:.1f} s")
        started |= set(ours.our_processes())
        found = [ours.pss_bytes(pid) for pid in ours.our_processes()]
        live.processes, live.pss_mib = len(found), sum(found) / 2**20
        began = time.perf_counter()
        await asyncio.gather(*(slot.release() for slot in leased))
    live.closed_s = time.perf_counter() - began
    live.left = tuple(sorted(leftovers(started)))
    return live


def own_cpu_s() -> float:
    """CPU seconds of this run's processes, of those that they have waited for too."""
    return ours.cpu_s([os.getpid(), *ours.our_processes()])


async def _calls(live: Live, leased: list[Slot], rounds: int) -> None:
    samples: list[float] = []

    async def work(number: int, slot: Slot) -> None:
        for turn in range(rounds):
            start = time.perf_counter()
            result = await slot.exec(f"echo {number} >> mine; tail -n 1 mine; wc -l < mine", timeout_s=600)
            samples.append(time.perf_counter() - start)
            if result.output.split() != [str(number), str(turn + 1)]:
                raise RuntimeError(f"slot {number} answered {result!r} in turn {turn}")

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, slot in enumerate(leased):
            group.create_task(work(number, slot))
    live.calls_s = time.perf_counter() - began
    samples.sort()
    live.calls = len(samples)
    live.p50_s, live.p99_s = percentile(samples, 0.5), percentile(samples, 0.99)


def leftovers(started: set[int]) -> set[str]:
    """Processes of this run that live on, and mounts, cgroups and folders that bear the name of one of them."""
    found = {f"process {pid}" for pid in ours.our_processes()}
    named = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for top, patterns in (
        ("/sys/fs/cgroup", ("*/atropos/atropos-*", "*/atropos-*", "atropos-*")),
        (gettempdir(), ("atropos-*",)),
    ):
        for pattern in patterns:
            with contextlib.suppress(OSError):
                named += map(str, Path(top).glob(pattern))
    for path in named:
        match = re.search(r"/atropos-(\d+)-", path)
        if match and int(match[1]) in started:
            found.add(path)
    return found


def show(console: Console, live: Live) -> None:
    """The run as a table."""
    table = Table(title=f"{live.slots} live slots in {live.containers} containers, local backend", show_header=False)
    for name, value in (
        ("ready, from nothing", f"{live.ready_s:.1f} s, {live.ready_s / live.slots * 1e3:.1f} ms a slot"),
        ("CPU of a start", f"{live.start_cpu_s * 1e3:.1f} ms"),
        ("calls a second, one in flight in each", f"{live.calls / live.calls_s:.0f}"),
        ("a call, p50 / p99", f"{live.p50_s * 1e3:.0f} / {live.p99_s * 1e3:.0f} ms"),
        ("processes", f"{live.processes}"),
        ("memory (PSS), servers included", f"{live.pss_mib:.0f} MiB, {live.pss_mib / live.slots:.2f} MiB a slot"),
        ("released and closed", f"{live.closed_s:.1f} s"),
        ("left behind", ", ".join(live.left) or "nothing"),
    ):
        table.add_row(name, value)
    console.print(table)
