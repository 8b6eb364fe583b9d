"""Mixed load for a while: descriptors, tasks, memory, threads, mounts, cgroups and processes stay flat.

ATROPOS_SOAK_S says for how long, in seconds (6 by default; half an hour by hand).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from atropos.errors import SandboxError
from tests import privileges
from tests.processes import descendants
from tests.waiting import until

SOAK_S = float(os.environ.get("ATROPOS_SOAK_S", "6"))


def rss_mib(pid: int | str) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


def fds(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def census(pool) -> dict[str, float]:
    """Everything that could grow, of this process and of its servers."""
    gc.collect()
    servers = [int(link.container.id.partition("-")[0]) for link in pool.links.values()]
    names = tuple(f"atropos-{server}-" for server in servers)
    groups = [folder for folder, _, _ in os.walk("/sys/fs/cgroup")]  # others' come and go meanwhile
    ours = [group for group in groups if any(part.startswith(names) for part in Path(group).parts)]
    return {
        "our descriptors": fds("self"),
        "our threads": len(os.listdir("/proc/self/task")),
        "our MiB": rss_mib("self"),
        "our tasks": len(asyncio.all_tasks()),
        "processes": len(descendants()),
        "servers' descriptors": sum(map(fds, servers)),
        "servers' MiB": sum(map(rss_mib, servers)),
        "servers' mounts": sum(len(Path(f"/proc/{one}/mounts").read_text().splitlines()) for one in servers),
        "cgroups": len(ours),
    }


SLACK = {"our MiB": 24, "servers' MiB": 32, "our descriptors": 24, "servers' descriptors": 24}


async def trajectory(pool, rng: random.Random, seen: Counter) -> None:
    try:
        async with pool.lease("t") as slot:
            for _ in range(rng.randrange(1, 6)):
                match rng.randrange(7):
                    case 0:
                        await slot.write_file(f"d/{rng.random()}", rng.randbytes(50_000))
                    case 1:
                        await slot.exec("head -c 2000000 /dev/zero")
                    case 2:
                        await slot.exec("(setsid sleep 1000 >/dev/null 2>&1 &)")
                    case 3:
                        await slot.exec("sleep 1000", timeout_s=0.02)
                    case 4:
                        async with await slot.snapshot() as snapshot:
                            if rng.random() < 0.5:
                                async with pool.lease("fork", snapshot=snapshot, timeout_s=5) as fork:
                                    await fork.exec("ls")
                    case 5:
                        task = asyncio.create_task(slot.exec("sleep 1000"))
                        await asyncio.sleep(rng.random() * 0.01)
                        task.cancel()
                        await asyncio.wait([task])
                    case _:
                        await slot.exec("echo $$; mktemp; exit 3")
        seen["done"] += 1
    except SandboxError as error:
        seen[type(error).__name__] += 1


async def load(pool, seconds: float, rng: random.Random, seen: Counter) -> None:
    """Twice as many trajectories as slots, some cancelled half-way."""
    end = asyncio.get_running_loop().time() + seconds

    async def worker() -> None:
        while asyncio.get_running_loop().time() < end:
            task = asyncio.create_task(trajectory(pool, rng, seen))
            if rng.random() < 0.15:
                asyncio.get_running_loop().call_later(rng.random() * 0.1, task.cancel)
            await asyncio.wait([task])
            if task.cancelled():
                seen["cancelled"] += 1
            else:
                task.result()

    await asyncio.gather(*(worker() for _ in range(16)))


@privileges.processes
@pytest.mark.timeout(SOAK_S + 300)
async def test_mixed_load_leaves_counts(local_pool):
    rng = random.Random(7)
    seen: Counter[str] = Counter()
    async with local_pool(slots_per_container=4, max_containers=2, min_containers=2, acquire_timeout_s=120) as pool:

        async def at_rest() -> dict[str, float]:
            # snapshots are dropped in the background
            await until(lambda: (pool.stats().free, pool.stats().snapshots) == (8, 0), f"eight free slots in {pool!r}")
            for link in pool.links.values():
                status = await link.client.status()
                while status.warming:
                    await asyncio.sleep(0.02)
                    status = await link.client.status()
                assert (status.leased, status.retired, len(status.snapshots)) == (0, 0, 0)
            await asyncio.sleep(0.3)
            return census(pool)

        await load(pool, SOAK_S / 3, rng, seen)
        before = await at_rest()
        await load(pool, SOAK_S * 2 / 3, rng, seen)
        await at_rest()
        after: dict[str, float] = {}

        def as_before() -> bool:
            after.update(census(pool))
            return all(after[name] <= before[name] + SLACK.get(name, 4) for name in before)

        try:
            await until(as_before, "as much of everything as before")
        finally:
            print(f"{dict(seen)}: {before} -> {after}")
        assert seen["done"] > 20, seen
        assert set(seen) <= {"done", "cancelled", "AcquireTimeout"}, seen
        assert pool.stats().lost == 0
