"""`serve` against a real vLLM: what a trainer fetches from atroposlib's run-api is what the server sampled."""

from __future__ import annotations

import asyncio
import json

import pytest

from atropos.aio import cancel_and_wait
from examples.serve.processes import Trainer, run_api
from tests.inference.envs import ENVS, make
from tests.inference.exactness import COUNTS, assert_each_token_has_a_version, assert_exact, assert_logprobs
from tests.inference.servers import CACHE

pytestmark = [
    pytest.mark.skipif(not CACHE.name, reason="needs real inference servers: make test-inference"),
    pytest.mark.timeout(3600),
]
BATCHES = 3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", ENVS)
async def test_trainers_get_the_sampled(processed, tmp_path, name, temperature):
    path = tmp_path / "fetched.jsonl"
    settings = {"agent_temperature": temperature, "max_token_length": 2000}
    async with run_api() as api, Trainer(api.url, batch_size=16) as trainer:
        env = make(name, processed.url, tmp_path / "g.jsonl", groups=99, rollout_server_url=api.url, **settings)
        serving = asyncio.create_task(env.env_manager())
        fetched = []
        while len(fetched) < BATCHES:
            assert not serving.done(), serving.exception()
            if batch := await trainer.batch():
                fetched.append(batch)
            else:
                await asyncio.sleep(0.1)
        await cancel_and_wait([serving])
    path.write_text("".join(json.dumps(group) + "\n" for batch in fetched for group in batch))
    compared = assert_logprobs(path)
    assert assert_exact(path, processed) == compared
    assert_each_token_has_a_version(path)
    COUNTS[f"{name}, serve, temperature {temperature}"] = compared
