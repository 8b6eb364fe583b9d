"""Limits that are reached while several commands of one slot run: each result says what is true of its own command."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from tests import privileges
from tests.backends import Engine
from tests.limits.test_limits import HIT
from tests.waiting import SLOWNESS

needs_cgroups = privileges.cgroups
pytestmark = pytest.mark.asyncio(loop_scope="module")
WAITS = "> go{0}; until [ -e over ]; do sleep 0.05; done; exit {0}"
FILL = """
import os, sys, time
try:
    while os.fork(): pass
    os.setsid()
except BlockingIOError:
    open("full", "w").close()
    sys.exit(1)
time.sleep(1000)
"""
HOLD = FILL.replace("os.setsid()", "pass").replace("sys.exit(1)", "pass")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    engine = Engine("local")
    limits = {"memory_mib": 128, "pids": 40, "open_files": 128, "wall_s": 60 * SLOWNESS}
    config = engine.config(slots_per_container=2, max_containers=1, limits=limits)
    async with SlotPool(config) as pool:
        yield pool
        assert pool.stats().retired == 0, repr(pool)
    assert await engine.residue(config) == []


@pytest_asyncio.fixture(loop_scope="module")
async def slot(pool):
    async with pool.lease("t") as slot:
        yield slot


async def until_there(slot, name: str) -> None:
    async with asyncio.timeout(30 * SLOWNESS):
        while True:
            try:
                await slot.read_file(name)
            except FileNotFoundError:
                await asyncio.sleep(0.02)
            else:
                return


@needs_cgroups
async def test_running_commands_keep_their_room(slot):
    agent = asyncio.create_task(slot.exec(WAITS.format(0), concurrent=True))
    await until_there(slot, "go0")
    bomb = await slot.exec(["python3", "-c", FILL], concurrent=True)
    after = await slot.exec("echo usable | cat", concurrent=True)
    assert (bomb.limit, after.output) == ("pids", "usable\n"), (bomb, after)
    await slot.write_file("over", "")
    result = await agent
    assert (result.exit_code, result.limit) == (0, None), result


@needs_cgroups
async def test_commands_without_room_end_at_once(slot):
    """The runner tried each start for 5 s, in which it answered nothing: the slot was taken for dead."""
    hog = asyncio.create_task(slot.exec(["python3", "-c", HOLD], concurrent=True))
    await until_there(slot, "full")
    for result in await asyncio.gather(*(slot.exec("true", timeout_s=1 * SLOWNESS, concurrent=True) for _ in range(8))):
        assert (result.exit_code, result.limit) == (None, "pids"), result
    hog.cancel()
    await asyncio.gather(hog, return_exceptions=True)
    assert (await slot.exec("echo usable")).output == "usable\n"


@needs_cgroups
async def test_limit_named_where_hit(slot):
    beside = [asyncio.create_task(slot.exec(WAITS.format(n), concurrent=True)) for n in range(2)]
    for n in range(2):
        await until_there(slot, f"go{n}")
    result = await slot.exec(HIT["memory"], concurrent=True)
    assert (result.exit_code, result.limit) == (-9, "memory"), result
    await slot.write_file("over", "")
    assert [(each.exit_code, each.limit) for each in await asyncio.gather(*beside)] == [(0, None), (1, None)]
