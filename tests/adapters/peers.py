"""Running the packages that adapters serve, from their own environment (scripts/peers.sh)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.privileges import without_gaps
from tests.waiting import SLOWNESS

ROOT = Path(__file__).resolve().parents[2]
HOSTS = Path(__file__).parent / "hosts"
BIN = ROOT / ".peers" / "bin"
VERIFIERS = ROOT / ".peers" / "verifiers" / "bin"
NEMO_GYM = ROOT / ".peers" / "nemo-gym" / "bin"
KITS = ROOT / ".peers" / "kits" / "bin"
E2B_CLIENTS = ROOT / ".peers" / "e2b-clients" / "bin"


def needs(program: str, where: Path = BIN) -> pytest.MarkDecorator:
    """Skips a module whose package isn't installed."""
    return pytest.mark.skipif(not (where / program).exists(), reason=f"no {program}: scripts/peers.sh installs it")


def run(
    program: str,
    *arguments: str | Path,
    folder: Path,
    where: Path = BIN,
    status: int = 0,
    grace_s: float = 0,
    **variables: str,
) -> str:
    """What a peer's program prints; it ends with `status`, and `grace_s` later has left no sandbox server behind."""
    environment = {
        "PYTHONPATH": f"{ROOT}:{HOSTS}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTEST_ADDOPTS": "",
        **variables,
    }
    with subprocess.Popen(
        [where / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=280)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                pytest.fail(f"{program} has not ended within {error.timeout:.0f} s:\n{process.communicate()[0]}")
            raise
    assert process.returncode == status, output
    deadline = time.monotonic() + grace_s * SLOWNESS
    while servers_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert servers_of(process.pid) == [], output
    return without_gaps(output)


def servers_of(session: int) -> list[str]:
    """Processes whose environment or session is that of a program that has ended."""
    listed = subprocess.run(["ps", "-eo", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    # what has ended, and is a child of this process once a test has adopted orphans, is no process any more
    return [line for line in listed.splitlines() if int(line.split()[0]) == session and line.split()[1][0] != "Z"]
