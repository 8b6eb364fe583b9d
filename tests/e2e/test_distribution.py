"""Wheel and sdist, built from this repository and installed in an empty environment, without extras: what is in them
works.

This Python and the newest one, and the wheel, in each run. ATROPOS_TEST_PYTHONS="3.11 3.12 3.13 3.14" (or paths) tries
both on each, as the release workflow does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
NAMED = os.environ.get("ATROPOS_TEST_PYTHONS", "").split()
NEWEST = "3.14"
CASES = [(python, kind) for python in NAMED for kind in ("*.whl", "*.tar.gz")] or [
    (sys.executable, "*.whl"),
    (NEWEST, "*.whl"),
]

pytestmark = [
    pytest.mark.skipif(UV is None, reason="uv is not installed"),
    pytest.mark.timeout(600),
]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    apart = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run(command, cwd=cwd, env=apart, capture_output=True, text=True, check=False, timeout=300)


def succeed(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with wheel, sdist, and what else the lock file has without extras, as constraints."""
    folder = tmp_path_factory.mktemp("dist")
    wheel_alone = () if NAMED else ("--wheel",)
    succeed(UV, "build", "--quiet", *wheel_alone, "--out-dir", folder, ROOT, cwd=folder)
    export = ("export", "--frozen", "--quiet", "--no-default-groups", "--no-emit-project", "--no-hashes")
    succeed(UV, *export, "--project", ROOT, "--output-file", folder / "constraints.txt", cwd=folder)
    return folder


def found(python: str) -> str:
    """Where a Python of this version is, or a skip that says why none could be had; a path is as it is."""
    if "/" in python:
        return python
    done = run("bash", ROOT / "scripts/python.sh", python, cwd=ROOT)
    if done.returncode != 0:
        pytest.skip(f"no Python {python}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


@pytest.mark.parametrize(("python", "kind"), CASES)
def test_installs_and_leases(built: Path, tmp_path: Path, python: str, kind: str):
    [package] = built.glob(kind)
    succeed(UV, "venv", "--quiet", "--python", found(python), "own", cwd=tmp_path)
    locked = ("--constraint", built / "constraints.txt")
    succeed(UV, "pip", "install", "--quiet", "--python", "own", *locked, package, cwd=tmp_path)
    atropos, own = tmp_path / "own/bin/atropos", tmp_path / "own/bin/python"
    where = succeed(own, "-c", "import atropos; print(atropos.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    assert succeed(atropos, "--version", cwd=tmp_path).startswith("atropos ")
    assert "doctor" in succeed(atropos, "--help", cwd=tmp_path)
    for words, extra in ((("executor-server",), "server"), (("pool", "status"), "nomad")):
        refused = run(atropos, *words, cwd=tmp_path)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused
        assert f"pip install 'atropos[{extra}]'" in refused.stderr
    doctor = run(atropos, "doctor", cwd=tmp_path)
    assert "Traceback" not in doctor.stderr
    assert doctor.returncode in {0, 1, 3}, doctor.stdout + doctor.stderr  # 1, 3: this host lacks something
    assert "isolat" in doctor.stdout
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "five_lines.py").write_text(next(block for block in blocks if "pool.lease" in block))
    assert succeed(own, "five_lines.py", cwd=tmp_path) == "42\n"
