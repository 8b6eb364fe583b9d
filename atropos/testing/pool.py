"""A pool's life on every backend: growing, shrinking, losing containers, ending. Each test has a pool of its own."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from atropos.errors import AcquireTimeout, SandboxError
from atropos.slots import ExecResult, SlotPool
from atropos.testing.fixtures import FreshPool
from atropos.testing.harness import BackendHarness
from atropos.testing.waiting import SLOWNESS, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_demand_scales_the_pool(fresh_pool: FreshPool) -> None:
    async with fresh_pool(max_containers=2, idle_container_s=0.5, acquire_timeout_s=90 * SLOWNESS) as pool:
        slots = [await pool.acquire(f"t{n}") for n in range(3)]
        assert len({slot.container for slot in slots}) == 2
        slots.append(await pool.acquire("t3"))
        with pytest.raises(AcquireTimeout, match=r"2 of 2 containers ready.*4 slots \(0 free, 4 leased"):
            await pool.acquire("late", timeout_s=0.2)
        waiting = asyncio.create_task(pool.acquire("next"))
        await asyncio.sleep(0.05)
        await slots[0].release()
        slots[0] = await waiting
        assert [(await slot.exec("echo ok")).output for slot in slots] == ["ok\n"] * 4
        assert "2 of 2 containers ready" in repr(pool)
        await asyncio.gather(*(slot.release() for slot in slots))
        await until(lambda: pool.stats().containers == 1, "the idle container closed", 90)
        async with pool.lease("again") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"


async def test_killed_server_is_replaced(fresh_pool: FreshPool, harness: BackendHarness) -> None:
    async with fresh_pool(min_containers=2, max_containers=2, acquire_timeout_s=90 * SLOWNESS) as pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        victim = slots[0].container
        await asyncio.gather(*(slot.exec("mkfifo go") for slot in slots))
        calls = [asyncio.create_task(slot.exec("read line < go; echo done")) for slot in slots]
        await asyncio.sleep(0.3)
        await harness.kill(pool, victim)
        await asyncio.gather(*(slot.exec("echo > go", concurrent=True) for slot in slots if slot.container != victim))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for slot, result in zip(slots, results, strict=True):
            if slot.container == victim:
                assert isinstance(result, SandboxError)
                with pytest.raises(SandboxError):
                    await slot.exec("true")
            else:
                assert isinstance(result, ExecResult), result
                assert result.output == "done\n"
            await slot.release()
        await until(lambda: pool.stats().ready == 2, "two containers again", 90)
        slots = await asyncio.gather(*(pool.acquire(f"u{n}") for n in range(4)))
        assert [(await slot.exec("echo ok")).output for slot in slots] == ["ok\n"] * 4
        await asyncio.gather(*(slot.release() for slot in slots))


async def test_stop_midway_leaves_nothing(fresh_pool: FreshPool) -> None:
    async with fresh_pool(slots_per_container=4, max_containers=2, acquire_timeout_s=90 * SLOWNESS) as pool:
        slots = [await pool.acquire(f"t{n}") for n in range(3)]
        calls = [asyncio.create_task(slot.exec("sleep 1000 & sleep 1000")) for slot in slots]
        waiting = [asyncio.create_task(pool.acquire(f"w{n}")) for n in range(8)]
        await asyncio.sleep(0.2)
    results = await asyncio.gather(*calls, *waiting, return_exceptions=True)
    for result in results[:3]:
        assert isinstance(result, SandboxError)
    with pytest.raises(SandboxError, match="stopped"):
        await pool.acquire("late")


async def test_two_pools_do_not_meet(fresh_pool: FreshPool) -> None:
    async with fresh_pool(max_containers=1) as one, fresh_pool(max_containers=1) as two:
        async with one.lease("t") as a, two.lease("t") as b:
            await a.exec("echo a > f")
            assert a.container != b.container
            assert (await b.exec("ls -A")).output == ""
        await one.stop()
        async with two.lease("u") as c:
            assert (await c.exec("echo ok")).output == "ok\n"


@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.6])  # while it asks, while containers are made, while they come up
async def test_cancelled_start_leaves_nothing(harness: BackendHarness, after_s: float) -> None:
    config = harness.config(slots_per_container=2)
    pool = SlotPool(config)
    task = asyncio.create_task(pool.start())
    await asyncio.sleep(after_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
        await pool.stop()  # it had started
    assert await harness.residue(config) == []
