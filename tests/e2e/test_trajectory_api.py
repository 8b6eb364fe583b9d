"""What atroposlib's own run-api makes of our groups: nothing of them is changed, left behind, or able to stop a
trainer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from atropos.envs.servers import stop_servers
from examples.policy.truth import Truth
from examples.serve.processes import Trainer, run_api
from tests.e2e.hermes_support import running_policy, sampled
from tests.unit.envs.support import ScriptEnv, call, items, make


@pytest.fixture
async def world(tmp_path: Path):
    """run-api with a trainer whose batches have 8 sequences, the policy, and a way to make registered envs."""
    async with contextlib.AsyncExitStack() as stack:
        url, log = await stack.enter_async_context(running_policy(tmp_path))
        api = await stack.enter_async_context(run_api())
        trainer = await stack.enter_async_context(Trainer(api.url, batch_size=8, max_token_len=6000))

        async def env(name: str, **settings: Any) -> Any:
            one = make(ScriptEnv, url, None, rollout_server_url=api.url, wandb_name=name, **settings)
            await one.setup()
            stack.push_async_callback(stop_servers, one.server)
            await one.register_env()
            await one.get_server_info()
            await one.get_status()
            return one

        yield env, trainer, Truth(log)


async def send(env: Any, name: str, **changes: Any) -> dict[str, Any]:
    """One group collected and handed over as a worker does it; as it was collected."""
    item = {**items(1, {"text": "é", "calls": [call("ls")]}, "done")[0], "name": name}
    group, _ = await env.collect_trajectories(item)
    group |= changes
    await env.handle_send_to_api(group, item)
    return group


async def test_shares_of_batch_are_kept(world):
    env, trainer, truth = world
    large = await env("large", group_size=4, min_batch_allocation=0.5, include_messages=True)
    small = await env("small", group_size=2, inference_weight=0.25, seed=1, include_messages=False)
    await large.get_status()
    weights = [one.status_dict["env_weight"] for one in (large, small)]
    await small.get_status()
    assert large.status_dict["env_weight"] == pytest.approx(0.8)
    assert small.status_dict["env_weight"] == pytest.approx(0.2), weights
    sent = [await send(small, f"s{n}") for n in range(4)]
    assert await trainer.batch() is None, "half of each batch is the other env's"
    sent.append(await send(large, "l"))
    batch = await trainer.batch()
    assert sorted(len(group["tokens"]) for group in batch) == [2, 2, 4]
    for group in batch:
        [mine] = [one for one in sent if one["tokens"] == group["tokens"] and one["scores"] == group["scores"]][:1]
        for key in ("masks", "inference_logprobs", "group_overrides", "messages"):
            assert group[key] == mine[key]
        assert "atropos" not in group
        assert (group["messages"] is not None) is (len(group["tokens"]) == 4)
        assert all(run in truth for index in range(len(group["tokens"])) for run in sampled(group, index))


async def test_refused_are_counted(world):
    env, trainer, _ = world
    one = await env("one", group_size=4, ensure_scores_are_not_same=True)
    assert one.context_tokens == 5999
    long = [[7] * 6000] * 4
    await send(one, "same")
    await send(
        one, "long", tokens=long, masks=long, inference_logprobs=[[-1.0] * 6000] * 4, scores=[0.0, 1.0, 1.0, 1.0]
    )
    short = {key: [[1, 2]] * 3 for key in ("tokens", "masks")} | {"inference_logprobs": [[-1.0, -1.0]] * 3}
    await send(one, "short", **short, scores=[0.0, 1.0, 1.0])
    assert one.metrics.unsent == {"same_scores": 1, "too_long": 1, "wrong_size": 1}
    assert one.items_sent_this_step == 0
    odd = [{"role": "user", "content": "half \ud800 a character", "\udfff": ["\ud83e\udd8a", "\ud800"]}]
    one.config.include_messages = True
    for n in range(2):
        await send(one, f"g{n}", scores=[0.0, 1.0, 0.0, 1.0], messages=[odd] * 4)
    assert one.metrics.unsent == {"same_scores": 1, "too_long": 1, "wrong_size": 1}
    batch = await trainer.batch()
    assert [group["scores"] for group in batch] == [[0.0, 1.0, 0.0, 1.0]] * 2
    assert batch[0]["messages"][0] == [{"role": "user", "content": "half ? a character", "?": ["??", "?"]}]
    two = await env("two", group_size=4, server_type="openai", allow_placeholder_tokens=True)
    for n in range(2):
        await send(two, f"p{n}")
    assert [group["group_overrides"] for group in await trainer.batch()] == [{"placeholder_tokens": True}] * 2


async def test_a_restarted_trainer_gets_its_batch(world):
    env, trainer, _ = world
    one = await env("one", group_size=4)
    for name in ("a", "b"):
        await send(one, name)
    async with Trainer(trainer.url, batch_size=8) as again:
        assert len(await again.batch()) == 2
