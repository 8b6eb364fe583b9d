"""Losing containers of a Docker engine, and the engine itself: what runs elsewhere never notices.

ATROPOS_FAULTS multiplies the rounds (1 in CI).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from atropos.slots import SlotPool
from tests.e2e.cluster.load import Load, kill_server
from tests.e2e.own_dockerd import OwnDockerd
from tests.engines import BACKENDS, leftovers, pool_config
from tests.repeats import TIMES
from tests.waiting import until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("docker" not in BACKENDS, reason="ATROPOS_BACKENDS has no docker: no engine in this run"),
]


def docker(*arguments: str):
    def hurt(container: str) -> None:
        subprocess.run(["docker", *arguments, container], capture_output=True, check=True, timeout=60)

    return hurt


FAULTS = {
    "kill -9": kill_server,
    "docker kill": docker("kill"),
    "docker rm": docker("rm", "--force"),
}
MORE_FAULTS = {
    "docker restart": docker("restart", "--time", "0"),
    "docker stop": docker("stop", "--time", "1"),
    "docker pause": docker("pause"),
}


@pytest.mark.parametrize("turn", range(TIMES))
async def test_lost_costs_its_own_calls(turn):
    config = pool_config("docker", min_containers=3, max_containers=3)
    hit: set[str] = set()
    took: dict[str, float] = {}
    async with SlotPool(config) as pool, Load(pool, width=2, witnesses=3) as load:
        for name, fault in (FAULTS | MORE_FAULTS if TIMES > 1 else FAULTS).items():
            victim = load.witnesses[-1]
            hit.add(victim.container)
            await asyncio.to_thread(fault, victim.container)
            await victim.lost()
            took[name] = round(await load.back(), 1)
            load.unharmed(hit)
            await load.witness()
        await load.more(4)
        print(f"containers: {load}; back after {took} s")
    assert leftovers("docker", config.job_id) == []


@pytest.fixture(scope="module")
def own():
    if os.geteuid() != 0:
        pytest.skip("a dockerd of one's own needs root")
    if not os.environ.get("DOCKER_HOST", "unix:").startswith("unix:"):
        pytest.skip("the engine is on another machine: its image can't be linked into a dockerd here")
    with OwnDockerd() as dockerd:
        yield dockerd


RESTARTS = [
    pytest.param(True, signal.SIGKILL, id="live-restore-killed"),
    pytest.param(False, signal.SIGTERM, id="plain-stopped"),
    pytest.param(True, signal.SIGTERM, id="live-restore-stopped"),
    pytest.param(False, signal.SIGKILL, id="plain-killed"),
]


@pytest.mark.parametrize("turn", range(TIMES))
@pytest.mark.parametrize(("live_restore", "number"), RESTARTS if TIMES > 1 else RESTARTS[:2])
async def test_restart_costs_containers(own, live_restore, number, turn):
    if own.live_restore != live_restore:
        await asyncio.to_thread(own.end, signal.SIGTERM)
        own.live_restore = live_restore
        await asyncio.to_thread(own.start)
    config = pool_config("docker", docker_host=own.host, min_containers=2, max_containers=2)
    async with SlotPool(config) as pool, Load(pool, width=1, witnesses=2) as load:
        before = set(pool.links)
        await asyncio.to_thread(own.end, number)
        if live_restore or number is signal.SIGKILL:
            await load.more(2)  # while there is no daemon
            load.unharmed()
        await asyncio.to_thread(own.start)
        took = await load.back(() if live_restore else before)
        if live_restore:
            load.unharmed()
            assert set(pool.links) == before
        else:
            for witness in load.witnesses:
                await witness.lost()
        await load.more(2)
        await until(lambda: not pool.stats().trouble, "no trouble", 60)
        print(f"live-restore {live_restore}, {number.name}: {load}; back after {took:.1f} s")
    assert own.containers(config.job_id) == []


async def test_purge_outlasts_outage(own):
    config = pool_config("docker", docker_host=own.host, max_containers=1)
    pool = SlotPool(config)
    await pool.start()
    await asyncio.to_thread(own.end, signal.SIGKILL)
    stopping = asyncio.create_task(pool.stop())
    await asyncio.to_thread(own.start)
    await stopping
    assert own.containers(config.job_id) == []
