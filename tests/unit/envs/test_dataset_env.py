"""A dataset env's order survives a restart, and its evaluation counts every item."""

from __future__ import annotations

import asyncio

import pytest

from atropos.envs import APIServerConfig
from atropos.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atropos.envs.running.rollout import GroupsDropped
from atropos.errors import ConfigError
from examples.policy.tokenizer import FOLDER
from tests.unit.envs.support import ScriptEnv, items
from tests.waiting import until

pytestmark = pytest.mark.waits


class Dataset(DatasetEnv, ScriptEnv):
    name = "dataset"
    get_next_item = DatasetEnv.get_next_item


def make(cls=Dataset, url="http://127.0.0.1:9/v1", **settings):
    config = DatasetEnvConfig(tool_pool_mode="local", tokenizer_name=str(FOLDER), use_wandb=False, **settings)
    env = cls(config, [APIServerConfig(base_url=url, server_type="vllm", model_name=str(FOLDER), api_key="x")])
    env.items = items(5)
    return env


async def names(env, count):
    return [(await env.get_next_item())["name"] for _ in range(count)]


@pytest.mark.parametrize("given", [3, 5, 8])
async def test_restart_at_checkpoint(tmp_path, given):
    def registered():
        env = make(epochs=4, shuffle=True, seed=7)
        env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "dataset_0"
        return env

    first = registered()
    await names(first, given)
    first.save_checkpoint(40)
    later = await names(first, 20 - given)
    again = registered()
    again.curr_step = 40
    again.load_checkpoint()
    assert await names(again, 20 - given) == later
    assert await again.get_next_item() is None


async def test_unfinished_come_first(tmp_path, policy):
    held = asyncio.Event()

    class Env(Dataset):
        async def score_trajectory(self, item, final_response):
            if item["name"] in {"item-0", "item-2"}:
                await held.wait()
            return 1.0

    def started_again():
        env = make(Env, policy.url, batch_size=12)
        env.checkpoint_dir, env.wandb_prepend, env.curr_step = str(tmp_path), "dataset_0", 40
        env.load_checkpoint()
        return env

    first = started_again()
    await first.setup()
    first.status_dict = {"queue_size": 0, "self_queue_size": 0, "max_group_size": 4}
    first.max_num_workers = 3
    await first.add_train_workers()
    await until(lambda: len(first.running_items) == 2, "all but the held items are finished")
    first.save_checkpoint(40)
    held.set()
    await asyncio.gather(*first.workers)
    await first._close()

    second = started_again()
    assert await names(second, 1) == ["item-0"]
    second.save_checkpoint(40)
    assert await names(started_again(), 3) == ["item-2", "item-3", "item-4"]


async def test_unwritten_ends_no_run(tmp_path, caplog):
    env = make()
    (tmp_path / "file").touch()
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path / "file"), "dataset_0"
    env.save_checkpoint(40)
    assert "checkpoint" in caplog.text


async def test_cancelled_hook_evaluated(policy, capsys):
    class Env(Dataset):
        async def score_trajectory(self, item, final_response):
            if item["name"] == "item-1":
                task = asyncio.create_task(asyncio.sleep(9))
                task.cancel()
                await task
            return 1.0

    env = make(Env, policy.url)
    with pytest.raises(GroupsDropped, match="1 of 5 items could not be completed"):
        await env._run_evaluate()
    assert "4 of 4 solved" in capsys.readouterr().out


async def test_config_error_ends_it(policy):
    class Env(Dataset):
        def build_task(self, item):
            raise ConfigError("task_names: wrong")

    with pytest.raises(ConfigError, match="task_names: wrong"):
        await make(Env, policy.url)._run_evaluate()


async def test_evaluation_changes_no_mean_score(policy):
    env = make(url=policy.url)
    async with env.running():
        await env.collect_trajectories({"name": "one letter", "script": ["x"]})
        await env.evaluate()
    assert env.metrics.as_dict()["env/score_mean"] == 1.0
