"""Real env programs on one job: killed and started again, two at once, purged by one while another works, under faults."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from atropos.slots import SlotPool
from tests.e2e.cluster.load import kill_server
from tests.e2e.cluster.programs import env_program
from tests.e2e.cluster.test_containers import container_of
from tests.e2e.cluster.test_nodes import config_for, nothing_left
from tests.e2e.hermes_support import running_policy
from tests.engines import kill_container
from tests.repeats import TIMES
from tests.waiting import until

pytestmark = [pytest.mark.nomad, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(1800)]


@pytest.fixture
async def policy(tmp_path):
    async with running_policy(tmp_path) as (url, _):
        yield url


@pytest.fixture
def job_id():
    return f"test-{secrets.token_hex(4)}"


def running(cluster, job_id: str) -> set[str]:
    return {a["ID"] for a in cluster.allocations(job_id) if a["ClientStatus"] == "running"}


@pytest.mark.parametrize("turn", range(TIMES))
async def test_killed_env_is_carried_on(cluster, policy, job_id, tmp_path, turn):
    async with env_program(cluster, job_id, policy, tmp_path / "a.jsonl") as first:
        await first.until_groups(1)
        await first.kill()
    before = running(cluster, job_id)
    assert len(before) == 2
    async with env_program(cluster, job_id, policy, tmp_path / "b.jsonl") as second:
        await second.until_groups(1)
        assert running(cluster, job_id) == before, "the containers were adopted"
        faults = (kill_container, kill_server)
        for number, fault in enumerate(faults):  # what was lost is retried, and scored right
            await asyncio.to_thread(fault, await container_of(sorted(before)[number]))
            if TIMES > 1 or fault is faults[-1]:  # in CI both at once: nothing is left then
                await second.until_groups(len(second.groups()) + 2)
                await until(lambda: len(running(cluster, job_id)) == 2, "two containers", 60)
        await second.ends_well()
    await nothing_left(cluster, job_id)


@pytest.mark.parametrize("turn", range(TIMES))
async def test_two_envs_share_a_job(cluster, policy, job_id, tmp_path, turn):
    async with env_program(cluster, job_id, policy, tmp_path / "a.jsonl") as long:
        await long.until_groups(1)
        created = cluster.ask("GET", f"/v1/job/{job_id}")["CreateIndex"]
        async with env_program(
            cluster, job_id, policy, tmp_path / "b.jsonl", purge_job_on_start="true", purge_job_on_shutdown="true"
        ) as purger:
            await purger.until_groups(1)
            await purger.ends_well()
        assert cluster.ask("GET", f"/v1/job/{job_id}")["CreateIndex"] == created
        await long.ends_well()
    await nothing_left(cluster, job_id)


async def test_purge_spares_others_jobs(cluster, job_id):
    config = config_for(cluster, job_id=job_id, min_containers=1, max_containers=1)
    first = SlotPool(config)
    await first.start()
    stopping = asyncio.create_task(first.stop())
    await until(lambda: (cluster.ask("GET", f"/v1/job/{job_id}") or {}).get("Stop"), "a stopped job", 60)
    async with SlotPool(config) as second, second.lease("t") as slot:
        await stopping
        for n in range(20):
            assert (await slot.exec(f"echo {n}")).output == f"{n}\n"
            await asyncio.sleep(0.05)
        assert cluster.ask("GET", f"/v1/var/nomad/jobs/{job_id}") is not None
    await nothing_left(cluster, job_id)
