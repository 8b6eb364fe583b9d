"""llama.cpp's server with the tiny model: its ids and logprobs are those of the policy that samples."""

from __future__ import annotations

import pytest

from tests.inference.envs import ENVS, make
from tests.inference.exactness import COUNTS, assert_agents_act, assert_logprobs, groups_of
from tests.inference.servers import CACHE, LLAMA, llama

pytestmark = [
    pytest.mark.skipif(not CACHE.name, reason="needs real inference servers: make test-inference"),
    pytest.mark.skipif(LLAMA is None, reason="needs llama-server in PATH, or ATROPOS_LLAMA_SERVER"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with llama(tmp_path_factory.mktemp("llama") / "log") as server:
        yield server


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", ENVS)
async def test_logprobs_are_the_policys(running, tmp_path, name, temperature):
    path = tmp_path / "g.jsonl"
    env = make(name, running.url, path, groups=8, agent_temperature=temperature)
    await env.process_manager()
    assert env.context_tokens == 4096
    assert {group["generation_params"]["logprobs"] for group in groups_of(path)} == {"policy"}
    COUNTS[f"{name}, llama.cpp, temperature {temperature}"] = assert_logprobs(path)
    assert_agents_act(path)
