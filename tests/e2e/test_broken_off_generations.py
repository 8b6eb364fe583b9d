"""A generation that the inference server broke off is no turn of the model: continued or asked for again, never scored.

Real HTTP, in all three protocols and both envs. An inference server aborts what it is generating when weights are
updated; vLLM then answers `abort`, SGLang `{"type": "abort"}`, with what it had so far.
"""

from __future__ import annotations

import pytest

from atropos.envs.config import AgentEnvConfig
from atropos.envs.hermes.config import HermesAgentEnvConfig
from atropos.envs.running.rollout import GroupsDropped
from examples.policy.server import BROKEN_OFF
from examples.policy.truth import Truth
from tests.e2e.hermes_support import call, groups, make, running_policy, sampled, script
from tests.e2e.test_exact_tokens import Agent, Hermes

ENVS = [(Agent, AgentEnvConfig), (Hermes, HermesAgentEnvConfig)]
PROMPT = script({"text": "look", "calls": [call("terminal", command="ls")]}, "it is done, and this is the whole answer")


async def processed(env, count):
    env.rows = [{"name": f"r{n}", "prompt": PROMPT, "max_tokens": None} for n in range(count)]
    env.n_groups_to_process = count
    await env.process_manager()


@pytest.mark.parametrize("fault", BROKEN_OFF)
@pytest.mark.parametrize("server_type", ["vllm", "sglang", "openai"])
@pytest.mark.parametrize(("cls", "config"), ENVS)
async def test_aborted_goes_on(tmp_path, cls, config, server_type, fault):
    settings = {"server_type": server_type, "config_cls": config, "model_retries": 9, "seed": 3}
    async with running_policy(tmp_path, fault=fault, fault_rate=0.3) as policy:
        env = make(cls, policy, tmp_path, [], **settings)
        await processed(env, 1)
    done = groups(tmp_path)
    assert len(done) == 1
    truth = Truth(policy[1])
    for group in done:
        assert [facts["stop_reason"] for facts in group["atropos"]["trajectories"]] == ["final"] * 2
        assert group["scores"] == [len("it is done, and this is the whole answer")] * 2
        if server_type != "openai":  # the log has what was sampled until an abort, and nothing of the other faults
            assert all(run in truth for index in range(2) for run in sampled(group, index))


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
@pytest.mark.parametrize(("cls", "config"), ENVS)
async def test_repeated_aborts_lose_none(tmp_path, cls, config, server_type):
    """As where weights are updated more often than the model ends a turn."""
    settings = {
        "server_type": server_type,
        "config_cls": config,
        "model_retries": 0,
        "trajectory_retries": 0,
        "seed": 3,
    }
    async with running_policy(tmp_path, fault="abort") as policy:
        env = make(cls, policy, tmp_path, [], **settings)
        await processed(env, 1)
    truth, (group,) = Truth(policy[1]), groups(tmp_path)
    assert [facts["attempts"] for facts in group["atropos"]["trajectories"]] == [1, 1]
    assert all(run in truth for index in range(2) for run in sampled(group, index))


@pytest.mark.parametrize(("server_type", "fault"), [("vllm", "error"), ("sglang", "unfinished"), ("openai", "abort")])
@pytest.mark.parametrize(("cls", "config"), ENVS)
async def test_endless_aborts_no_score(tmp_path, monkeypatch, cls, config, server_type, fault):
    settings = {"server_type": server_type, "config_cls": config, "model_retries": 1, "trajectory_retries": 1}
    async with running_policy(tmp_path) as policy:
        env = make(cls, policy, tmp_path, [], **settings, model_timeout_s=2)
        probed = env.setup

        async def setup():
            await probed()
            env.server.servers[0].inference.url = broken[0].removesuffix("/v1")
            env.server.servers[0].openai.base_url = broken[0]

        monkeypatch.setattr(env, "setup", setup)
        async with running_policy(tmp_path, fault=fault) as broken:
            with pytest.raises(GroupsDropped):
                await processed(env, 2)
    assert groups(tmp_path) == []
    assert env.metrics.dropped == {"inference_error": 2}
    assert env.metrics.retries["inference_error"] >= 2
