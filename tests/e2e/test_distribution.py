"""Wheel and sdist, installed in an empty environment of each Python that ATROPOS_TEST_PYTHONS names.

Takes a minute a Python, so the release workflow and people run it: ATROPOS_TEST_PYTHONS="3.11 3.12 3.13", or paths.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


PYTHONS = os.environ.get("ATROPOS_TEST_PYTHONS", "").split()
pytestmark = pytest.mark.skipif(
    UV is None or not PYTHONS, reason="ATROPOS_TEST_PYTHONS is not set, or uv is not installed"
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = run(UV, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
@pytest.mark.parametrize("python", PYTHONS)
def test_it_installs_by_itself_and_the_doctor_finds_what_it_finds_here(
    built: Path, tmp_path: Path, python: str, kind: str
):
    [package] = built.glob(kind)
    for command in (
        ("venv", "--quiet", "--python", python, "own"),
        ("pip", "install", "--quiet", "--python", "own", package),
    ):
        done = run(UV, *command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    atropos = tmp_path / "own/bin/atropos"
    said = run(atropos, "--version", cwd=tmp_path)
    assert said.stdout.startswith("atropos "), said.stderr
    where = run(tmp_path / "own/bin/python", "-c", "import atropos; print(atropos.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(tmp_path))
    doctor = run(atropos, "doctor", cwd=tmp_path)
    assert "Traceback" not in doctor.stderr
    assert doctor.returncode in {0, 1, 3}, doctor.stdout + doctor.stderr  # 1, 3: this host lacks something
    assert "isolat" in doctor.stdout
