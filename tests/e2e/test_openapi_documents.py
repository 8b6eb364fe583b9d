"""schemathesis over both OpenAPI documents, against real servers: every one of its checks, in 1,000 cases.

ATROPOS_FAULTS multiplies the examples an operation (1 in CI; 100 give about 10^5 cases). ATROPOS_API_SEED is what they
are drawn with: the same in each run of CI, so that a change that breaks something is what broke it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.servers import OWN, TOKEN, Server, running
from tests.repeats import TIMES

EXAMPLES = 100 * TIMES
CONFIG = Path(__file__).with_name("schemathesis.toml")
EXECUTOR = """
acquire_s = 0.3
[pool]
backend = "local"
slots_per_container = 4
max_containers = 1
"""


async def schemathesis(server: Server, folder: Path) -> tuple[int, str]:
    """How many cases were tried, and what was printed."""
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {TOKEN}", "--checks", "all", "--max-examples", str(EXAMPLES)),
            *("--continue-on-failure", "--request-timeout", "60", "--generation-database", "none", "--no-color"),
            *("--seed", os.environ.get("ATROPOS_API_SEED", "1")),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "SCHEMATHESIS_HOOKS": "tests.e2e.schemathesis_hooks",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300 + EXAMPLES,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert server.process.returncode is None
    assert "Exception in ASGI" not in server.log, server.log[-4000:]
    cases = re.search(r"([\d,]+) generated", done.stdout)
    assert cases, done.stdout
    print(cases[0])
    return int(cases[1].replace(",", "")), done.stdout


@pytest.mark.timeout(360 + EXAMPLES)
async def test_tool_server_schemathesis(tmp_path: Path):
    async with running("tool-server", *OWN) as server:
        cases, said = await schemathesis(server, tmp_path)
    assert cases >= 500  # how many its stateful phase draws depends on answers
    assert "6 selected / 6 total" in said


@pytest.mark.timeout(360 + EXAMPLES)
async def test_executor_api_schemathesis(tmp_path: Path):
    settings = tmp_path / "executor.toml"
    settings.write_text(EXECUTOR)
    async with running("executor-server", "--config", str(settings)) as server:
        cases, said = await schemathesis(server, tmp_path)
    assert cases >= 800
    assert "17 selected / 17 total" in said
    assert "Stateful" in said
