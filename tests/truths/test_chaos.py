"""Servers killed and stopped at random under load: nothing lost in silence, nothing doubled, nothing leaked.

ATROPOS_CHAOS says how many times (5 by default; hundreds by hand).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

from atropos.errors import LeaseExpired, OutcomeUnknown, SandboxError, SlotLost
from tests.waiting import until

HITS = int(os.environ.get("ATROPOS_CHAOS", "5"))


class Watch:
    """Who holds which slot of which run of a server, by the pool's word."""

    def __init__(self) -> None:
        self.held: set[tuple[str, str]] = set()
        self.seen: Counter[str] = Counter()

    async def trajectory(self, pool, rng: random.Random) -> None:
        try:
            slot = await pool.acquire("t")
        except SandboxError as error:
            self.seen[f"acquire: {error!r}"] += 1
            await asyncio.sleep(0.01)
            return
        place = (slot.lease.boot_id, slot.name)
        assert place not in self.held, f"{place} was given to two"
        self.held.add(place)
        try:
            for n in range(rng.randrange(1, 12)):
                result = await slot.exec(f"echo {n} >> log; cat log | tr '\\n' ' '")
                assert result.output == "".join(f"{i} " for i in range(n + 1)), "a call was lost or doubled"
                self.seen["calls"] += 1
            self.seen["finished"] += 1
        except (SlotLost, OutcomeUnknown, LeaseExpired) as error:
            self.seen[type(error).__name__] += 1
            try:
                await slot.exec("true")
                raise AssertionError("a lost slot went on")
            except SandboxError:
                pass
        finally:
            self.held.discard(place)
            await slot.release()


async def test_chaos_doubles_nothing(local_pool, engine):
    rng = random.Random(3)
    watch = Watch()
    over = asyncio.Event()
    settings = {"slots_per_container": 3, "max_containers": 2, "min_containers": 2, "acquire_timeout_s": 120}
    async with local_pool(**settings) as pool:

        async def worker():
            while not over.is_set():
                await watch.trajectory(pool, rng)

        workers = [asyncio.create_task(worker()) for _ in range(9)]
        for hit in range(HITS):
            await until(lambda: pool.stats().ready == 2, f"two containers before hit {hit}")
            await asyncio.sleep(rng.random() * 0.3)
            victims = [link.container.id for link in pool.links.values()]
            if not victims:
                continue
            victim = rng.choice(victims)
            with contextlib.suppress(ProcessLookupError):  # the last hit's, and the pool has not noticed yet
                if rng.random() < 0.6:
                    await engine.signal(victim, signal.SIGKILL)
                else:
                    await engine.signal(victim, signal.SIGSTOP)
                    await asyncio.sleep(rng.random() * 0.3)
                    await engine.signal(victim, signal.SIGCONT)
        over.set()
        await asyncio.wait_for(asyncio.gather(*workers), 120)
        await until(lambda: pool.stats().free == 6, "six free slots")
        for link in pool.links.values():
            assert (await link.client.status()).leased == 0
        assert watch.held == set()
        assert watch.seen["finished"] > 0
        assert set(watch.seen) <= {"calls", "finished", "SlotLost", "OutcomeUnknown", "LeaseExpired"}, watch.seen
