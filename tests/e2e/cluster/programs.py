"""Env programs as users start them, on a job of the cluster, and what they wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from examples.policy.tokenizer import FOLDER
from tests.engines import ROOT

FLAGS = {
    "tool_pool_mode": "nomad",
    "tokenizer_name": str(FOLDER),
    "slots_per_container": "2",
    "min_containers": "2",
    "max_containers": "2",
    "slot_memory_mib": "192",
    "slot_pids": "64",
    "acquire_timeout_s": "120",
    "trajectory_retries": "8",
    "group_size": "2",
    "total_steps": "-1",
    "allow_network": "false",
    "ensure_scores_are_not_same": "false",
    "use_wandb": "false",
    "lease_ttl_s": "3",
}


class EnvProgram:
    """One run of `slow_env.py process`."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process = process
        self.path = path
        self.until = path.with_suffix(".until")
        self._output = asyncio.create_task(process.stdout.read() if process.stdout else asyncio.sleep(0, b""))

    def groups(self) -> list[dict[str, Any]]:
        """What it has written so far, whole lines only."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async def until_groups(self, count: int) -> None:
        """Until so many groups are written."""
        async with asyncio.timeout(180):
            while len(self.groups()) < count:
                assert self.process.returncode is None, (await self._output).decode()[-4000:]
                await asyncio.sleep(0.05)

    async def ends_well(self) -> None:
        """Told to end, it does with exit code 0, and every group that it began is there with the right scores."""
        assert self.process.returncode is None, (await self._output).decode()[-4000:]
        self.until.touch()
        async with asyncio.timeout(240):
            output = (await self._output).decode()
            assert await self.process.wait() == 0, output[-4000:]
        found = self.groups()
        assert sorted(group["atropos"]["item"] for group in found) == sorted(f"item-{n}" for n in range(len(found)))
        for group in found:
            assert group["scores"] == [1.0, 0.0], (group["atropos"]["item"], group["scores"])

    async def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        assert await self.process.wait() == -signal.SIGKILL


@contextlib.asynccontextmanager
async def env_program(
    cluster: Any, job_id: str, policy: str, path: Path, *, work_s: float = 0.2, **flags: str
) -> AsyncIterator[EnvProgram]:
    """Start one that goes on until `ends_well`; it is killed if it still runs at the end."""
    settings = FLAGS | {
        "nomad_address": cluster.url,
        "sandbox_job_id": job_id,
        "data_path_to_save_groups": str(path),
        **flags,
    }
    words = [f"--env.{name}={value}" for name, value in settings.items()]
    words += ["--openai.base_url", policy, "--openai.server_type", "vllm", "--openai.api_key", "x"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("slow_env.py")),
        "process",
        *words,
        cwd=ROOT,
        env=os.environ | {"UNTIL": str(path.with_suffix(".until")), "WORK_S": str(work_s)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield EnvProgram(process, path)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
