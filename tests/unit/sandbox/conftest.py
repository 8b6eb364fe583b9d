"""Fixtures: a driver process as root, and one as an ordinary user."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.needs import require
from tests.unit.sandbox.as_user import USER
from tests.waiting import SLOWNESS

ROOT = Path(__file__).parents[3]


class Driver:
    def __init__(self, base: Path | None, *, as_user: bool, volume: str = "memory", before: Sequence[str] = ()) -> None:
        prefix = [*before, *([sys.executable, "-m", "tests.unit.sandbox.as_user"] if as_user else [])]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.unit.sandbox.driver", volume, *([str(base)] if base else [])],
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
        assert self.process.wait(30 * SLOWNESS) == 0


def tiny_base(folder: Path, owner: int) -> Path:
    """A root file system with a shell and little else, where anybody can read it."""
    programs = [path for name in ("bash", "cat", "ls", "stat", "rm", "mkdir") if (path := shutil.which(name))]
    for program in programs:
        libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for source in (program, *re.findall(r"(/\S+)", libraries)):
            target = folder / source.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for name in ("bin", "usr/bin", "etc", "old"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(shutil.which("bash"), folder / "bin/bash")
    (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (folder / "old/file").write_text("old\n")
    for at, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(os.path.join(at, name), owner, owner, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that ordinary users can read, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="atropos-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def root_driver(folder) -> Iterator[Driver]:
    if os.geteuid() != 0:
        pytest.skip("needs root: the ordinary user's driver runs the same scenarios")
    driver = Driver(tiny_base(folder / "root", 0), as_user=False)
    yield driver
    driver.close()


OWN_BASE = os.geteuid() == 0 or shutil.which("newuidmap") is None
"""Whether slots of an ordinary user's server have the owner of a base that a test makes."""


@pytest.fixture(scope="module")
def user_driver(folder) -> Iterator[Driver]:
    base = tiny_base(folder / "user", USER if os.geteuid() == 0 else os.geteuid()) if OWN_BASE else None
    driver = Driver(base, as_user=True)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def disk_driver(folder) -> Iterator[Driver]:
    if os.geteuid() != 0:
        pytest.skip("needs root: it looks into /var/lib")
    require("mkfs.ext4")
    driver = Driver(tiny_base(folder / "disk", 0), as_user=False, volume="disk")
    yield driver
    driver.close()
