"""Slots as sandboxes of Tinker's cookbook, by its own package: `make test-trainers`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tinker_cookbook.recipes.harbor_rl import harbor_env
from tinker_cookbook.sandbox import SandboxInterface, SandboxTerminatedError
from transformers import AutoTokenizer

from atropos.adapters.tinker_cookbook import AtroposDatasetBuilder, AtroposSandboxes
from atropos.errors import ConfigError
from examples.policy.tokenizer import FOLDER
from tests.adapters.hosts.accident import kill_container
from tests.files import write_files

POOL = {"backend": "local", "slots_per_container": 3, "max_containers": 1}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    files = {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Say it.",
        "environment/Dockerfile": "FROM debian:13\nENV WORD=said\nWORKDIR /app\nRUN echo built > note\n",
        "tests/test.sh": "#!/bin/sh\ngrep -q said /app/answer && echo 1 > /logs/verifier/reward.txt\n",
    }
    return write_files(tmp_path / "one", files)


async def test_sandbox_has_its_tasks_image(task: Path):
    sandbox = await AtroposSandboxes(pool=POOL)(task / "environment", 600)
    try:
        assert isinstance(sandbox, SandboxInterface)
        result = await sandbox.run_command("pwd; cat note; echo $WORD; echo no >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == ("/app\nbuilt\nsaid\n", "no\n", 3)
        assert (await sandbox.run_command("seq 100000", max_output_bytes=10)).stdout == "1\n2\n3\n4\n5\n"
        late = await sandbox.run_command("echo begun; sleep 60", timeout=1)
        assert (late.stdout, late.exit_code) == ("begun\n", -1)
        assert (await sandbox.write_file("/deep/er/run", "echo ran", executable=True)).exit_code == 0
        assert (await sandbox.run_command("/bin/sh -c /deep/er/run", workdir="/")).stdout == "ran\n"
        assert (await sandbox.read_file("/deep/er/run", max_bytes=4)).stdout == "echo"
        missing = await sandbox.read_file("/missing")
        assert (missing.exit_code, missing.stderr) == (1, "No such file or directory: /missing\n")
    finally:
        await sandbox.cleanup()
        await sandbox.cleanup()
    with pytest.raises(SandboxTerminatedError):
        await sandbox.run_command("true")


async def test_tasks_gpus_are_asked_for(task: Path):
    (task / "task.toml").write_text('version = "1.0"\n[environment]\ngpus = 1\n')
    with pytest.raises(ConfigError, match=r"gpus: 1 wanted, a container has 0; set gpus"):
        await AtroposSandboxes(pool=POOL)(task / "environment", 600)


async def test_lost_sandbox_no_reward(task: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    monkeypatch.setattr(harbor_env.tokenizer_utils, "get_tokenizer", lambda _: tokenizer)
    tasks = [harbor_env.HarborTask("one", "Say it.", task)]
    factory = AtroposSandboxes(pool={**POOL, "slots_per_container": 2})
    builder = AtroposDatasetBuilder(
        tasks=tasks, batch_size=1, group_size=2, model_name="none", renderer_name="qwen3", sandbox_factory=factory
    )
    dataset, _ = await builder()
    (group,) = dataset.get_batch(0)
    envs = await group.make_envs()
    try:
        first, second = group._sandboxes
        await first.run_command("echo said > answer")
        grades = [env.message_env.reward_fn for env in envs]
        assert [(await grade([]))[0] for grade in grades] == [1.0, 0.0], "what the tests say"
        grading = asyncio.create_task(grades[0]([]))
        kill_container()
        for grade in (grading, grades[1]([])):
            with pytest.raises(SandboxTerminatedError):
                await grade
        with pytest.raises(SandboxTerminatedError):
            await second.run_command("true")
    finally:
        await group.cleanup()
