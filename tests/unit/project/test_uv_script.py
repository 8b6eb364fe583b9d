"""scripts/uv.sh: whatever is called uv, what runs is one that can."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/bin/bash
case "$*" in
  "-m pip install"*) touch "$0.has-uv"; echo noise;;
  "-m uv "*) [ -e "$0.has-uv" ] && echo "module ${*:3}";;
esac
"""


@pytest.mark.parametrize("broken", [True, False], ids=["a uv that can't run", "no uv"])
@pytest.mark.parametrize("there", [True, False], ids=["its Python has one", "its Python has none yet"])
def test_uv_is_one_that_runs(tmp_path: Path, broken: bool, there: bool) -> None:
    python, uv = tmp_path / "python", tmp_path / "uv"
    python.write_text(PYTHON)
    if broken:  # as pyenv's, where another Python has it
        uv.write_text("#!/bin/bash\nexit 127\n")
        uv.chmod(0o755)
    python.chmod(0o755)
    if there:
        (tmp_path / "python.has-uv").touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "ATROPOS_PYTHON": str(python)}
    command = ["bash", "scripts/uv.sh", "sync", "--python", "a b"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.splitlines()[-1], done.returncode) == ("module sync --python a b", 0), done.stderr
    assert ("installing uv" in done.stderr) is not there


def test_a_uv_on_path_comes_first(tmp_path: Path) -> None:
    (tmp_path / "uv").write_text('#!/bin/bash\necho "own $*"\n')
    (tmp_path / "uv").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "ATROPOS_PYTHON": "/nothing"}
    done = subprocess.run(
        ["bash", "scripts/uv.sh", "sync"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("own sync\n", "")
