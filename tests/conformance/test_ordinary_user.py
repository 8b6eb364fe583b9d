"""The local backend is for everybody: the same pool for a user without any privilege."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from tests.processes import adopt_orphans, descendants
from tests.waiting import SLOWNESS, until


@pytest.mark.skipif(os.geteuid() != 0, reason="the whole suite runs as an ordinary user already")
async def test_works_and_leaves_nothing():
    adopt_orphans()
    before = set(descendants())
    command = [sys.executable, "-m", "tests.conformance.ordinary_user"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.unit.sandbox.as_user",
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120 * SLOWNESS)
    assert process.returncode == 0, err.decode()[-3000:]
    found = json.loads(out)
    (noted,) = [line for line in err.decode().splitlines() if " lack " in line]
    assert all(name in noted for name in ("memory_limit", "pids_limit", "cpu_weight")), noted
    assert found.pop("stop_s") < 30 * SLOWNESS
    assert found.pop("uid") != 0
    assert found == {
        "who": "0\n/workspace\n",
        "fork": "kept\nf\n",
        "fresh": ["", "", "", ""],
        "lost": 2,
        "again": "again\n",
    }
    await until(lambda: not set(descendants()) - before, "the end of every process of it")
