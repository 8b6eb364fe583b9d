"""Stock `vllm serve` with the tiny model: every logprob is what float32 gives for its token, every token what the
server's log says.

vLLM 0.32 logs the tokens of `/inference/v1/generate` alone; in the other API the logprobs tell tokens that were not
sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from dataclasses import replace

import pytest

from atropos.aio import set_within
from atropos.envs.inference import apis, server
from atropos.envs.reporting import watch
from atropos.errors import ConfigError, InferenceError
from tests.inference.envs import ENVS, Agent, make
from tests.inference.exactness import (
    COUNTS,
    assert_agents_act,
    assert_each_token_has_a_version,
    assert_exact,
    assert_logprobs,
    groups_of,
)
from tests.inference.servers import CACHE, vllm
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(not CACHE.name, reason="needs real inference servers: make test-inference"),
    pytest.mark.timeout(3600),
]
TOKENS = int(os.environ.get("ATROPOS_INFERENCE_TOKENS", "13000"))
"""Sampled tokens that are compared for each env, API and temperature; a trajectory has some 170."""
APIS = {"completions": apis.VllmCompletions(), "generate": apis.VllmGenerate()}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """`vllm serve MODEL`."""
    with vllm(tmp_path_factory.mktemp("stock") / "log") as running:
        yield running


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ENVS)
async def test_tokens_are_the_servers(processed, tmp_path, monkeypatch, name, api, temperature):
    monkeypatch.setitem(server.APIS, "vllm", (APIS[api],))
    path = tmp_path / "g.jsonl"
    settings = {"agent_temperature": temperature, "max_token_length": 2000}
    await make(name, processed.url, path, groups=-(-TOKENS // (4 * 170)), **settings).process_manager()
    compared = assert_logprobs(path)
    assert compared > TOKENS / 2
    assert api != "generate" or assert_exact(path, processed) == compared
    parameters = [group["generation_params"] for group in groups_of(path)]
    assert parameters == [{"temperature": temperature, "logprobs": "policy"}] * len(parameters)
    assert_agents_act(path)
    COUNTS[f"{name}, {api}, temperature {temperature}"] = compared


UPDATES = {
    "abort": ["/abort_requests"],
    "pause=abort": ["/pause?mode=abort", "/update_weight_version", "/resume"],
    "pause=keep": ["/pause?mode=keep", "/update_weight_version", "/resume"],
    "pause=wait": ["/pause?mode=wait", "/update_weight_version", "/resume"],
    "sleep": ["/sleep?level=1", "/update_weight_version", "/wake_up"],
}
"""What a trainer does to a server, again and again, while trajectories run."""


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize("name", ENVS)
async def test_trajectories_go_on(processed, tmp_path, monkeypatch, name, how, api):
    monkeypatch.setitem(server.APIS, "vllm", (APIS[api],))
    path, done = tmp_path / "g.jsonl", asyncio.Event()
    env = make(name, processed.url, path, groups=4, agent_temperature=0.7, max_token_length=2000)

    async def update() -> int:
        pending = env.server.servers[0].inference.pending
        await until(lambda: (env.backend.running and pending.silence()[0]) or done.is_set(), "a turn is asked for")
        for count in itertools.count():
            for step in UPDATES[how]:
                await asyncio.to_thread(processed.post, step, {"new_version": f"v{count}"})
            if await set_within(done, random.uniform(0.1, 1)):
                return count + 1
        raise AssertionError

    updating = asyncio.create_task(update())
    try:
        await env.process_manager()
    finally:
        done.set()
        updates = await updating
    assert {facts["attempts"] for group in groups_of(path) for facts in group["atropos"]["trajectories"]} == {1}
    compared = assert_logprobs(path)
    if api == "generate":
        assert assert_exact(path, processed) == compared
        assert_each_token_has_a_version(path)
    COUNTS[f"{name}, {api}, {updates} x {how}"] = compared


async def test_pause_is_not_agents_time(processed, tmp_path, monkeypatch, caplog):
    config = Agent.build_agent_config
    monkeypatch.setattr(Agent, "build_agent_config", lambda self, item: replace(config(self, item), timeout_s=10))
    monkeypatch.setattr(watch, "SILENT_S", 5.0)
    path = tmp_path / "g.jsonl"
    env = make("agent", processed.url, path, groups=1, agent_temperature=0.7, max_token_length=2000)
    running = asyncio.create_task(env.process_manager())
    pending = env.server.servers[0].inference.pending
    await until(lambda: env.backend.running and pending.silence()[0] == 4, "turns are asked for")
    await asyncio.to_thread(processed.post, "/pause?mode=keep")
    await until(lambda: " is paused or asleep; each call waits" in caplog.text, "the log says that it is paused")
    await asyncio.sleep(15)
    await asyncio.to_thread(processed.post, "/resume")
    await running
    [group] = groups_of(path)
    assert [facts["stop_reason"] for facts in group["atropos"]["trajectories"]] == ["final"] * 4


@pytest.mark.parametrize("name", ENVS)
async def test_one_flag_for_stock_vllm(stock, tmp_path, name):
    path = tmp_path / "g.jsonl"
    env = make(name, stock.url, path, groups=2, agent_temperature=1.0)
    await env.process_manager()
    assert env.context_tokens == 4096
    assert assert_logprobs(path)


@pytest.mark.parametrize("name", ENVS)
async def test_atroposlib_is_exact(own, tmp_path, name):
    path = tmp_path / "g.jsonl"
    env = make(name, own.url, path, groups=4, agent_temperature=1.0, max_token_length=4000)
    await env.process_manager()
    assert isinstance(env.server.servers[0].inference.api, apis.AtroposlibGenerate)
    assert {group["generation_params"]["logprobs"] for group in groups_of(path)} == {"raw"}
    COUNTS[f"{name}, atroposlib's server"] = assert_logprobs(path)
    assert_agents_act(path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"agent_temperature": 0.7}, r"env\.agent_temperature: 0\.7, but .*processed_logprobs"),
        ({"max_token_length": 5000}, r"env\.max_token_length: 5000 is more than .* 4096"),
        ({"model": "nope"}, r"openai\.model_name: the server has no model 'nope'; it serves tiny"),
    ],
)
async def test_wrong_setting_ends_start(stock, tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        await make("agent", stock.url, tmp_path / "g.jsonl", groups=1, **settings).process_manager()


async def test_wrong_type_ends_start(stock, tmp_path):
    with pytest.raises(InferenceError, match="sglang means"):
        await make("agent", stock.url, tmp_path / "g.jsonl", groups=1, server_type="sglang").process_manager()


async def test_raw_logprobs_are_named(stock, tmp_path):
    path = tmp_path / "g.jsonl"
    settings = {"agent_temperature": 0.7, "allow_raw_logprobs": True}
    await make("agent", stock.url, path, groups=2, **settings).process_manager()
    assert {group["generation_params"]["logprobs"] for group in groups_of(path)} == {"raw"}
    assert_logprobs(path)
