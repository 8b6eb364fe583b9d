"""The runner's modules, joined into the one file that a slot starts."""

from __future__ import annotations

import importlib.util
import marshal
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atropos.sandbox.host.process import runner_code

STARTED_ALONE = ("-I", "-S", "-B", "-X", "utf8")


@pytest.fixture
def runner(tmp_path: Path) -> str:
    file = tmp_path / "runner.pyc"
    file.write_bytes(
        importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(runner_code.join())
    )
    return str(file)


def test_a_traceback_names_module_and_line(runner):
    """Where its socket should be, it finds a file."""
    started = subprocess.run(
        [sys.executable, *STARTED_ALONE, runner], capture_output=True, text=True, timeout=30, check=False
    )
    lines = (runner_code.FOLDER / "frames.py").read_text().splitlines()
    number = 1 + next(number for number, line in enumerate(lines) if "socket(fileno=SOCKET)" in line)
    assert f'File "runner/frames.py", line {number}, in open' in started.stderr


def test_it_loads_neither_os_nor_any_module_that_has_no_need(runner):
    """Each costs every slot memory and start time."""
    listing = f"import marshal, sys; code = marshal.loads(open({runner!r}, 'rb').read()[16:]); sys.modules['__main__'].__dict__"
    listing += ".update(__name__='runner'); exec(code); print(*sorted(sys.modules))"
    before = subprocess.check_output(
        [sys.executable, *STARTED_ALONE, "-c", "import sys; print(*sys.modules)"], text=True
    )
    after = subprocess.check_output([sys.executable, *STARTED_ALONE, "-c", listing], text=True)
    added = set(after.split()) - set(before.split())
    assert added <= {"_ctypes", "_json", "_posixsubprocess", "gc", "select"}, added


def test_two_modules_must_not_define_one_name(tmp_path):
    shutil.copytree(runner_code.FOLDER, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "paths.py").open("a") as file:
        file.write("\n\nclass Command:\n    pass\n")
    with pytest.raises(SyntaxError, match="Command is defined by two modules"):
        runner_code.join(tmp_path)
