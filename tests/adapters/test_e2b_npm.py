"""npm's `e2b`, as its users have it, against `atropos executor-server`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.peers import HOSTS, ROOT
from tests.adapters.test_e2b import TOKEN, Server, serving

OLDEST, NEWEST = (ROOT / ".peers/npm" / version for version in ("2.14.1", "2.51.0"))
VERSIONS = pytest.mark.parametrize("folder", [OLDEST, NEWEST], ids=["oldest", "newest"])
pytestmark = pytest.mark.skipif(
    not (NEWEST / "node_modules/e2b").exists(),
    reason="no e2b of npm: scripts/peers.sh installs it where npm and node 20 are",
)
LOST = """
import { Sandbox } from 'e2b'
const sandbox = await Sandbox.create()
const handle = await sandbox.commands.run('sleep 60', { background: true })
console.log('runs')
await handle.wait().catch((error) => console.log(error.name))
console.log(await sandbox.isRunning())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--slots-per-container", "5") as running:
        yield running


def started(server: Server, folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), f"{server.url}/e2b")
    return subprocess.Popen(
        ["node", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **urls, "E2B_API_KEY": TOKEN, "NODE_PATH": str(folder / "node_modules")},
    )


@VERSIONS
def test_its_operations_reach_a_slot(server: Server, folder: Path):
    with started(server, folder, HOSTS / "e2b_npm.cjs") as program:
        said, _ = program.communicate(timeout=250)
    assert program.returncode == 0, said


@VERSIONS
def test_the_program_of_its_page_runs(server: Server, folder: Path):
    (text,) = re.findall(r"```javascript\n(.*?)```", (ROOT / "docs/adapters/e2b.md").read_text(), re.DOTALL)
    with started(server, folder, "--input-type=module", "-e", text) as program:
        said, _ = program.communicate(timeout=100)
    assert (said, program.returncode) == ("hello\n\n3\n", 0)


@VERSIONS
def test_a_lost_container_is_no_exit_code(folder: Path):
    with (
        serving("--slots-per-container", "1") as server,
        started(server, folder, "--input-type=module", "-e", LOST) as program,
    ):
        assert program.stdout is not None
        assert program.stdout.readline() == "runs\n"
        server.kill_containers()
        said, _ = program.communicate(timeout=100)
    assert said.split() == ["TimeoutError", "false"]
