"""`serve` for real: run-api, an env on real slots, and a trainer that compares its batches with the server's log."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE
from pathlib import Path

from examples.policy.tokenizer import FOLDER
from examples.policy.truth import Truth
from examples.serve.processes import Trainer, flags, program, run_api
from tests.e2e.hermes_support import sampled

SCRIPT = Path(__file__).with_name("script_env.py")


async def test_groups_exact_and_whole(tmp_path):
    truth = tmp_path / "truth.jsonl"
    async with (
        run_api() as api,
        program("-m", "examples.policy", "--log", str(truth), output=PIPE) as policy,
        Trainer(api.url, batch_size=8) as trainer,
    ):
        assert policy.stdout is not None
        ready = json.loads(await policy.stdout.readline())
        settings = {
            "tool_pool_mode": "local",
            "tokenizer_name": FOLDER,
            "rollout_server_url": api.url,
            "slots_per_container": 8,
            "max_containers": 1,
            "use_wandb": "false",
            "include_messages": "true",
        }
        model = {"base_url": ready["base_url"], "server_type": "vllm"}
        argv = (str(SCRIPT), "serve", *flags("env", settings), *flags("openai", model))
        async with program(*argv, output=PIPE) as env:
            assert env.stdout is not None
            output, taken = asyncio.create_task(env.stdout.read()), []
            try:
                async with asyncio.timeout(90):
                    async for batch in trainer.batches(env):
                        taken.append(batch)
                        if len(taken) == 3:
                            break
            except (TimeoutError, RuntimeError):
                if env.returncode is None:
                    env.terminate()
                raise AssertionError((await output).decode()) from None
            env.terminate()
            async with asyncio.timeout(60):
                assert await env.wait() == 128 + signal.SIGTERM, (await output).decode()
            assert b"Traceback" not in await output, (await output).decode()
    log = Truth(truth)
    for batch in taken:
        assert [len(group["tokens"]) for group in batch] == [4, 4]
        for group in batch:
            assert sorted(group["scores"]) == [0.0, 0.0, 1.0, 1.0]
            assert group["group_overrides"] == {}
            for index in range(4):
                runs = sampled(group, index)
                assert len(runs) == 2
                assert all(run in log for run in runs)
