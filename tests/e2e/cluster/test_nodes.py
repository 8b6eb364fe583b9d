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
from tests.e2e.cluster.load import Load
from tests.engines import containers_of_allocation, pool_config, remove_container
from tests.waiting import until

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "ATROPOS_CLUSTER" not in os.environ,
        reason="agents stopped and killed: Nomad takes from one to several minutes to get over it; by hand, ATROPOS_CLUSTER=1",
    ),
]
TIMES = int(os.environ.get("ATROPOS_FAULTS", "1"))
LEADER_GONE_S = float(os.environ.get("ATROPOS_LEADER_GONE_S", "9"))
"""Longer than the clients' heartbeats are valid: when the leader is back it believes that every node is gone."""
DRAIN_S = 2


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
    return {key for key in pool.keeper.links if key.partition(".")[0] in there}


async def states(cluster, **wanted: str) -> None:
    """Until nodes are in these states."""
    await until(
        lambda: {n["Name"]: n["Status"] for n in cluster.nodes()}.items() >= wanted.items(), f"nodes {wanted}", 60
    )


async def nothing_left(cluster, job_id: str) -> None:
    await until(lambda: cluster.leftovers(job_id) == [], f"nothing left of {job_id}", 60)


@pytest.mark.parametrize("turn", range(TIMES))
async def test_agents_that_crash_hang_and_come_back_are_noticed_by_no_trajectory(cluster, turn):
    config = config_for(cluster, nomad_variables={})
    async with SlotPool(config) as pool, Load(pool, width=2, witnesses=3) as load:
        cluster.signal("server", signal.SIGSTOP)  # no leader
        await asyncio.sleep(LEADER_GONE_S)
        await load.more(2)
        cluster.signal("server", signal.SIGCONT)
        await states(cluster, client1="ready", client2="ready", client3="ready")
        await load.more(4)
        load.unharmed()

        cluster.signal("client2", signal.SIGKILL)
        cluster.start("client2")
        cluster.signal("client3", signal.SIGSTOP)  # cut off
        await states(cluster, client2="ready", client3="disconnected")
        await load.more(4)
        cluster.signal("client3", signal.SIGCONT)
        await states(cluster, client2="ready", client3="ready")
        load.unharmed()

        cluster.signal("server", signal.SIGKILL)
        await load.more(4)
        cluster.start("server")
        await states(cluster, client1="ready", client2="ready", client3="ready")
        await load.more(4)
        load.unharmed()
        print("agents:", load)
        assert pool.stats().ready == 3
        assert set(load.outcomes) == {"done"}
        assert len(cluster.allocations(config.job_id)) == 3, "nothing was replaced"
    await nothing_left(cluster, config.job_id)


@pytest.mark.parametrize("turn", range(TIMES))
async def test_a_node_that_drains_dies_or_is_given_up_costs_what_ran_there_and_is_made_up_for(cluster, turn):
    config = config_for(cluster)
    async with SlotPool(config) as pool, Load(pool, width=2, witnesses=3) as load:
        drained = load.witnesses[-1]
        hit = {drained.container}
        cluster.drain(node_of(cluster, config.job_id, drained.container))
        after_drain = await load.back(hit)
        await drained.lost()
        await asyncio.to_thread(cluster.heal)
        load.unharmed(hit)

        died = await load.witness()
        node = node_of(cluster, config.job_id, died.container)
        there = containers_on(cluster, pool, node)
        hit |= there
        cluster.signal(node, signal.SIGKILL)
        for key in there:
            for container in await asyncio.to_thread(containers_of_allocation, key.partition(".")[0]):
                await asyncio.to_thread(remove_container, container)
        after_death = await load.back(there)
        await died.lost()
        await asyncio.to_thread(cluster.heal)
        load.unharmed(hit)

        kept = await load.witness()  # Nomad gives up its container, which still answers: it may finish
        node = node_of(cluster, config.job_id, kept.container)
        there = containers_on(cluster, pool, node)
        cluster.signal(node, signal.SIGSTOP)
        await until(lambda: not any(pool.keeper.links[key].seat.open for key in there), "lost allocations", 60)
        await load.back()
        await kept.more(5)
        load.unharmed(hit)
        for witness in [each for each in load.witnesses if each.container in there]:
            await witness.finish()
            load.witnesses.remove(witness)
        await asyncio.to_thread(cluster.heal)
        await until(lambda: pool.keeper.links.keys().isdisjoint(there), "the end of what was given up", 60)
        load.unharmed(hit)
        print(f"nodes: {load}; back after a drain in {after_drain:.1f} s, after a death in {after_death:.1f} s")
    await nothing_left(cluster, config.job_id)
