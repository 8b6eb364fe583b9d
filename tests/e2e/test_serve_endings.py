"""`serve` for real, with the tokens of its batches compared with the server's log, and in every ending: a signal, an
inference server or a trajectory API that is gone; and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

from examples.policy.tokenizer import FOLDER
from examples.policy.truth import Truth
from examples.serve.processes import Trainer, flags, run_api
from tests.e2e.hermes_support import sampled
from tests.e2e.test_demo_endings import GONE_S, ROOT, SLACK_S, left_by
from tests.engines import BACKENDS, containers
from tests.processes import alive, descendants

SCRIPT = ROOT / "tests" / "e2e" / "script_env.py"


class Running:
    """A program, what it has said, and every process that it ever had and that has not been seen to end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ever: set[int] = set()
        self._said = bytearray()
        self.reader = asyncio.create_task(self._read())

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")

    async def _read(self) -> None:
        while chunk := await self.process.stdout.read(65_536):
            self._said += chunk

    def look(self) -> None:
        self.ever = alive(self.ever) | set(descendants(self.process.pid))  # the numbers of the ended are given again

    async def says(self, *words: str, within_s: float = 120) -> str:
        """Wait until all of these have been said; all that was."""
        async with asyncio.timeout(within_s):
            while not all(word in self.said for word in words):
                assert self.process.returncode is None, self.said
                self.look()
                await asyncio.sleep(0.2)
        return self.said

    async def ended(self, number: int | None = None, *, within_s: float = GONE_S + SLACK_S) -> str:
        """All that it said, when it and all of its processes are gone."""
        self.look()
        if number is not None:
            self.process.send_signal(number)
        began = time.monotonic()
        async with asyncio.timeout(within_s):
            await self.process.wait()
            while alive(self.ever):  # noqa: ASYNC110 (the kernel tells nobody of grandchildren)
                await asyncio.sleep(0.05)
        print(f"{signal.Signals(number).name if number else 'by itself'}: gone after {time.monotonic() - began:.2f} s")
        assert left_by(self.process.pid, killed=number == signal.SIGKILL) == []
        await self.reader
        return self.said


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


def check(batch: list[dict], log: Truth) -> None:
    """Its groups are whole, and exactly what was sampled."""
    assert [len(group["tokens"]) for group in batch] == [4, 4]
    for group in batch:
        assert sorted(group["scores"]) == [0.0, 0.0, 1.0, 1.0]
        assert group["group_overrides"] == {}
        for index in range(4):
            runs = sampled(group, index)
            assert len(runs) == 2
            assert all(run in log for run in runs)


async def test_serve_leaves_nothing(tmp_path):
    truth = tmp_path / "truth.jsonl"
    log = Truth(truth)
    async with contextlib.AsyncExitStack() as stack:
        # slow, as each of the envs works on while it is waited for others
        policy = await stack.enter_async_context(running("-m", "examples.policy", "--delay=0.3", f"--log={truth}"))
        base_url = json.loads(await policy.says("\n"))["base_url"]
        api_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        api = await api_stack.enter_async_context(run_api())
        trainer = await stack.enter_async_context(Trainer(api.url, batch_size=8))
        envs = [await stack.enter_async_context(running(*serving(api.url, base_url))) for _ in range(3)]
        seen: set[int] = set()
        async with asyncio.timeout(200):
            async for batch in trainer.batches(*(env.process for env in envs)):
                for env in envs:
                    env.look()
                check(batch, log)
                seen |= {group["env_id"] for group in batch}
                if len(seen) == 3:
                    break
        assert "ended by SIGINT" in await envs[0].ended(signal.SIGINT)
        os.killpg(policy.process.pid, signal.SIGKILL)
        await envs[1].says(f"the inference server at {base_url} doesn't answer; calls wait for it")
        said = await envs[1].ended(signal.SIGTERM)
        assert "ended by SIGTERM" in said and "Traceback" not in said, said
        assert envs[1].process.returncode == 128 + signal.SIGTERM
        await api_stack.aclose()
        said = await envs[2].ended(within_s=60)
        assert envs[2].process.returncode == 1, said
        assert "rollout_server_url" in said.splitlines()[-1], said
        assert "Traceback" not in said, said


async def test_env_outlives_its_trainer(tmp_path):
    truth = tmp_path / "truth.jsonl"
    async with contextlib.AsyncExitStack() as stack:
        policy = await stack.enter_async_context(running("-m", "examples.policy", "--delay=0.05", f"--log={truth}"))
        base_url = json.loads(await policy.says("\n"))["base_url"]
        api = await stack.enter_async_context(run_api())
        argv = ("-m", "examples.serve.trainer", f"--api={api.url}", f"--truth={truth}")
        forever = (*argv, "--batches=100000")
        trainer = await stack.enter_async_context(running(*forever))
        await trainer.says("registered")
        env, other = [await stack.enter_async_context(running(*serving(api.url, base_url))) for _ in range(2)]
        async with asyncio.timeout(200):
            while len(last(trainer.said)["groups_by_env"]) < 2:
                assert {program.process.returncode for program in (trainer, env, other)} == {None}, (
                    trainer.said + env.said
                )
                other.look()
                await asyncio.sleep(0.2)

        await other.ended(signal.SIGKILL)  # an env: its sandboxes go with it, and the others go on
        had = last(trainer.said)["batches"]
        async with asyncio.timeout(60):
            while last(trainer.said)["batches"] < had + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        await trainer.ended(signal.SIGKILL)  # the trainer: the env says that it waits, and for whom
        said = await env.says("no trainer has fetched a batch")
        assert api.url in said
        again = await stack.enter_async_context(running(*argv, "--batches=3"))
        told = last(await again.ended(within_s=60))
        assert (again.process.returncode, told["wrong"], told["batches"]) == (0, [], 3)
        await env.says("the trainer fetches batches again")

        third = await stack.enter_async_context(running(*forever))
        await third.says("sequences")
        api.process.kill()  # run-api: everyone ends, each with one line
        for program in (env, third):
            said = await program.ended(within_s=60)
            assert program.process.returncode == 1, said
            assert f"the trajectory API at {api.url} is gone" in said.splitlines()[-1], said
            assert "Traceback" not in said, said


def last(said: str) -> dict:
    """The newest whole line of JSON that a trainer has printed, with nothing in it before the first."""
    lines = [line for line in said[: said.rfind("\n") + 1].splitlines() if line.startswith('{"batches"')]
    return json.loads(lines[-1]) if lines else {"groups_by_env": {}, "batches": 0}


async def test_demo_serves_several_envs(tmp_path):
    shared = "docker" in BACKENDS
    job = f"serve-{tmp_path.name}"[:60]
    argv = ["-m", "examples.serve", "--envs=2", f"--out={tmp_path}", f"--job={job}", "--slots=4"]
    argv += ["--tasks=top-words,merge-config", "--backend=docker" if shared else "--backend=local"]
    async with running(*argv, "--batches=2" if shared else "--batches=1000") as demo:
        if not shared:  # then the other ending: Ctrl-C in the middle
            async with asyncio.timeout(200):
                while len(last(demo.said)["groups_by_env"]) < 2:
                    assert demo.process.returncode is None, demo.said
                    demo.look()
                    await asyncio.sleep(0.2)
            told = last(demo.said)
            said = await demo.ended(signal.SIGINT, within_s=2 * (GONE_S + SLACK_S))
            assert demo.process.returncode == 130, said
        else:
            said = await demo.ended(within_s=250)
            assert demo.process.returncode == 0, said
            told = last(said)
            assert containers(job) == []
    assert told["wrong"] == []
    assert set(told["groups_by_env"]) == {"0", "1"}
    assert told["sequences"] == 4 * told["groups"]
