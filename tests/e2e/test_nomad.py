"""What is special about Nomad: shared jobs, hand-run jobs, its faults and its reasons. The rest is in conformance."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from typing import Any

import pytest

from atropos.errors import AcquireTimeout, BackendUnavailable, SandboxError, SlotLost
from atropos.slots import SlotPool
from atropos.slots.backends.nomad import job
from tests.e2e.hermes_support import running_policy, script_env
from tests.e2e.nomad_proxy import Mode, NomadProxy
from tests.engines import (
    BACKENDS,
    NOMAD,
    ROOT,
    SMALL,
    allocations,
    containers_of_allocation,
    kill_container,
    nomad,
    nothing_left,
    pool_config,
)
from tests.settings import shows
from tests.waiting import until

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
]


def binary() -> str:
    found = subprocess.run(["bash", str(ROOT / "scripts/nomad.sh")], capture_output=True, text=True, check=True)
    return found.stdout.split()[-1]


async def run_by_hand(job_id: str) -> None:
    """`nomad var put` and `nomad job run`, as docs/cluster.md has them."""
    secret = [binary(), "var", "put", "-address", NOMAD, f"nomad/jobs/{job_id}", f"token={secrets.token_hex(32)}"]
    await asyncio.to_thread(subprocess.run, secret, check=True, capture_output=True)
    command = [binary(), "job", "run", "-detach", "-address", NOMAD]
    for name, value in {
        "job_id": job_id,
        "slots": 2,
        "slot_memory_mib": SMALL.memory_mib,
        "seccomp_profile": ROOT / "docker/sandbox/seccomp.json",
    }.items():
        command += ["-var", f"{name}={value}"]
    await asyncio.to_thread(subprocess.run, [*command, str(ROOT / job.DEFINITION)], check=True, capture_output=True)


async def test_one_job_serves_two_envs(tmp_path):
    job_id = f"atropos-{secrets.token_hex(4)}"
    await run_by_hand(job_id)

    async def script(number: int, policy: str) -> list[dict[str, Any]]:
        groups = tmp_path / f"{number}.jsonl"
        command = script_env(
            policy,
            nomad_address=NOMAD,
            sandbox_job_id=job_id,
            acquire_timeout_s=120,
            start_timeout_s=240,
            total_steps=3,
            data_path_to_save_groups=groups,
        )
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()[-2000:]
        return [json.loads(line) for line in groups.read_text().splitlines()]

    async with running_policy(tmp_path) as (url, _):
        # whichever ends first may purge the job before the other one has come: that one then registers it anew
        for groups in await asyncio.gather(script(1, url), script(2, url)):
            assert [sorted(group["scores"]) for group in groups] == [[0.0, 1.0]] * 3
    await nothing_left("nomad", job_id)


@shows("sandbox_job_id")
async def test_job_goes_with_last_pool():
    config = pool_config("nomad", max_containers=1)
    await run_by_hand(config.job_id)
    before = nomad("GET", f"/v1/job/{config.job_id}")["CreateIndex"]
    async with SlotPool(config) as two:
        async with SlotPool(config) as one:
            a, b = await one.acquire("a"), await two.acquire("b")
            assert (a.container, a.name) != (b.container, b.name)
            assert a.container == b.container
            await a.exec("echo a > mine")
            assert (await b.exec("ls -A")).output == ""
            with pytest.raises(AcquireTimeout, match="1 containers"):
                await one.acquire("c", timeout_s=0.5)
            await a.release()
        # the first pool has ended and asked for a purge: the second one's lease and job go on
        assert (await b.exec("echo still here")).output == "still here\n"
        assert nomad("GET", f"/v1/job/{config.job_id}")["CreateIndex"] == before
        await b.release()
    await nothing_left("nomad", config.job_id)


async def test_stopped_allocations_are_replaced():
    async with SlotPool(pool_config("nomad", min_containers=2, max_containers=2)) as pool:
        slots = [await pool.acquire(f"t{n}") for n in range(4)]
        stopped, killed = sorted({slot.container for slot in slots})
        calls = {slot: asyncio.create_task(slot.exec("sleep 1000")) for slot in slots}
        await asyncio.sleep(0.2)
        (running,) = await asyncio.to_thread(containers_of_allocation, killed.partition(".")[0])
        await asyncio.to_thread(kill_container, running)
        for slot in slots:
            if slot.container == killed:
                with pytest.raises(SandboxError):
                    await calls[slot]
            else:
                assert not calls[slot].done()
        await asyncio.to_thread(
            nomad, "POST", f"/v1/allocation/{stopped.partition('.')[0]}/stop?no_shutdown_delay=true"
        )
        for slot in slots:  # the server's stop lets leases go on for a while; releasing them ends it
            calls[slot].cancel()
            await slot.release()
        await until(
            lambda: pool.stats().ready == 2 and pool.links.keys().isdisjoint({stopped, killed}),
            "two new containers",
            90,
        )
        async with pool.lease("again") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"


async def test_idle_go_from_the_top():
    async with SlotPool(pool_config("nomad", max_containers=3, idle_container_s=0.3, slots_per_container=1)) as pool:
        slots = [await pool.acquire(f"t{n}") for n in range(3)]
        by_index = {pool.links[slot.container].container.index: slot for slot in slots}
        await by_index[0].release()
        await by_index[1].release()
        await asyncio.sleep(1)
        assert (await by_index[2].exec("echo kept")).output == "kept\n"
        await by_index[2].release()
        await until(lambda: len(pool.links) == 1, "one container", 60)

        def count() -> int:
            return nomad("GET", f"/v1/job/{pool.config.job_id}")["TaskGroups"][0]["Count"]

        await until(lambda: count() == 1, "a job of one container", 60)
        assert [link.container.index for link in pool.links.values()] == [0]


async def test_outage_ends_no_trajectory():
    await asyncio.gather(*(goes_on_while_nomad_fails(mode) for mode in ("error", "empty", "gone")))


async def goes_on_while_nomad_fails(mode: Mode) -> None:
    async with NomadProxy() as proxy:
        config = pool_config("nomad", nomad_address=proxy.url, slots_per_container=1)
        async with SlotPool(config) as pool, pool.lease("t") as slot:
            proxy.fail(mode)
            waiting = asyncio.create_task(pool.acquire("needs another container", timeout_s=90))
            for n in range(20):
                assert (await slot.exec(f"echo {n}")).output == f"{n}\n"
                await asyncio.sleep(0.1)
            assert not waiting.done() or mode == "empty"
            proxy.mode = "pass"
            async with await waiting as other:
                assert (await other.exec("echo ok")).output == "ok\n"
        await nothing_left("nomad", config.job_id)


async def test_missed_changes_made_up():
    async with NomadProxy() as proxy:
        config = pool_config("nomad", nomad_address=proxy.url, slots_per_container=1, idle_container_s=0.3)
        async with SlotPool(config) as pool:
            slots = [await pool.acquire(f"t{n}") for n in range(2)]
            index = {slot: pool.links[slot.container].container.index for slot in slots}
            first, last = sorted(slots, key=lambda slot: index[slot])
            proxy.fail("readonly")
            with pytest.raises(BackendUnavailable, match="No cluster leader"):
                await pool.backend.retire(pool.links[first.container].container)
            await last.release()
            await until(lambda: any(each.state == "ending" for each in pool.backend.containers()), "a drained one", 60)
            await asyncio.sleep(0.5)
            assert (await first.exec("echo still here")).output == "still here\n"
            proxy.mode = "pass"
            await until(lambda: len(pool.backend.containers()) == 1, "one container", 60)
            assert nomad("GET", f"/v1/job/{config.job_id}")["TaskGroups"][0]["Count"] == 1
            async with pool.lease("again", timeout_s=60) as slot:
                assert (await slot.exec("echo ok")).output == "ok\n"
            await first.release()
        await nothing_left("nomad", config.job_id)


async def test_a_purge_outlasts_errors():
    async with NomadProxy() as proxy:
        config = pool_config("nomad", nomad_address=proxy.url)
        pool = SlotPool(config)
        await pool.start()
        proxy.fail("error")
        stopping = asyncio.create_task(pool.stop())
        await asyncio.sleep(1)
        proxy.mode = "pass"
        await stopping
    await nothing_left("nomad", config.job_id)


async def test_deploying_job_grows_later(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.ASK_AGAIN_S", 1.0)
    async with SlotPool(pool_config("nomad", slots_per_container=1)) as pool:
        path = f"/v1/job/{pool.config.job_id}"
        job = nomad("GET", path)
        (group,) = job["TaskGroups"]
        group["Update"] |= {"MaxParallel": 1, "MinHealthyTime": 100_000_000_000}  # it goes on until it is ended here
        group["Tasks"][0]["Resources"]["CPU"] += 1
        (old,) = pool.links
        nomad("POST", "/v1/jobs", json.dumps({"Job": job}).encode())
        await until(lambda: old not in pool.links and pool.stats().ready == 1, "the new container", 60)
        async with pool.lease("t") as one:
            waiting = asyncio.create_task(pool.acquire("needs another container", timeout_s=90))
            await until(
                lambda: "can't grow to 2 yet: its deployment is in progress" in pool.trouble(), "why it waits", 60
            )
            (deployment,) = nomad("GET", f"{path}/deployments")
            nomad("POST", f"/v1/deployment/fail/{deployment['ID']}", b"{}")
            async with await waiting as two:
                assert one.container != two.container
                assert (await two.exec("echo ok")).output == "ok\n"
        await until(lambda: not pool.trouble(), "no trouble")


async def test_queries_replace_events():
    async with NomadProxy(streams=False) as proxy:
        config = pool_config("nomad", nomad_address=proxy.url)
        async with SlotPool(config) as pool:
            slot = await pool.acquire("t")
            (running,) = await asyncio.to_thread(containers_of_allocation, slot.container.partition(".")[0])
            await asyncio.to_thread(kill_container, running)
            with pytest.raises(SandboxError):
                await slot.exec("sleep 1000")
            async with pool.lease("u") as other:
                assert (await other.exec("echo ok")).output == "ok\n"
        assert proxy.asked[f"/v1/job/{config.job_id}/allocations"] > 0


async def test_no_call_asks_nomad():
    async with NomadProxy() as proxy, SlotPool(pool_config("nomad", nomad_address=proxy.url)) as pool:
        async with pool.lease("warm") as slot:
            await slot.exec("true")
        before = proxy.asked.total()
        for n in range(5):
            async with pool.lease(f"t{n}") as slot:
                for _ in range(20):
                    await slot.exec("true")
        assert proxy.asked.total() - before <= 20  # changes and slow ends of long polls, for 100 calls in 5 leases


async def test_next_process_adopts_job():
    config = pool_config("nomad", max_containers=1, lease_ttl_s=3)
    program = (
        "import asyncio, os, signal, sys\n"
        "from atropos.slots import SlotPool, SlotPoolConfig\n"
        "async def main():\n"
        "    pool = SlotPool(SlotPoolConfig.model_validate_json(sys.argv[1]))\n"
        "    await pool.start()\n"
        "    for n in range(2): await (await pool.acquire(str(n))).exec('echo left > behind')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, config.model_dump_json()]
    ended = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, timeout=120)
    assert ended.returncode == -9
    before = {one["ID"] for one in allocations(config.job_id)}
    async with SlotPool(config) as pool:
        assert {key.partition(".")[0] for key in pool.links} == before
        for _ in range(2):
            async with pool.lease(secrets.token_hex(4)) as slot:  # waits out the leases of the dead
                assert (await slot.exec("ls -A")).output == ""
    await nothing_left("nomad", config.job_id)


async def test_removed_job_is_no_result():
    config = pool_config("nomad", max_containers=1)
    async with SlotPool(config) as pool:
        slot = await pool.acquire("t")
        call = asyncio.create_task(slot.exec("sleep 1000"))
        await asyncio.sleep(0.1)
        (running,) = await asyncio.to_thread(containers_of_allocation, slot.container.partition(".")[0])
        await asyncio.to_thread(nomad, "DELETE", f"/v1/job/{config.job_id}?purge=true")
        await asyncio.to_thread(kill_container, running)
        with pytest.raises(SandboxError):
            await call
        with pytest.raises(SlotLost):
            await slot.exec("true")
        async with pool.lease("again", timeout_s=90) as other:  # the pool has registered its job anew
            assert (await other.exec("echo ok")).output == "ok\n"
    await nothing_left("nomad", config.job_id)


def told(caplog, words: str) -> list[str]:
    return [message for message in caplog.messages if words in message]


async def test_stopped_job_stays_stopped(caplog):
    config = pool_config("nomad", max_containers=1)
    path = f"/v1/job/{config.job_id}"
    async with SlotPool(config) as pool:
        async with pool.lease("t"):
            pass
        await asyncio.to_thread(nomad, "DELETE", path)
        await until(lambda: "stays stopped" in pool.trouble() and not pool.links, "no container", 90)
        with pytest.raises(SandboxError, match=f"nomad job start {config.job_id}"):
            await pool.acquire("u", timeout_s=3)
        job = await asyncio.to_thread(nomad, "GET", path)
        assert job["Stop"]
        body = json.dumps({"Job": job | {"Stop": False}}).encode()  # as `nomad job start`
        await asyncio.to_thread(nomad, "POST", "/v1/jobs", body)
        async with pool.lease("v", timeout_s=90) as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
    assert len(told(caplog, "was stopped by another hand")) == 1
    assert len(told(caplog, f"job {config.job_id} runs again")) == 1
    await nothing_left("nomad", config.job_id)


async def test_count_by_hand_made_good(caplog):
    config = pool_config("nomad", max_containers=3, idle_container_s=1)

    def scale(count: int) -> None:
        body = json.dumps({"Count": count, "Target": {"Group": "sandbox"}}).encode()
        nomad("POST", f"/v1/job/{config.job_id}/scale", body)

    def count() -> int:
        return nomad("GET", f"/v1/job/{config.job_id}")["TaskGroups"][0]["Count"]

    async with SlotPool(config) as pool:
        await asyncio.to_thread(scale, 0)
        await until(lambda: told(caplog, "was scaled to 0 by another hand"), "a line in the log", 60)
        async with pool.lease("t", timeout_s=90) as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
            assert await asyncio.to_thread(count) == 1
            await asyncio.to_thread(scale, 2)
            await until(lambda: told(caplog, "was scaled to 2 by another hand"), "a line in the log", 90)
            await until(lambda: count() == 1, "one container", 60)
            assert (await slot.exec("echo still here")).output == "still here\n"
    assert len(told(caplog, "by another hand")) == 2
    await nothing_left("nomad", config.job_id)


async def test_a_rerun_job_is_followed(caplog):
    config = pool_config("nomad", max_containers=1)
    path = f"/v1/job/{config.job_id}"
    async with SlotPool(config) as pool:
        job = await asyncio.to_thread(nomad, "GET", path)
        (task,) = job["TaskGroups"][0]["Tasks"]
        memory = task["Resources"]["MemoryMB"]
        task["Env"]["ATROPOS_CONFIG"] = json.dumps(json.loads(task["Env"]["ATROPOS_CONFIG"]) | {"slots": 3})
        task["Resources"]["MemoryMB"] = memory + 64
        await asyncio.to_thread(nomad, "POST", "/v1/jobs", json.dumps({"Job": job}).encode())
        await until(lambda: told(caplog, "was changed by another hand"), "a line in the log", 60)
        await until(lambda: pool.stats().slots == 3, "the job's slots", 90)
    (line,) = told(caplog, "was changed by another hand")
    assert "its slots_per_container is 3, not 2" in line
    assert f"its container_memory_mib is {memory + 64}, not {memory}" in line
    assert "nomad job revert" in line
    await nothing_left("nomad", config.job_id)
