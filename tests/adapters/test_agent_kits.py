"""Kits for agents on slots: what each asks of a sandbox, and an agent of each at work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.adapters.peers import HOSTS, KITS, ROOT, needs, run

pytestmark = needs("pytest", KITS)
CONTRACTS = {"deepagents": 16, "google_adk": 5, "openai_agents": 12, "pydantic_ai": 45}
"""How many tests pass; of pydantic-ai's suite one is skipped, as its native `realpath` is optional."""


PAGE = """
def test_page(capfd):
    exec({block!r}, {{}})
    assert capfd.readouterr().out == "42\\n"
"""


@pytest.mark.parametrize("kit", CONTRACTS)
def test_its_contract(tmp_path: Path, kit: str) -> None:
    """And the block of its page, in the same process: to load a kit takes seconds of CPU."""
    page = (ROOT / f"docs/adapters/{kit.replace('_', '-')}.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_page.py").write_text(PAGE.format(block=block))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / f"{kit}_contract.py", tmp_path / "test_contract.py")
    output = run("python", "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", folder=tmp_path, where=KITS)
    skipped = ", 1 skipped" if kit == "pydantic_ai" else ""
    assert re.search(rf"^{CONTRACTS[kit] + 1} passed{skipped} in", output, re.MULTILINE), output
