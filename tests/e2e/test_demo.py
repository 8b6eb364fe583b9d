"""The demo in containers: the same scores as on this machine itself, and nothing left."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from tests.engines import ROOT, containers, params

TASKS = "fix-permissions,clean-customers"


async def demo(backend: str, out: str) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "examples.demo", "--backend", backend, "--names", TASKS, "--out", out, "--json"]
    command += ["--group-size", "2", "--containers", "1", "--slots", "4"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    report = json.loads(output)
    assert report["dropped"] == {}
    return {name: task["scores"] for name, task in report["tasks"].items()}


@pytest.mark.parametrize("backend", params("nomad"))
async def test_the_demo_scores_the_same_in_containers_as_without(backend, tmp_path):
    there, here = await asyncio.gather(demo(backend, f"{tmp_path}/a"), demo("local", f"{tmp_path}/b"))
    assert there == here
    assert containers("atropos-demo") == []
