"""Attacks through and around the egress proxy, in the small internet of `tests.egress`: whoever must not be reached
counts.

First of the folder by its name: it takes half a minute, in which the event loop that the others share stands still.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs
from tests.security.egress_programs import ATTACKS, DIRECT_ATTACKS, HOGS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
    needs("ip", "curl"),
]


@pytest.fixture(scope="module")
def found() -> dict:
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.security.egress_world"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("way", "name"), [*(("attacks", name) for name in ATTACKS), *(("direct", name) for name in DIRECT_ATTACKS)]
)
def test_no_attack_gets_out(found: dict, way: str, name: str) -> None:
    attack = found[way][name]
    assert "BREACH" not in attack["output"] and "Traceback" not in attack["output"], attack["output"]
    assert attack["output"].endswith("HELD\n")
    assert attack["reached"] == []
    assert not [line for line in attack["asked"] if "smuggled" in line]


@pytest.mark.parametrize("name", HOGS)
def test_the_proxy_stays_for_all(found: dict, name: str) -> None:
    hog = found["hogs"][name]
    assert hog["neighbour"] == ["hello from files.example.org to /neighbour"] * 5
    assert hog["afterwards"] == "hello from files.example.org to /afterwards"


def test_the_proxy_stays_small(found: dict) -> None:
    before, after = found["before"], found["after"]
    assert after["pid"] == before["pid"]
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["mib"] <= before["mib"] + 64  # threads that looked names up keep what they used
    assert after["threads"] <= 4 * (3 + 1) + 4


def test_world_would_have_noticed(found: dict) -> None:
    """Taken from outside the slots, every one of these ways is counted."""
    assert set(found["control"]) == {
        "10.9.8.7:80", "169.254.169.254:80", "93.184.215.1:80", "127.0.0.1:80", "127.0.0.1:4646",
    }  # fmt: skip
