"""NeMo Gym's sandbox API on slots."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.adapters.peers import HOSTS, ROOT, needs, run

pytestmark = needs("gym")
NEWER = ROOT / ".peers/share/nemo-gym"


def test_its_sandboxes_are_slots(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / "nemo_gym_contract.py", tmp_path / "test_contract.py")
    output = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path)
    assert re.search(r"^13 passed", output, re.MULTILINE), output


@pytest.mark.skipif(not NEWER.exists(), reason="scripts/peers.sh installs it")
def test_terminals_and_endpoints_of_its_newer_version(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / "nemo_gym_services.py", tmp_path / "test_services.py")
    shutil.copy(HOSTS / "nemo_gym_contract.py", tmp_path / "test_contract.py")
    folders = f"{NEWER}:{ROOT}:{HOSTS}"
    output = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path, PYTHONPATH=folders)
    assert re.search(r"^19 passed", output, re.MULTILINE), output


def test_the_block_of_its_page_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters/nemo-gym.md").read_text(), re.DOTALL)
    assert run("python", "-c", block, folder=tmp_path) == "42\n"
