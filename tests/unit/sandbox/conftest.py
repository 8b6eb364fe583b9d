"""Fixtures: a driver process as root, and one as an ordinary user."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


class Driver:
    def __init__(self, *, as_user: bool) -> None:
        prefix = [sys.executable, "-m", "tests.unit.sandbox.as_user"] if as_user else []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.unit.sandbox.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert "ready" in self._line()

    def _line(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"the driver ended with {self.process.wait(10)}"
        return json.loads(line)

    def run(self, module: str, scenario: str) -> None:
        self.process.stdin.write(json.dumps({"module": module, "scenario": scenario}) + "\n")
        self.process.stdin.flush()
        failed = self._line()["failed"]
        if failed:
            pytest.fail(failed, pytrace=False)

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.fixture(scope="session")
def root_driver() -> Iterator[Driver]:
    if os.geteuid() != 0:
        pytest.skip("needs root: the ordinary user's driver runs the same scenarios")
    driver = Driver(as_user=False)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def user_driver() -> Iterator[Driver]:
    driver = Driver(as_user=True)
    yield driver
    driver.close()
