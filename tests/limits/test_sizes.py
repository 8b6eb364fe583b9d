"""A lease's own size on real slots: its limits hold, its neighbours keep theirs, and the next lease is plain again."""

from __future__ import annotations

import asyncio
import random

import pytest
import pytest_asyncio

from atropos import wire
from atropos.errors import LimitTooLarge, NotSupported
from atropos.slots import LeaseLimits, Slot, SlotPool
from atropos.wire import SlotLimits
from tests import privileges
from tests.backends import Engine
from tests.waiting import SLOWNESS, until

pytestmark = privileges.cgroups
in_one_loop = pytest.mark.asyncio(loop_scope="module")
PLAIN = SlotLimits(memory_mib=96, pids=48, disk_mib=32, inodes=3000, wall_s=8 * SLOWNESS**0.5)
DOUBLE = LeaseLimits(memory_mib=192, pids=96, disk_mib=80, inodes=6000, wall_s=60 * SLOWNESS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    engine = Engine("local")
    config = engine.config(slots_per_container=4, max_containers=1, limits=PLAIN, acquire_timeout_s=60 * SLOWNESS)
    async with SlotPool(config) as pool:
        yield pool
        assert pool.stats().retired == 0, repr(pool)
    assert await engine.residue(config) == []


def take(mib: int) -> str:
    return f"exec python3 -c \"x = b'x' * ({mib} << 20); print(len(x) >> 20)\""


FORKS = "import os,time\nn=0\nwhile n<80:\n  if os.fork()==0: time.sleep(1000); os._exit(0)\n  n+=1\nprint(n)"


async def is_plain(slot: Slot) -> None:
    """The slot has the pool's limits, each of them."""
    assert (await slot.exec(take(144), timeout_s=60 * SLOWNESS)).limit == "memory"
    assert (await slot.exec(f'python3 -c "{FORKS}"', timeout_s=30 * SLOWNESS)).limit == "pids"
    await slot.quiesce()
    assert (await slot.exec("head -c 50000000 /dev/zero > f")).limit == "disk"
    await slot.exec("rm f")
    assert (
        await slot.exec("for i in $(seq 4000); do : > f$i || exit 1; done 2>/dev/null", timeout_s=60 * SLOWNESS)
    ).limit == "inodes"
    assert (await slot.exec(f"sleep {3 * PLAIN.wall_s}")).limit == "time"


@in_one_loop
async def test_a_lease_has_each_limit(pool):
    for _ in range(2):
        async with pool.lease("large", limits=DOUBLE) as slot:
            assert (await slot.exec(take(144), timeout_s=60 * SLOWNESS)).output == "144\n"
            assert (await slot.exec(take(288), timeout_s=60 * SLOWNESS)).limit == "memory"
            assert (await slot.exec(f'python3 -c "{FORKS}"', timeout_s=30 * SLOWNESS)).output == "80\n"
            await slot.quiesce()
            assert (await slot.exec("head -c 50000000 /dev/zero > f && rm f")).exit_code == 0
            assert (await slot.exec("head -c 100000000 /dev/zero > f")).limit == "disk"
            await slot.exec("rm f")
            files = "for i in $(seq 4000); do : > f$i || exit 1; done"
            assert (await slot.exec(files, timeout_s=60 * SLOWNESS)).exit_code == 0
            assert (await slot.exec(f"sleep {PLAIN.wall_s + 1}; echo awake")).output == "awake\n"
        async with pool.lease("plain") as slot:
            await is_plain(slot)


@in_one_loop
async def test_forks_keep_the_size(pool):
    async with pool.lease("large", limits=DOUBLE) as slot:
        await slot.write_file("f", b"x")
        async with await slot.snapshot() as snapshot:
            assert (await slot.exec(take(144), timeout_s=60 * SLOWNESS)).output == "144\n"
            async with pool.lease("fork", snapshot=snapshot) as fork:
                assert (await fork.exec(f"cat f; {take(144)}", timeout_s=60 * SLOWNESS)).output == "x144\n"
            async with pool.lease("fork", snapshot=snapshot, limits=LeaseLimits()) as fork:
                assert (await fork.exec(take(144), timeout_s=60 * SLOWNESS)).limit == "memory"


@in_one_loop
async def test_smaller_lease_is_bounded(pool):
    async with pool.lease("small", limits=LeaseLimits(memory_mib=48, pids=12)) as slot:
        assert (await slot.exec(take(72), timeout_s=60 * SLOWNESS)).limit == "memory"
        assert (await slot.exec(take(16), timeout_s=60 * SLOWNESS)).output == "16\n"


@in_one_loop
async def test_neighbours_keep_memory(pool):
    """All that a container has is leased, each lease uses nearly all of its own while one tries to take more."""
    async with (
        pool.lease("large", limits=LeaseLimits(memory_mib=192, wall_s=60 * SLOWNESS)) as large,
        pool.lease("one", limits=LeaseLimits(wall_s=60 * SLOWNESS)) as one,
        pool.lease("two", limits=LeaseLimits(wall_s=60 * SLOWNESS)) as two,
    ):
        hold = "exec python3 -c \"import time; x = b'x' * ({} << 20); time.sleep({}); print(len(x) >> 20)\""
        seconds = 3 * SLOWNESS
        started = [
            asyncio.create_task(slot.exec(hold.format(64, seconds), timeout_s=60 * SLOWNESS)) for slot in (one, two)
        ]
        for _ in range(3):
            assert (await large.exec(take(400), timeout_s=60 * SLOWNESS)).limit == "memory"
        assert [(await each).output for each in started] == ["64\n", "64\n"]
        with pytest.raises(Exception, match="no slot came free"):
            await pool.acquire("three", timeout_s=0.5)


@in_one_loop
async def test_too_large_is_refused(pool):
    with pytest.raises(LimitTooLarge, match=r"limits\.memory_mib: 385 asked for, the largest container has 384"):
        await pool.acquire("x", limits=LeaseLimits(memory_mib=385))
    (link,) = pool.links.values()
    request = wire.LeaseRequest(lease_id="by-hand-1", client_id=pool.client_id, limits=LeaseLimits(pids=1000))
    with pytest.raises(NotSupported, match=r"limits\.pids: 1000 asked for, the largest container has 192"):
        await link.client.acquire(request)


@in_one_loop
async def test_sizes_leave_a_plain_pool(pool):
    rng = random.Random(7)
    done = 0

    async def trajectory(number: int) -> None:
        nonlocal done
        mib = rng.choice([None, None, 96, 150, 192, 288, 384])
        limits = None if mib is None else LeaseLimits(memory_mib=mib, cpu_quota=rng.choice([None, 1.5]))
        try:
            async with asyncio.timeout(rng.choice([0.2, 120.0 * SLOWNESS])):
                async with pool.lease(f"t{number}", limits=limits, timeout_s=200 * SLOWNESS) as slot:
                    assert (
                        await slot.exec(take((mib or 96) // 2), timeout_s=60 * SLOWNESS)
                    ).output == f"{(mib or 96) // 2}\n"
                    done += 1
        except TimeoutError:
            pass

    async with asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(trajectory(number))
    assert done >= 20
    await until(lambda: pool.stats().free == 4, "the slots of the cancelled ones back")
    status = await next(iter(pool.links.values())).client.status()
    assert (status.free, status.room.memory_mib, status.leased) == (4, 384, 0)
    held = [await pool.acquire(f"p{n}") for n in range(4)]
    for slot in held:
        assert (await slot.exec(take(144), timeout_s=60 * SLOWNESS)).limit == "memory"
        await slot.release()
