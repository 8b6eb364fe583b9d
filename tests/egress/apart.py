"""Runs the worlds of these tests in network and mount namespaces of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs

ROOT = Path(__file__).resolve().parents[2]
MARKS = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
    needs("ip", "curl"),
]


def apart(world: str, *arguments: str, timeout_s: float) -> tuple[dict, str]:
    """What a program of this folder found, and all that it logged."""
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-m", f"tests.egress.{world}", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr
