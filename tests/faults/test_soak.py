"""Mixed load on one real server: what it holds afterwards is what it held after the first rounds.

ATROPOS_SOAK_S sets its length in seconds (12 in CI; 1800 is the half hour that is run by hand).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from pathlib import Path

import pytest

from atropos.errors import SandboxError
from atropos.slots.client import SandboxClient
from atropos.wire import Exec, LeaseRequest, ProcStart, ReadFile, WriteFile
from tests import privileges
from tests.processes import descendants
from tests.unit.server.test_serve import Process, running

SOAK_S = float(os.environ.get("ATROPOS_SOAK_S", "12"))
SLOTS = 6
WORK = (
    "echo hi",
    "seq 10000 | sort -R | md5sum",
    "head -c 3000000 /dev/zero",
    "mkdir -p a/b/c && touch a/b/c/{1..200} && find . | wc -l",
    "sleep 1000 & sleep 1000 & disown -a; exit 3",
    "for i in $(seq 30); do (exit $i) & done; wait",
    "kill -9 $$",
    "ln -sf / x; python3 -c 'print(1)'",
)


def held(server: Process) -> dict[str, int]:
    """What the server and its helpers hold of the machine."""
    pid = server.process.pid
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "memory_mib": int(status["VmRSS"].split()[0]) // 1024,
        "mounts": len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
        "processes": len(descendants(pid)),
    }


async def settled(server: Process, client: SandboxClient) -> dict[str, int]:
    """Once every slot is free and warm again and nothing is being freed."""
    async with asyncio.timeout(60):
        while True:
            status = await client.status()
            if status.free == SLOTS and not status.warming and not status.snapshots:
                break
            await asyncio.sleep(0.05)
        last = held(server)
        while True:  # what was detached is freed beside everything else
            await asyncio.sleep(0.5)
            now = held(server)
            if {**now, "memory_mib": 0} == {**last, "memory_mib": 0}:
                return now
            last = now


async def trajectory(client: SandboxClient, names: itertools.count, rng: random.Random) -> None:
    """One lease's life, with an abrupt end now and then."""
    lease = await client.acquire(LeaseRequest(lease_id=f"soak-{next(names):06}", client_id="tester", ttl_s=30))
    snapshot: str | None = None
    fork = None
    try:
        for _ in range(rng.randrange(1, 6)):
            match rng.randrange(8):
                case 0:
                    await client.call(lease, WriteFile(path="f", data=rng.randbytes(rng.randrange(200_000))))
                    await client.call(lease, ReadFile(path="f"))
                case 1:
                    await client.call(lease, ProcStart(command="sleep 1000", pty=rng.random() < 0.5))
                case 2:
                    task = asyncio.create_task(client.call(lease, Exec(command="sleep 1000")))
                    await asyncio.sleep(rng.random() * 0.02)
                    task.cancel()
                    await asyncio.wait([task])
                case 3 if snapshot is None:
                    snapshot = (await client.snapshot(lease)).snapshot_id
                    with contextlib.suppress(SandboxError):
                        request = LeaseRequest(
                            lease_id=f"fork-{next(names):06}", client_id="tester", ttl_s=30, snapshot=snapshot
                        )
                        fork = await client.acquire(request)
                        await client.call(fork, Exec(command="ls -la; rm -rf ./*"))
                case _:
                    await client.call(lease, Exec(command=rng.choice(WORK), timeout_s=5))
    finally:
        for each in (lease, fork):
            if each is not None:
                assert (await client.release(each)).clean
        if snapshot is not None:
            await client.drop_snapshot(snapshot)


@privileges.processes
@pytest.mark.timeout(SOAK_S + 240)
async def test_mixed_load_stays_flat():
    rng = random.Random(5)
    names = itertools.count()
    lives = 0
    async with running(slots=SLOTS, heartbeat_s=2) as server, server.client() as client:

        async def worker(until: float) -> None:
            nonlocal lives
            loop = asyncio.get_running_loop()
            while loop.time() < until:
                with contextlib.suppress(SandboxError):
                    await trajectory(client, names, rng)
                    lives += 1

        async def load(seconds: float) -> dict[str, int]:
            until = asyncio.get_running_loop().time() + seconds
            await asyncio.gather(*(worker(until) for _ in range(SLOTS - 2)))
            return await settled(server, client)

        first = await load(SOAK_S / 3)
        second = await load(SOAK_S * 2 / 3)
        counters = (await client.status()).counters
    print(f"{lives} lives: {first} -> {second}")
    assert lives > 0
    assert counters.get("sandboxes_died", 0) == 0
    assert counters.get("slots_retired", 0) == 0
    for name in ("descriptors", "threads", "mounts", "processes"):
        assert second[name] <= first[name] + 2 + SLOTS, (name, first, second)  # a slot may be on its way
    assert second["memory_mib"] <= first["memory_mib"] * 1.3 + 8, (first, second)
