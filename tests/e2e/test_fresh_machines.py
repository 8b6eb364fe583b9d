"""A machine with what the README names and nothing else: its first command works there, or says what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from tests.debian import Machine, machine
from tests.engines import ROOT

TASKS = {path.name for path in (ROOT / "examples/tasks").iterdir() if path.is_dir()}
HALF, OTHERS = ({*sorted(TASKS)[start::step]} for start, step in ((0, 2), (1, 6)))
PLAYED = [("bookworm", "root", HALF), ("trixie", "somebody", OTHERS)]
if os.environ.get("ATROPOS_FRESH_MACHINES") == "all":
    PLAYED = [(release, user, TASKS) for release in ("bookworm", "trixie") for user in ("root", "somebody")]
DEMO = "--group-size 1 --mistakes 0 --json"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for debootstrap"),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed"),
    pytest.mark.timeout(1800),  # the first time, all is fetched
]


def report(output: str) -> dict[str, dict]:
    return json.loads(re.search(r"^\{$.*^\}$", output, re.MULTILINE | re.DOTALL)[0])


def scores(output: str) -> dict[str, list[float]]:
    return {name: task["scores"] for name, task in report(output)["tasks"].items()}


def prepared_for(user: str, made: Machine) -> None:
    """As root `make demo` installs what it needs; to an ordinary user it names just that, and stops."""
    if user != "root":
        code, said = made.run("make demo", user)
        assert code != 0
        command = re.search(r"sudo (apt-get install .*)", said)
        assert command, said
        made.check(f"apt-get update -qq && DEBIAN_FRONTEND=noninteractive {command[1]} -qq --no-install-recommends")


@pytest.mark.parametrize(("release", "user", "tasks"), PLAYED)
def test_tasks_score_as_scripted(release, user, tasks):
    with machine(release) as made:
        prepared_for(user, made)
        names = "" if tasks is TASKS else f" --names {','.join(sorted(tasks))}"
        said = made.check(f"make demo ARGS='{DEMO}{names}'", user)
        assert scores(said) == {name: [1.0] for name in tasks}, said
        assert "left out" not in said
        # and what a base lacks is no wrong answer, also where the same tasks were solved before
        made.check("dpkg --remove --force-depends libc6-dev")
        demo = f".venv/bin/python -m examples.demo {DEMO} --names fix-c-overflow,fix-ledger"
        said = made.check(demo, user)
        assert scores(said) == {"fix-ledger": [1.0]}, said
        assert "stdio.h: No such file" in report(said)["left_out"]["fix-c-overflow"]
