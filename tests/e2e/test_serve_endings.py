"""`serve` in every ending: a signal, an inference server or a trajectory API that is gone; and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

from examples.policy.tokenizer import FOLDER
from examples.serve.processes import Trainer, flags, run_api
from tests.e2e.test_demo_endings import GONE_S, ROOT, SLACK_S, alive, children, left_by
from tests.engines import BACKENDS, containers

SCRIPT = ROOT / "tests" / "e2e" / "script_env.py"


class Running:
    """A program, and every process that it ever had."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ever: set[int] = set()
        self.output = asyncio.create_task(process.stdout.read())

    def look(self) -> None:
        self.ever |= children(self.process.pid)

    async def ended(self, number: int | None = None, *, within_s: float = GONE_S + SLACK_S) -> str:
        """Its output, when it and all of its processes are gone."""
        self.look()
        if number is not None:
            self.process.send_signal(number)
        async with asyncio.timeout(within_s):
            await self.process.wait()
            while alive(self.ever):  # noqa: ASYNC110 (the kernel tells nobody of grandchildren)
                await asyncio.sleep(0.05)
        assert left_by(self.process.pid) == []
        return (await self.output).decode()


@contextlib.asynccontextmanager
async def running(*argv: str):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def serving(api: str, base_url: str) -> list[str]:
    env = {
        "tool_pool_mode": "local",
        "tokenizer_name": FOLDER,
        "rollout_server_url": api,
        "slots_per_container": 4,
        "max_containers": 1,
        "slot_memory_mib": 128,
        "allow_network": "false",
        "use_wandb": "false",
    }
    model = {"base_url": base_url, "server_type": "vllm", "model_name": "m"}
    return [str(SCRIPT), "serve", *flags("env", env), *flags("openai", model)]


async def test_serve_ends_whatever_goes_first_and_leaves_nothing(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        policy = await stack.enter_async_context(running("-m", "examples.policy", "--delay=0.05"))
        policy.output.cancel()
        await asyncio.gather(policy.output, return_exceptions=True)
        base_url = json.loads(await policy.process.stdout.readline())["base_url"]
        api_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        api = await api_stack.enter_async_context(run_api())
        trainer = await stack.enter_async_context(Trainer(api, batch_size=8))
        envs = [await stack.enter_async_context(running(*serving(api, base_url))) for _ in range(3)]
        seen: set[int] = set()
        async with asyncio.timeout(200):
            async for batch in trainer.batches(*(env.process for env in envs)):
                for env in envs:
                    env.look()
                seen |= {group["env_id"] for group in batch}
                if len(seen) == 3:
                    break
        assert "ended by SIGINT" in await envs[0].ended(signal.SIGINT)
        os.killpg(policy.process.pid, signal.SIGKILL)
        await asyncio.sleep(0.5)
        assert "ended by SIGTERM" in await envs[1].ended(signal.SIGTERM)
        await api_stack.aclose()
        said = await envs[2].ended(within_s=60)
        assert envs[2].process.returncode == 1, said
        assert "rollout_server_url" in said.splitlines()[-1], said
        assert "Traceback" not in said, said


async def test_the_demo_serves_several_envs_to_a_trainer_that_finds_nothing_wrong(tmp_path):
    shared = "docker" in BACKENDS
    job = f"serve-{tmp_path.name}"[:60]
    argv = ["-m", "examples.serve", "--envs=2", f"--out={tmp_path}", f"--job={job}", "--slots=4"]
    argv += ["--tasks=top-words,merge-config", "--backend=docker" if shared else "--backend=local"]
    async with running(*argv, "--batches=2" if shared else "--batches=1000") as demo:
        if not shared:  # then the other ending: Ctrl-C in the middle
            demo.output.cancel()
            await asyncio.gather(demo.output, return_exceptions=True)
            told: dict = {}
            async with asyncio.timeout(200):
                while len(told.get("groups_by_env", ())) < 2:
                    line = await demo.process.stdout.readline()
                    assert line, told
                    demo.look()
                    told = json.loads(line) if line.startswith(b"{") else told
            demo.output = asyncio.create_task(demo.process.stdout.read())
            said = await demo.ended(signal.SIGINT, within_s=2 * (GONE_S + SLACK_S))
            assert demo.process.returncode == 130, said
        else:
            said = await demo.ended(within_s=250)
            assert demo.process.returncode == 0, said
            told = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
            assert containers(job) == []
    assert told["wrong"] == []
    assert set(told["groups_by_env"]) == {"0", "1"}
    assert told["sequences"] == 4 * told["groups"]
