"""Stock `vllm serve` with the tiny model: every logprob is what float32 gives for its token, every token what the server's log says.

vLLM 0.32 logs the tokens of `/inference/v1/generate` alone; in the other API the logprobs tell tokens that were not sampled.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from atropos.envs.inference import apis, server
from atropos.errors import ConfigError, InferenceError
from tests.e2e.hermes_support import sampled
from tests.inference.envs import ENVS, make
from tests.inference.servers import CACHE, vllm

pytestmark = [
    pytest.mark.skipif(not CACHE.name, reason="needs real inference servers: make test-inference"),
    pytest.mark.timeout(3600),
]
TOKENS = int(os.environ.get("ATROPOS_INFERENCE_TOKENS", "6000"))
"""Sampled tokens that are compared for each env, API and temperature; a trajectory has some 170."""
APIS = {"completions": apis.VllmCompletions(), "generate": apis.VllmGenerate()}


@pytest.fixture(scope="module")
def processed(tmp_path_factory):
    """A server that reports the logprobs of the policy that samples, in both of its APIs."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm(log, "--logprobs-mode", "processed_logprobs", "--enable-scale-out") as running:
        yield running


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """`vllm serve MODEL`."""
    with vllm(tmp_path_factory.mktemp("stock") / "log") as running:
        yield running


def groups_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_exact(path, running) -> int:
    """The sampled tokens of all groups, each of which is in the server's log under exactly its prompt."""
    log, count = running.sampled(), 0
    for group in groups_of(path):
        for index in range(len(group["tokens"])):
            for prompt, ids, _ in sampled(group, index):
                assert (prompt, ids) in log
                count += len(ids)
    return count


def assert_logprobs(path) -> int:
    argv = [CACHE / "venv/bin/python", "tests/inference/recompute.py", CACHE / "model", path]
    found = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    assert found["worst"] < 1e-4
    return found["tokens"]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ENVS)
async def test_tokens_and_logprobs_are_the_servers(processed, tmp_path, monkeypatch, name, api, temperature):
    monkeypatch.setitem(server.APIS, "vllm", (APIS[api],))
    path = tmp_path / "g.jsonl"
    settings = {"agent_temperature": temperature, "max_token_length": 2000}
    await make(name, processed.url, path, groups=-(-TOKENS // (4 * 170)), **settings).process_manager()
    compared = assert_logprobs(path)
    assert compared > TOKENS / 4
    assert api != "generate" or assert_exact(path, processed) == compared
    parameters = [group["generation_params"] for group in groups_of(path)]
    assert parameters == [{"temperature": temperature, "logprobs": "policy"}] * len(parameters)
    turns = [facts["steps"] for group in groups_of(path) for facts in group["atropos"]["trajectories"]]
    assert max(turns) > 1


@pytest.mark.parametrize("name", ENVS)
async def test_one_flag_is_enough_for_stock_vllm_at_temperature_1(stock, tmp_path, name):
    path = tmp_path / "g.jsonl"
    env = make(name, stock.url, path, groups=2, agent_temperature=1.0)
    await env.process_manager()
    assert env.context_tokens == 4096
    assert assert_logprobs(path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"agent_temperature": 0.7}, r"env\.agent_temperature: 0\.7, but .*processed_logprobs"),
        ({"max_token_length": 5000}, r"env\.max_token_length: 5000 is more than .* 4096"),
        ({"model": "nope"}, r"openai\.model_name: the server has no model 'nope'; it serves tiny"),
    ],
)
async def test_a_wrong_setting_ends_at_the_start(stock, tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        await make("agent", stock.url, tmp_path / "g.jsonl", groups=1, **settings).process_manager()


async def test_the_wrong_type_of_server_ends_at_the_start(stock, tmp_path):
    with pytest.raises(InferenceError, match="sglang means"):
        await make("agent", stock.url, tmp_path / "g.jsonl", groups=1, server_type="sglang").process_manager()


async def test_raw_logprobs_are_named_where_they_are_allowed(stock, tmp_path):
    path = tmp_path / "g.jsonl"
    settings = {"agent_temperature": 0.7, "allow_raw_logprobs": True}
    await make("agent", stock.url, path, groups=2, **settings).process_manager()
    assert {group["generation_params"]["logprobs"] for group in groups_of(path)} == {"raw"}
    assert_logprobs(path)
