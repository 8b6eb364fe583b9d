"""inspect_ai on slots: its own self-check, its tool support, and an evaluation by its command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.peers import HOSTS, needs, run

pytestmark = needs("inspect")
SELF_CHECKS, OWN_CHECKS = 44, 14


def test_its_self_check_passes_whole(tmp_path: Path) -> None:
    output = run(
        "python", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", "/dev/null", HOSTS / "inspect_self_check.py", folder=tmp_path
    )  # fmt: skip
    skipped = re.findall(r"SKIPPED \[1\] .*", output)
    print("inspect_ai's self_check, root probe, tools and a service:", *skipped, sep="\n")
    assert f"\n{SELF_CHECKS + OWN_CHECKS - len(skipped)} passed" in output, output
    assert all("have no adduser" in line for line in skipped), output
    assert "xfail" not in output


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task, one task after the other by its command line: its start takes seconds of CPU."""
    folder = tmp_path_factory.mktemp("tasks")
    tasks = ("inspect_task.py", "inspect_bridge.py")
    for name in tasks:
        (folder / name).write_text((HOSTS / name).read_text())
    arguments = ("--model", "none/none", "--log-dir", "logs", "--log-format", "json", "--display", "plain")
    run("inspect", "eval", *tasks, *arguments, "--no-fail-on-error", folder=folder)
    logs = [json.loads(log.read_text()) for log in (folder / "logs").glob("*.json")]
    return {log["eval"]["task"]: log["samples"] for log in logs}


@pytest.mark.parametrize("name", ["twenty", "twenty_and_an_accident"])
def test_twenty_samples_by_its_command_line(evaluated: dict[str, list[dict[str, Any]]], name: str) -> None:
    samples = evaluated[name]
    failed = [sample for sample in samples if sample.get("error")]
    scored = [sample["scores"]["match"]["value"] for sample in samples if sample.get("scores")]
    assert len(samples) == 20
    assert scored == ["C"] * (20 - len(failed))
    assert bool(failed) == (name == "twenty_and_an_accident")
    assert all("SandboxGoneError" in sample["error"]["traceback"] for sample in failed)


def test_a_slots_agent_calls_its_model(evaluated: dict[str, list[dict[str, Any]]]) -> None:
    (sample,) = evaluated["bridge"]
    assert sample["scores"]["match"]["value"] == "C", sample
