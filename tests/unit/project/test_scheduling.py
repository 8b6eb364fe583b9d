"""The order in which workers run tests: modules side by side, then what must be alone; a crashed worker changes nothing."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("starts Python anew")

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
import time
from xdist.workermanage import WorkerController
from tests.scheduling import AloneLast

class Slow(WorkerController):
    runs_the_first = False

    def send_runtest_some(self, indices):
        if self.runs_the_first:
            time.sleep({lag})
        self.runs_the_first = 0 in indices
        super().send_runtest_some(indices)

def pytest_configure_node(node):
    node.__class__ = Slow

def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return AloneLast(config, log, lambda nodeid: "alone" if "alone" in nodeid else nodeid.partition("::")[0], "alone")
"""
MODULE = """
import os, time, pytest

@pytest.mark.parametrize("number", range(3))
def test_(number):
    if number == 1 and {crash} and not os.path.exists("crashed"):
        open("crashed", "w").close()
        os._exit(1)
    begun = time.monotonic()
    time.sleep(0.05)
    with open("log", "a") as log:
        log.write(f"{name}{{number}} {{os.getpid()}} {{begun}} {{time.monotonic()}}\\n")
"""


@pytest.mark.parametrize(
    ("crashing", "lag"),
    [
        pytest.param("", 0, id="no_crash"),
        pytest.param("b", 0, id="crash"),
        pytest.param("alone1", 0, id="crash_alone"),
        pytest.param("a", 0.5, id="crash_while_more_tests_are_sent"),
    ],
)
def test_alone_tests_run_last(tmp_path: Path, crashing: str, lag: float) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(lag=lag))
    for name in ("a", "alone1", "alone2", "b", "c", "d"):
        (tmp_path / f"test_{name}.py").write_text(MODULE.format(name=name, crash=name == crashing))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "xdist",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            "--dist",
            "loadscope",
            ".",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    assert re.search(r"= 1 failed, 18 passed" if crashing else r"= 18 passed", done.stdout), done.stdout
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    others = [row for row in rows if not row[0].startswith("alone")]
    alone = sorted((row for row in rows if row[0].startswith("alone")), key=lambda row: float(row[2]))
    assert max(float(row[3]) for row in others) <= float(alone[0][2])
    assert all(float(one[3]) <= float(two[2]) for one, two in itertools.pairwise(alone))
