"""The demo in containers: the same scores as on this machine itself, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile

import pytest

from tests.engines import ROOT, containers, params
from tests.waiting import until

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
async def test_containers_score_the_same(backend, tmp_path):
    there, here = await asyncio.gather(demo(backend, f"{tmp_path}/a"), demo("local", f"{tmp_path}/b"))
    assert there == here
    await until(lambda: containers("atropos-demo") == [], "no container left", 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without cgroups")
async def test_lacking_limits_are_named():
    with tempfile.TemporaryDirectory(prefix="atropos-test-") as out:
        os.chmod(out, 0o777)
        command = ("tests.unit.sandbox.as_user", sys.executable, "-m", "examples.demo", "--names", "fix-permissions")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command, "--group-size", "2", "--containers", "1", "--slots", "2", "--out", out),
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    (noted,) = [line for line in errors.decode().splitlines() if " lack " in line]
    assert all(name in noted for name in ("memory_limit", "pids_limit", "cpu_weight")), noted
