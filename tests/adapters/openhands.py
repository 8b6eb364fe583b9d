"""Slots as workspaces of OpenHands, by its own packages and with its agent server in the slot: `make test-openhands`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError

from atropos.adapters.openhands import AtroposRemoteWorkspace
from atropos.adapters.sharing import SandboxGoneError
from tests.adapters.hosts.accident import kill_container
from tests.adapters.peers import ROOT

SERVER = ("python3", "-m", "openhands.agent_server")
VARIABLES = {"PYTHONPATH": "/opt/openhands", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": "/root"}
POOL = {
    "backend": "local",
    "slots_per_container": 1,
    "max_containers": 1,
    "limits": {"memory_mib": 3000},
    "base": os.environ["OPENHANDS_ROOT"],
}


@pytest.fixture(scope="module")
def model_port() -> Iterator[int]:
    """Of a model that calls the terminal with what its task says."""
    command = [sys.executable, "-m", "tests.adapters.scripted_model", "terminal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield urlsplit(process.stdout.readline()).port or 0
        process.terminate()


def test_the_agent_of_its_page_works_in_the_slot(model_port: int, capfd: pytest.CaptureFixture[str]):
    page = (ROOT / "docs/adapters/openhands.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    here = f"image=None, command={SERVER}, env={VARIABLES}, start_s=600, reach=({model_port},)"
    for was, now in {
        "reach=(8000,)": here,
        "localhost:8000": f"localhost:{model_port}",
        '{"backend": "local", "limits": {"memory_mib": 3000}}': repr(POOL),
        "Write the word done into a file.": "RUN<echo $((6 * 7)) > answer>RUN",
    }.items():
        assert was in block
        block = block.replace(was, now)
    block += """
    print("status", conversation.state.execution_status.value)
    print("written", workspace.execute_command("cat answer").stdout)
    print("shown", [str(event) for event in conversation.state.events if "Observation" in type(event).__name__])
    conversation.close()
"""
    exec(block, {"__name__": "__main__"})
    said = capfd.readouterr().out
    assert "status finished\nwritten 42\n" in said, said
    assert "42" in said.partition("shown")[2], "what the agent's own terminal printed"


@pytest.fixture(scope="module")
def workspace() -> Iterator[AtroposRemoteWorkspace]:
    with AtroposRemoteWorkspace(image=None, command=SERVER, env=VARIABLES, pool=POOL, start_s=600) as made:
        yield made


def test_commands_and_files_are_the_slots(workspace: AtroposRemoteWorkspace, tmp_path: Path):
    result = workspace.execute_command("pwd; ls /opt; echo no >&2; exit 3", cwd="/workspace", timeout=60)
    assert (result.stdout, result.stderr, result.exit_code) == ("/workspace\nopenhands\n", "no\n", 3)
    assert workspace.execute_command("sleep 60", timeout=2).timeout_occurred
    (tmp_path / "a").write_bytes(b"\x00\xff")
    assert workspace.file_upload(tmp_path / "a", "/workspace/b").success
    assert workspace.file_download("/workspace/b", tmp_path / "c").success
    assert (tmp_path / "c").read_bytes() == b"\x00\xff"
    assert not workspace.file_download("/workspace/none", tmp_path / "d").success


def test_the_server_asks_for_the_workspaces_key(workspace: AtroposRemoteWorkspace):
    assert workspace.alive
    assert httpx.get(f"{workspace.host}/api/settings").status_code == 401


def test_a_lost_slot_is_no_result(workspace: AtroposRemoteWorkspace, tmp_path: Path):
    kill_container()
    for call in (
        lambda: workspace.execute_command("true"),
        lambda: workspace.file_upload(tmp_path, "/workspace/b"),
        lambda: workspace.file_download("/workspace/b", tmp_path / "c"),
        lambda: workspace.git_changes("."),
    ):
        with pytest.raises(SandboxGoneError):
            call()
    workspace.cleanup()
    with pytest.raises(SandboxGoneError, match="cleaned up"):
        workspace.execute_command("true")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("sh", "-c", "echo why; exit 4", "sh"), "ended with 4: why"),
        (("/none",), "/none can't be started"),
        ((), "no ENTRYPOINT"),
    ],
)
def test_a_server_that_does_not_start_is_named(command: tuple[str, ...], said: str):
    with pytest.raises(ValidationError, match=said):
        AtroposRemoteWorkspace(image=None, command=command, pool=POOL)
    left = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "atropos.sandbox"], check=False).returncode
    assert left == 1, "its pool has ended"
