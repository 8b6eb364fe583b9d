"""Cancelled at any step, what stands on snapshots leaves no slot and no snapshot."""

from __future__ import annotations

import asyncio

import pytest

from atropos.envs.hermes.tool_context import ToolContext
from atropos.tools import ToolExecutor, build_tool_registry
from tests.unit.envs.support import ScriptEnv, StandInExecutor, make
from tests.unit.tools.fakes import FakePool

pytestmark = pytest.mark.waits


class SlowExecutor(StandInExecutor):
    """Forks and releases take a while, as they do; releases outlive cancellation."""

    async def release_trajectory(self, trajectory_id, reset_workspace=True):
        if trajectory_id in self.live:
            await asyncio.shield(asyncio.create_task(self.end(trajectory_id)))

    async def end(self, trajectory_id):
        await asyncio.sleep(0)
        await super().release_trajectory(trajectory_id)

    async def start_from(self, trajectory_id, snapshot):
        await asyncio.sleep(0)
        return await super().start_from(trajectory_id, snapshot)


async def cancelled_at_every_step(work):
    """Run it again and again, cancelled one step of the loop later each time, until it gets to its end."""
    for steps in range(100):
        task = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            assert steps > 5
            return task.result()
    raise AssertionError("it never ends")


async def test_cancelled_group_is_tidy():
    class Env(ScriptEnv):
        async def setup_group_workspace(self, item, *, exec_tool):
            await asyncio.sleep(0)

    env = make(Env, "http://127.0.0.1:9", None)
    env.backend.executor = executor = SlowExecutor(None)
    number = 0

    async def prepare():
        nonlocal number
        number += 1
        return await env.prepare_group({}, f"group-{number}")

    whole = await cancelled_at_every_step(prepare)
    assert [snapshot for snapshot in executor.snapshots if not snapshot.dropped] == [whole]


async def test_cancelled_fork_no_slot():
    pool = FakePool()
    free = pool.free
    async with ToolExecutor(pool, build_tool_registry(["default"])) as executor:

        async def fork():
            context = ToolContext(executor, "t")
            try:
                async with context.fork():
                    pass
                return (await executor.slot("t")).options["snapshot"]
            finally:
                await executor.release_trajectory("t")

        started_from = await cancelled_at_every_step(fork)
    assert pool.free == free
    assert started_from is pool.snapshots[-1]
    assert all(snapshot.dropped for snapshot in pool.snapshots)
