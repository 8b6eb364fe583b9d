"""Benchmarks that `make bench` doesn't run still fit the code that they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import docker_peer, swe_rex
from benchmarks.context import Context

pytestmark = pytest.mark.slow("starts Python anew")

ROOT = Path(__file__).resolve().parents[3]


def test_the_simulated_fleet_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.fleet", "--largest", "10"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "320" in done.stdout


async def test_a_run_without_peers_starts_none() -> None:
    context = Context(scale=0.1, say=print, skip_peers=True)
    async with swe_rex.running(context) as rex, docker_peer.container(context) as container:
        assert (rex, container) == (None, None)
