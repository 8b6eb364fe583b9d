"""`serve` for real: run-api, an env on real slots, and a trainer that compares its batches with the server's log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp

from examples.policy.tokenizer import FOLDER
from examples.policy.truth import Truth
from examples.serve.processes import free_port
from tests.e2e.hermes_support import sampled

ROOT = Path(__file__).resolve().parents[2]


@contextlib.asynccontextmanager
async def program(*argv: str, **options):
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True, **options
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def answer(session: aiohttp.ClientSession, method: str, path: str, **options):
    async with session.request(method, path, **options) as response:
        response.raise_for_status()
        return await response.json()


async def until_up(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await answer(session, "GET", "/")
                return
            await asyncio.sleep(0.1)


async def batches(session: aiohttp.ClientSession, count: int):
    """As a trainer takes them."""
    taken = []
    async with asyncio.timeout(90):
        while len(taken) < count:
            batch = (await answer(session, "GET", "/batch"))["batch"]
            if batch is None:
                await asyncio.sleep(0.1)
            else:
                taken.append(batch)
    return taken


async def test_a_trainer_gets_whole_groups_of_exactly_what_was_sampled(tmp_path):
    port, truth = free_port(), tmp_path / "truth.jsonl"
    api = f"http://127.0.0.1:{port}"
    quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
    async with (
        program("-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port), **quiet),
        program("-m", "examples.policy", "--log", str(truth), stdout=asyncio.subprocess.PIPE) as policy,
        aiohttp.ClientSession(api) as session,
    ):
        ready = json.loads(await policy.stdout.readline())
        await until_up(session)
        trainer = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": 8,
            "max_token_len": 30_000,
            "checkpoint_dir": str(tmp_path),
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 3,
        }
        await answer(session, "POST", "/register", json=trainer)
        await answer(session, "GET", "/batch")
        env_flags = {
            "--env.tool_pool_mode": "local",
            "--env.tokenizer_name": str(FOLDER),
            "--env.rollout_server_url": api,
            "--env.slots_per_container": "8",
            "--env.max_containers": "1",
            "--env.use_wandb": "false",
            "--env.include_messages": "true",
            "--openai.base_url": ready["base_url"],
            "--openai.server_type": "vllm",
        }
        flags = [part for pair in env_flags.items() for part in pair]
        pipe = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        async with program(str(Path(__file__).with_name("script_env.py")), "serve", *flags, **pipe) as env:
            output = asyncio.create_task(env.stdout.read())
            try:
                taken = await batches(session, 3)
            except TimeoutError:
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
