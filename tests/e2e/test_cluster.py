"""Losing nodes of a cluster: drained, killed, partitioned, without a leader. Healthy containers never notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import pytest

from atropos.errors import SandboxError
from atropos.slots import SlotPool
from tests.e2e.cluster import Cluster
from tests.engines import BACKENDS, containers, pool_config
from tests.waiting import until

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
    pytest.mark.skipif(
        os.environ.get("ATROPOS_CLUSTER") != "1",
        reason="a cluster of four agents takes minutes: ATROPOS_CLUSTER=1 runs it",
    ),
]


class Load:
    """Trajectories without end: each leases, calls, releases; every outcome is counted, a lost one is retried."""

    def __init__(self, pool: SlotPool, width: int) -> None:
        self.pool = pool
        self.outcomes: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._trajectories(n)) for n in range(width)]

    async def _trajectories(self, number: int) -> None:
        while True:
            try:
                async with self.pool.lease(f"load-{number}", timeout_s=90) as slot:
                    assert (await slot.exec("ls -A")).output == ""
                    for n in range(5):
                        assert (await slot.exec(f"echo {n} >> f; wc -l < f")).output == f"{n + 1}\n"
                        await asyncio.sleep(0.05)
                self.outcomes["done"] += 1
            except SandboxError as error:
                self.outcomes[error.code] += 1

    async def more(self, trajectories: int) -> None:
        """Until so many more are done."""
        aim = self.outcomes["done"] + trajectories
        await until(
            lambda: self.outcomes["done"] >= aim or any(t.done() for t in self._tasks), "more trajectories", 120
        )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


async def test_nodes_drained_killed_and_partitioned_and_a_lost_leader_cost_only_what_ran_there():
    async with Cluster(clients=3) as cluster:
        config = pool_config("nomad", nomad_address=cluster.url, min_containers=3, max_containers=3)
        async with SlotPool(config) as pool:
            nodes = {pool.keeper.links[key].container.url for key in pool.keeper.links}
            assert len(nodes) == 3
            load = Load(pool, width=4)
            await load.more(4)

            cluster.signal("server", signal.SIGSTOP)  # no leader for a while: nobody notices
            lost = load.outcomes["slot_lost"]
            await load.more(20)
            assert load.outcomes["slot_lost"] == lost
            cluster.signal("server", signal.SIGCONT)
            await until(lambda: cluster.ready() == 3, "three nodes again", 60)

            cluster.signal("server", signal.SIGKILL)
            await load.more(10)
            cluster.start("server")
            await until(lambda: cluster.ready() == 3, "three nodes again", 90)
            await load.more(4)

            cluster.drain("client1")
            await until(lambda: cluster.ready() == 2, "client1 drained", 30)
            await load.more(10)
            await until(lambda: pool.stats().ready == 3, "three containers on two nodes", 90)

            cluster.signal("client2", signal.SIGKILL)  # its containers go on until Nomad gives them up
            await until(lambda: cluster.ready() == 1, "client2 down", 60)
            await until(lambda: pool.stats().ready == 3, "three containers on one node", 90)
            await load.more(10)
            cluster.start("client2")
            await until(lambda: cluster.ready() == 2, "client2 back", 60)

            cluster.signal("client3", signal.SIGSTOP)
            await until(lambda: cluster.ready() == 1, "client3 partitioned", 60)
            await load.more(10)
            cluster.signal("client3", signal.SIGCONT)
            await until(lambda: cluster.ready() == 2, "client3 back", 60)
            await until(lambda: pool.stats().ready == 3, "three containers", 90)
            await load.stop()
            print("outcomes", dict(load.outcomes))
        await until(lambda: containers(config.job_id) == [], "no container left", 60)
