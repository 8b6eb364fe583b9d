"""Slots that are retired are missing until their container is replaced: trajectories wait for the others, and no group
is lost."""

from __future__ import annotations

import pytest

from atropos.envs import HermesAgentBaseEnv
from atropos.envs.running.rollout import GroupsDropped
from tests.e2e.hermes_support import call, groups, make, running_policy, script


class ShortEnv(HermesAgentBaseEnv):
    """One slot of its pool is gone, which its admission of trajectories doesn't know."""

    name = "short"

    async def setup(self):
        self.rows = self.load_rows()
        self.gone = await self.pool.acquire("gone")

    async def get_next_item(self):
        return next(self.rows, None)

    async def compute_reward(self, item, result, ctx):
        return 1.0


class PreparedEnv(ShortEnv):
    """Its groups start from a prepared workspace."""

    async def setup_group(self, item, ctx):
        assert ctx.terminal("echo made > made")["exit_code"] == 0


class GreedyEnv(ShortEnv):
    """Its reward functions want a second slot while they hold the first."""

    async def compute_reward(self, item, result, ctx):
        await self.executor.slot(f"{ctx.trajectory_id}-second")
        return 1.0


def rows(seconds: int) -> list[dict[str, str]]:
    return [{"name": "long", "prompt": script({"calls": [call("terminal", command=f"sleep {seconds}")]}, "done")}]


SHORT = {"slots_per_container": 2, "max_containers": 1}


async def test_trajectory_waits(tmp_path):
    async with running_policy(tmp_path) as policy:
        env = make(ShortEnv, policy, tmp_path, rows(6), trajectory_retries=0, acquire_timeout_s=4, **SHORT)
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0, 1.0]]
    assert env.metrics.retries["acquire_timeout"] > 0


async def test_set_up_waits(tmp_path):
    settings = {"group_size": 1, "trajectory_retries": 0, "acquire_timeout_s": 2, "process_concurrency": 2}
    async with running_policy(tmp_path) as policy:
        env = make(PreparedEnv, policy, tmp_path, rows(4) * 3, **settings, **SHORT)
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0]] * 3
    assert env.metrics.retries["acquire_timeout"] > 0


async def test_hook_takes_no_second_slot(tmp_path):
    async with running_policy(tmp_path) as policy:
        env = make(GreedyEnv, policy, tmp_path, rows(0), trajectory_retries=1, acquire_timeout_s=1, **SHORT)
        with pytest.raises(GroupsDropped, match="acquire_timeout"):
            await env.process_manager()
