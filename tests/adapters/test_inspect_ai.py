"""inspect_ai on slots: its own self-check, its tool support, and an evaluation by its command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.peers import HOSTS, needs, run

pytestmark = needs("inspect")
SELF_CHECKS, OWN_CHECKS = 44, 4


def test_its_self_check_passes_whole(tmp_path: Path) -> None:
    output = run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", HOSTS / "inspect_self_check.py", folder=tmp_path
    )  # fmt: skip
    found = re.search(r"(\d+) passed", output)
    assert found, output
    assert int(found[1]) == SELF_CHECKS + OWN_CHECKS, output
    assert "skipped" not in output
    assert "xfail" not in output
    print(f"inspect_ai self_check: {SELF_CHECKS} of {SELF_CHECKS} passed; root probe, tools and a service passed")


@pytest.mark.parametrize("accident", ["", "1"])
def test_twenty_samples_by_its_command_line(tmp_path: Path, accident: str) -> None:
    task = tmp_path / "inspect_task.py"
    task.write_text((HOSTS / "inspect_task.py").read_text())
    arguments = ("--model", "none/none", "--log-dir", "logs", "--log-format", "json", "--display", "plain")
    run("inspect", "eval", task.name, *arguments, "--no-fail-on-error", folder=tmp_path, KILL=accident)
    (log,) = (tmp_path / "logs").glob("*.json")
    samples: list[dict[str, Any]] = json.loads(log.read_text())["samples"]
    failed = [sample for sample in samples if sample.get("error")]
    scored = [sample["scores"]["match"]["value"] for sample in samples if sample.get("scores")]
    assert len(samples) == 20
    assert scored == ["C"] * (20 - len(failed))
    assert bool(failed) == bool(accident)
    assert all("SandboxGoneError" in sample["error"]["traceback"] for sample in failed)


def test_an_agent_in_the_slot_calls_its_model_by_the_bridge(tmp_path: Path) -> None:
    task = tmp_path / "inspect_bridge.py"
    task.write_text((HOSTS / "inspect_bridge.py").read_text())
    arguments = ("--model", "none/none", "--log-dir", "logs", "--log-format", "json", "--display", "plain")
    run("inspect", "eval", task.name, *arguments, folder=tmp_path)
    (log,) = (tmp_path / "logs").glob("*.json")
    (sample,) = json.loads(log.read_text())["samples"]
    assert sample["scores"]["match"]["value"] == "C", sample
