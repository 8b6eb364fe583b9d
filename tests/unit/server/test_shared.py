"""Two pools, as of two env processes, on one server."""

from __future__ import annotations

import asyncio

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from tests.unit.server.fakes import TOKEN, serving
from tests.waiting import until


class One(Backend):
    """A container that somebody else started."""

    name = "one"

    def __init__(self, url: str) -> None:
        self.listed = [Container("c0", 0, url, TOKEN, "running")]

    async def start(self):
        pass

    async def scale(self, count):
        pass

    def containers(self):
        return self.listed

    async def changed(self):
        await asyncio.Event().wait()

    def trouble(self):
        return ""

    async def retire(self, container):
        raise AssertionError

    async def aclose(self, *, purge):
        pass


async def test_small_pool_is_not_starved(monkeypatch):
    """It comes when all is taken, and is slow to ask: the other asks again in the moment in which it gives one back."""
    monkeypatch.setattr("atropos.sandbox.server.state.lease_table.WANT_S", 0.05)
    async with serving(slots=2) as running:
        config = SlotPoolConfig(slots_per_container=2, max_containers=1, acquire_timeout_s=30)
        pools = [SlotPool(config, backend=One(running.url)) for _ in range(2)]
        leases = [0, 0]
        over = False

        async def work(number: int) -> None:
            while not over:
                async with pools[number].lease("t"):
                    leases[number] += 1
                    await asyncio.sleep(0.15)

        async with pools[0]:
            working = [asyncio.create_task(work(0)) for _ in range(6)]
            await asyncio.sleep(0.1)
            async with pools[1]:
                (link,) = pools[1].links.values()
                at_once = link.client.acquire

                async def slowly(request):
                    await asyncio.sleep(0.02)
                    return await at_once(request)

                link.client.acquire = slowly
                before = leases[0]
                working.append(asyncio.create_task(work(1)))
                # two slots, two who want: about half of the leases are the small one's
                await until(lambda: leases[1] >= 3 or leases[0] - before >= 20, "leases of both")
                shares = leases[0] - before, leases[1]
                over = True
                await asyncio.gather(*working)
    assert shares[1] >= 3, shares
