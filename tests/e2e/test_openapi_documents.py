"""schemathesis over both OpenAPI documents, against real servers: every one of its checks.

ATROPOS_API_EXAMPLES is the number of examples an operation (4 in CI; hundreds by hand), ATROPOS_API_SEED what they are drawn
with: the same in each run of CI, so that a change that breaks something is what broke it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.servers import OWN, TOKEN, Server, running

EXAMPLES = int(os.environ.get("ATROPOS_API_EXAMPLES", "4"))
EXECUTOR = """
acquire_s = 0.3
[pool]
backend = "local"
slots_per_container = 4
max_containers = 1
"""


async def schemathesis(server: Server, folder: Path) -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {TOKEN}", "--checks", "all", "--max-examples", str(EXAMPLES)),
            *("--continue-on-failure", "--request-timeout", "20", "--generation-database", "none", "--no-color"),
            *("--seed", os.environ.get("ATROPOS_API_SEED", "1")),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "SCHEMATHESIS_HOOKS": "tests.e2e.schemathesis_hooks",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250 + EXAMPLES * 10,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert server.process.returncode is None
    assert "Exception in ASGI" not in server.log, server.log[-4000:]
    return done.stdout


@pytest.mark.timeout(300 + EXAMPLES * 20)
async def test_every_check_of_schemathesis_holds_for_the_tool_server(tmp_path: Path):
    async with running("tool-server", *OWN) as server:
        said = await schemathesis(server, tmp_path)
    assert "6 selected / 6 total" in said


@pytest.mark.timeout(300 + EXAMPLES * 20)
async def test_every_check_of_schemathesis_holds_for_the_executor_api(tmp_path: Path):
    settings = tmp_path / "executor.toml"
    settings.write_text(EXECUTOR)
    async with running("executor-server", "--config", str(settings)) as server:
        said = await schemathesis(server, tmp_path)
    assert "8 selected / 8 total" in said
    assert "Stateful" in said
