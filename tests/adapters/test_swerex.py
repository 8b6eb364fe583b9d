"""SWE-ReX on slots: the tests of its runtime from its source distribution, and what they leave out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.adapters.peers import HOSTS, ROOT, needs, run

pytestmark = needs("swerex-remote")
SOURCES = ROOT / ".peers/share/swe-rex"
ON_ONE_FILE_SYSTEM = ("test_read_write_file", "test_read_large_file")
"""Tests that read or write the runtime's files without the runtime."""


def test_its_runtime_tests_and_ours_pass(tmp_path: Path) -> None:
    folder = tmp_path / "checks"  # `tests` is ours
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    (folder / "__init__.py").touch()
    shutil.copy(HOSTS / "swerex_conftest.py", folder / "conftest.py")
    shutil.copy(HOSTS / "swerex_contract.py", folder / "test_contract.py")
    theirs = SOURCES / "tests/test_execution.py"
    if theirs.exists():
        shutil.copy(theirs, folder)
    pytest = ("python", "-m", "pytest", "-v", "-p", "no:cacheprovider")
    left_out = [f"--deselect=checks/test_execution.py::{name}" for name in ON_ONE_FILE_SYSTEM]
    output = run(*pytest, *left_out, "checks", folder=tmp_path)
    passed = re.findall(r"^checks/test_(execution|contract)\S+ PASSED", output, re.MULTILINE)
    assert "SKIPPED" not in output
    assert passed.count("contract") == (HOSTS / "swerex_contract.py").read_text().count("async def test_")
    assert passed.count("execution") >= 47 or not theirs.exists(), output
    print(f"SWE-ReX: {passed.count('execution')} of its runtime tests passed, {passed.count('contract')} of ours")


def test_the_block_of_its_page_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters/swerex.md").read_text(), re.DOTALL)
    assert run("python", "-c", block, folder=tmp_path).startswith("0 /tmp\n")
