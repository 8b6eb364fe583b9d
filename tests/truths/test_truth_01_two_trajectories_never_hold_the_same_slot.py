"""Truth 1: two trajectories never hold the same slot."""

from __future__ import annotations

import asyncio
import random

from atropos.errors import SandboxError
from tests.processes import descendants
from tests.waiting import until

TRAJECTORIES = 200
MARK = "987654"
"""How long the trajectories' stray processes would sleep: what to look for on the host."""


class Ledger:
    """Who holds what, by the pool's word."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], str] = {}
        self.epochs: dict[str, list[int]] = {}
        self.outcomes = {"finished": 0, "cancelled": 0, "released early": 0}

    def take(self, slot, name: str) -> None:
        place = (slot.container, slot.name)
        assert place not in self.held, f"{name} got {place}, which {self.held[place]} holds"
        self.held[place] = name
        self.epochs.setdefault(slot.container, []).append(slot.lease.epoch)

    def give(self, slot) -> None:
        del self.held[slot.container, slot.name]


async def trajectory(pool, ledger: Ledger, name: str, rng: random.Random) -> None:
    slot = await pool.acquire(name)
    ledger.take(slot, name)
    try:
        claim = await slot.exec(f"ls -A; set -C; echo {name} > owner; (setsid sleep {MARK} >/dev/null 2>&1 &)")
        assert claim.output == "", f"{name} found {claim.output!r}"
        for _ in range(rng.randrange(5)):
            match rng.randrange(4):
                case 0:
                    assert (await slot.read_file("owner")).decode().strip() == name
                case 1:
                    await slot.write_file(f"f{rng.random()}", name * 100)
                case 2:
                    await slot.exec(f"(setsid sleep {MARK} >/dev/null 2>&1 &)")
                case 3:
                    assert (await slot.exec("cat owner")).output == f"{name}\n"
        if rng.random() < 0.1:  # cancelled while a call runs, whatever the timers of the test hit
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
            await slot.exec(f"sleep {MARK}")
        if rng.random() < 0.2:  # release in the middle of a call
            call = asyncio.create_task(slot.exec(f"sleep {MARK}"))
            await asyncio.sleep(rng.random() * 0.02)
            ledger.give(slot)
            await slot.release()
            try:
                await call
                raise AssertionError("a call outlived its lease")
            except SandboxError:
                ledger.outcomes["released early"] += 1
            return
        ledger.outcomes["finished"] += 1
    except asyncio.CancelledError:
        ledger.outcomes["cancelled"] += 1
        raise
    finally:
        if ledger.held.get((slot.container, slot.name)) == name:
            ledger.give(slot)
        await slot.release()


async def test_200_random_trajectories(local_pool):
    rng = random.Random(20261121)
    ledger = Ledger()
    async with local_pool(slots_per_container=8, max_containers=2, min_containers=2, acquire_timeout_s=120) as pool:
        at_rest = len(descendants())
        tasks = []
        for n in range(TRAJECTORIES):
            tasks.append(asyncio.create_task(trajectory(pool, ledger, f"t{n}", random.Random(n))))
            if rng.random() < 0.3:
                asyncio.get_running_loop().call_later(rng.random() * 2, tasks[-1].cancel)
            if rng.random() < 0.2:
                await asyncio.sleep(0.01)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException) and not isinstance(r, asyncio.CancelledError)]
        assert failures == []
        assert ledger.held == {}
        assert sum(ledger.outcomes.values()) <= TRAJECTORIES
        assert min(ledger.outcomes.values()) > 0, ledger.outcomes

        await until(lambda: pool.stats().free == 16, "every slot free again")
        statuses = [await link.client.status() for link in pool.links.values()]
        assert [(s.leased, s.free, s.retired) for s in statuses] == [(0, 8, 0), (0, 8, 0)]
        for epochs in ledger.epochs.values():
            assert len(set(epochs)) == len(epochs), "an epoch was given twice"
        await until(lambda: not any(MARK in line for line in descendants().values()), "no process left")
        await until(lambda: len(descendants()) <= at_rest + 4, "as many processes as before")
