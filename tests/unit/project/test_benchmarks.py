"""Benchmarks that `make bench` doesn't run still fit the code that they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_simulated_fleet_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.fleet", "--largest", "10"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "320" in done.stdout
