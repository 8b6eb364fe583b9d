"""Losing containers of a job one by one, and Nomad's answers: what runs elsewhere never notices.

ATROPOS_FAULTS multiplies the rounds (1 in CI).
"""

from __future__ import annotations

import asyncio

import pytest

from atropos.slots import SlotPool
from tests.e2e.cluster.load import Load, kill_server
from tests.e2e.cluster.test_nodes import config_for, nothing_left
from tests.e2e.nomad_proxy import NomadProxy
from tests.engines import containers_of_allocation, kill_container
from tests.repeats import TIMES
from tests.waiting import until

pytestmark = [pytest.mark.nomad, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(1800)]


async def container_of(key: str) -> str:
    """The Docker container of an allocation."""
    (found,) = await asyncio.to_thread(containers_of_allocation, key.partition(".")[0])
    return found


async def server_killed(cluster, key: str) -> None:
    await asyncio.to_thread(kill_server, await container_of(key))


async def container_killed(cluster, key: str) -> None:
    await asyncio.to_thread(kill_container, await container_of(key))


async def alloc_restarted(cluster, key: str) -> None:
    path = f"/v1/client/allocation/{key.partition('.')[0]}/restart"
    await asyncio.to_thread(cluster.ask, "POST", path, {"TaskName": "server"})


async def alloc_stopped(cluster, key: str) -> None:
    await asyncio.to_thread(cluster.ask, "POST", f"/v1/allocation/{key.partition('.')[0]}/stop")


FAULTS = (server_killed, alloc_restarted, container_killed, alloc_stopped)
AT_ONCE = 1 if TIMES > 1 else 2
"""Of three containers; the third one's witness must notice nothing."""


@pytest.mark.parametrize("turn", range(TIMES))
async def test_lost_costs_its_own_calls(cluster, turn):
    config = config_for(cluster)
    hit: set[str] = set()
    took: dict[str, float] = {}
    async with SlotPool(config) as pool, Load(pool, width=2, witnesses=3) as load:
        for first in range(0, len(FAULTS), AT_ONCE):
            faults = FAULTS[first : first + AT_ONCE]
            victims = load.witnesses[-AT_ONCE:]
            gone = {victim.container for victim in victims}
            assert len(gone) == AT_ONCE
            hit |= gone
            await asyncio.gather(*(fault(cluster, each.container) for fault, each in zip(faults, victims, strict=True)))
            took[" and ".join(fault.__name__ for fault in faults)] = round(await load.back(gone), 1)
            for victim in victims:
                await victim.lost()
            load.unharmed(hit)
            for _ in victims:
                await load.witness()
        await load.more(4)
        load.unharmed(hit)
        print(f"containers: {load}; back after {took} s")
    await nothing_left(cluster, config.job_id)


@pytest.mark.parametrize("turn", range(TIMES))
async def test_confused_nomad_is_no_harm(cluster, turn):
    async with NomadProxy(cluster.url) as proxy:
        config = config_for(cluster, nomad_address=proxy.url, min_containers=2, max_containers=2)
        hit: set[str] = set()
        async with SlotPool(config) as pool, Load(pool, width=1, witnesses=2) as load:
            for mode in ("error", "empty", "gone") if TIMES > 1 else ("error", "empty"):
                proxy.fail(mode)
                await load.more(2)
                load.unharmed(hit)
                victim = load.witnesses[-1]
                hit.add(victim.container)
                await container_killed(cluster, victim.container)  # and one is lost meanwhile
                await victim.lost()
                await load.more(1)
                proxy.mode = "pass"
                await load.back(hit)
                load.unharmed(hit)
                await until(lambda: not pool.stats().trouble, "no trouble", 60)
                await load.witness()
            print(f"Nomad's answers: {load}")
    await nothing_left(cluster, config.job_id)
