"""Truth 2: a call runs at most once; where the outcome cannot be known the caller is told so."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from atropos import wire
from atropos.errors import LeaseExpired, OutcomeUnknown, SandboxError, SlotLost
from tests.processes import running
from tests.settings import shows
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_call_of_one_id_runs_once(shared_pool):
    async with shared_pool.lease("t") as slot:
        operation = wire.Exec(command="echo x >> count; sleep 0.05")
        first = await asyncio.gather(*(slot.run(operation, call_id="once") for _ in range(10)))
        assert all(result == first[0] for result in first)
        try:  # its result is still known, or was forgotten after it had arrived; it is not run again
            assert await slot.run(operation, call_id="once") == first[0]
        except OutcomeUnknown:
            pass
        assert (await slot.exec("wc -l < count")).output == "1\n"


async def test_killed_leaves_no_doubt(local_pool, engine, tmp_path):
    """The side effects can't outlive the slot; so each call ended, is lost, or is said to be unknown; none is re-run."""
    rng = random.Random(2)
    async with local_pool(slots_per_container=4, max_containers=1) as pool:
        for _ in range(3):
            slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
            outcomes: list[object] = []

            async def calls(slot, outcomes=outcomes):
                try:
                    for n in range(1000):
                        result = await slot.exec(f"echo {n} >> log; tail -n 1 log; wc -l < log")
                        outcomes.append(result.output == f"{n}\n{n + 1}\n")
                except SandboxError as error:
                    outcomes.append(type(error))

            tasks = [asyncio.create_task(calls(slot)) for slot in slots]
            await until(lambda outcomes=outcomes: len(outcomes) >= 4, "calls at work")
            await asyncio.sleep(rng.random() * 0.1)
            await engine.signal(slots[0].container, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
            assert {o for o in outcomes if o is not True} <= {SlotLost, OutcomeUnknown, LeaseExpired}
            assert outcomes.count(True) > 0
            for slot in slots:
                with pytest.raises(SandboxError):
                    await slot.exec("true")
                await slot.release()


async def test_stopped_doubles_nothing(shared_pool, engine):
    async with shared_pool.lease("t") as slot:
        await slot.exec("true")

        async def calls():
            for n in range(60):
                assert (await slot.exec(f"echo {n} >> log; wc -l < log")).output == f"{n + 1}\n"

        task = asyncio.create_task(calls())
        for _ in range(4):
            await asyncio.sleep(0.02)
            await engine.signal(slot.container, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            await engine.signal(slot.container, signal.SIGCONT)
        await asyncio.wait_for(task, 60)


async def test_cancelled_never_runs(shared_pool):
    async with shared_pool.lease("t") as slot:
        first = asyncio.create_task(slot.exec("sleep 1002"))
        await until(lambda: running("sleep 1002"), "the first call's program")
        queued = asyncio.create_task(slot.exec("touch ran"))
        await asyncio.sleep(0.05)
        for task in (queued, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await slot.exec("ls -A")).output == ""


@shows("reconnect_s")
async def test_frozen_server_is_replaced(local_pool, engine, monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.RELINK_S", 0.5)
    async with local_pool(slots_per_container=2, max_containers=1, reconnect_s=1.0, lease_ttl_s=4) as pool:
        slot = await pool.acquire("t")
        call = asyncio.create_task(slot.exec("sleep 302"))
        await until(lambda: running("sleep 302"), "the call's program")
        frozen = int(slot.container.partition("-")[0])
        await engine.signal(slot.container, signal.SIGSTOP)
        with pytest.raises((OutcomeUnknown, SlotLost)):
            await asyncio.wait_for(call, 60)
        async with pool.lease("next", timeout_s=60) as other:
            assert other.container != slot.container
        await until(lambda: not os.path.exists(f"/proc/{frozen}"), "the end of the frozen server")
