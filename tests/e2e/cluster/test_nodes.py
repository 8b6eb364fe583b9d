"""Losing agents and nodes of a cluster. What an agent suffers costs no trajectory; a node costs those that ran on it.

ATROPOS_FAULTS multiplies the rounds (1 in CI); ATROPOS_LEADER_GONE_S is how long the leader is away, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from atropos.slots import SlotPool
from tests.e2e.cluster.agents import VALID_S
from tests.e2e.cluster.load import Load
from tests.engines import containers_of_allocation, pool_config, remove_container
from tests.repeats import TIMES
from tests.waiting import until

pytestmark = [pytest.mark.nomad, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(1800)]
LEADER_GONE_S = float(os.environ.get("ATROPOS_LEADER_GONE_S", VALID_S + 1))
"""Longer than the clients' heartbeats are valid: when the leader is back it believes that every node is gone."""
DRAIN_S = 2
STEADY_S = 3
"""A leader that was stopped finds out, when it goes on, that heartbeats are missing, but perhaps not in its first
moment: nodes count as back when they have been for this long."""


def config_for(cluster, **changes):
    """A pool on every node, whose containers are given `DRAIN_S` for their leases when they are told to stop."""
    variables = {"config": json.dumps({"drain_s": DRAIN_S}), "lost_after": "4s"}
    fields = {"nomad_address": cluster.url, "min_containers": 3, "max_containers": 3, "nomad_variables": variables}
    return pool_config("nomad", **(fields | changes))


def node_of(cluster, job_id: str, container: str) -> str:
    return next(a["NodeName"] for a in cluster.allocations(job_id) if container.startswith(a["ID"]))


def containers_on(cluster, pool: SlotPool, node: str) -> set[str]:
    """The pool's containers on a node."""
    there = {a["ID"] for a in cluster.allocations(pool.config.job_id) if a["NodeName"] == node}
    return {key for key in pool.links if key.partition(".")[0] in there}


async def in_touch_again(cluster) -> None:
    """Until every node is heard of, and steadily so: it may be hurt anew."""
    await asyncio.to_thread(cluster.in_touch, STEADY_S)


async def missed(cluster, node: str) -> None:
    """Until the server has given a node up for the time being; one that was initializing still is `down` at once."""

    def is_missed() -> bool:
        return any(each["Name"] == node and each["Status"] in {"disconnected", "down"} for each in cluster.nodes())

    deadline = asyncio.get_running_loop().time() + 60
    while not await asyncio.to_thread(is_missed):
        assert asyncio.get_running_loop().time() < deadline, (node, await asyncio.to_thread(cluster.histories))
        await asyncio.sleep(0.05)


async def nothing_left(cluster, job_id: str) -> None:
    """Wait until nothing is. A client that couldn't ask for its allocations asks again 30 to 60 s later
    (getAllocRetryIntv), and the server may have no leader then."""

    def what() -> str:
        return f"nothing left of {job_id} ({cluster.leftovers(job_id)}; {cluster.histories()})"

    await until(lambda: cluster.leftovers(job_id) == [], what, 150)


@pytest.mark.parametrize("turn", range(TIMES))
async def test_agents_fail_unnoticed(cluster, turn):
    config = config_for(cluster, nomad_variables={"lost_after": "60s"})
    async with SlotPool(config) as pool, Load(pool, width=2, witnesses=3) as load:
        cluster.signal("server", signal.SIGSTOP)  # no leader
        await asyncio.sleep(LEADER_GONE_S)
        await load.more(2)
        cluster.signal("server", signal.SIGCONT)
        await in_touch_again(cluster)
        await load.more(4)
        load.unharmed()

        cluster.signal("client3", signal.SIGSTOP)  # cut off
        cluster.signal("client2", signal.SIGKILL)
        await asyncio.to_thread(cluster.start, "client2")
        await missed(cluster, "client3")
        await load.more(4)
        cluster.signal("client3", signal.SIGCONT)
        await in_touch_again(cluster)
        load.unharmed()

        cluster.signal("server", signal.SIGKILL)
        await load.more(4)
        await asyncio.to_thread(cluster.start, "server")
        await in_touch_again(cluster)
        await load.more(4)
        load.unharmed()
        print("agents:", load)
        assert pool.stats().ready == 3
        assert set(load.outcomes) == {"done"}
        assert len(cluster.allocations(config.job_id)) == 3, "nothing was replaced"
    await nothing_left(cluster, config.job_id)


@pytest.mark.parametrize("turn", range(TIMES))
async def test_lost_node_is_made_up_for(cluster, turn):
    config = config_for(cluster)
    async with SlotPool(config) as pool, Load(pool, width=2, witnesses=3) as load:
        died, kept, drained = load.witnesses
        hit = {drained.container}
        cluster.drain(node_of(cluster, config.job_id, drained.container))
        after_drain = await load.back(hit)
        await drained.lost()
        await asyncio.to_thread(cluster.heal)
        load.unharmed(hit)

        # Two nodes at once. One dies with its containers; the other's agent alone is cut off, and its containers,
        # which Nomad gives up, still answer: they may finish.
        dead, cut_off = (node_of(cluster, config.job_id, each.container) for each in (died, kept))
        on_dead, on_cut_off = containers_on(cluster, pool, dead), containers_on(cluster, pool, cut_off)
        assert on_dead.isdisjoint(on_cut_off)
        hit |= on_dead
        began = asyncio.get_running_loop().time()
        cluster.signal(dead, signal.SIGKILL)
        cluster.signal(cut_off, signal.SIGSTOP)
        for key in on_dead:
            for container in await asyncio.to_thread(containers_of_allocation, key.partition(".")[0]):
                await asyncio.to_thread(remove_container, container)
        await died.lost()
        await until(lambda: not any(pool.links[key].seat.open for key in on_cut_off), "lost allocations", 60)
        await load.back(on_dead)
        after_death = asyncio.get_running_loop().time() - began
        await kept.more(5)
        load.unharmed(hit)
        await kept.finish()
        load.witnesses.remove(kept)
        await asyncio.to_thread(cluster.heal)
        await until(lambda: pool.links.keys().isdisjoint(on_cut_off), "the end of what was given up", 60)
        load.unharmed(hit)
        print(f"nodes: {load}; back after a drain in {after_drain:.1f} s, after a death in {after_death:.1f} s")
    await nothing_left(cluster, config.job_id)
