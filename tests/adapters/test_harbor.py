"""Harbor on slots: its oracle agent over the example tasks by its command line, and a container that is killed meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atropos.cli.app import command_line
from tests.adapters.peers import HOSTS, ROOT, needs, run
from tests.unit.dashboard.support import hostile, ordinary

pytestmark = needs("harbor")
OWN_VERIFIER = {
    "task.toml": """version = "1.0"
artifacts = ["/app/answer"]
[environment]
memory_mb = 1500
cpus = 0.5
[verifier]
environment_mode = "separate"
env = { WORD = "${HOME}" }
[solution.env]
WORD = "${HOME}"
""",
    "instruction.md": "Write the word to the file answer.",
    "environment/Dockerfile": "FROM debian:13\nWORKDIR /app\n",
    "solution/solve.sh": "#!/bin/sh\necho $WORD >answer\n",
    "tests/Dockerfile": "FROM debian:13\nWORKDIR /verifier\nCOPY . /tests\n",
    "tests/test.sh": """#!/bin/sh
ln -s /app /logs/verifier/looked-at
echo $WORD | cmp - /app/answer && echo 1 >/logs/verifier/reward.txt
""",
}
"""A task whose verifier has an image of its own, which holds the tests."""


@pytest.fixture(name="tasks")
def tasks_fixture(tmp_path: Path) -> Path:
    """The example tasks, verified where the agent worked: for Harbor a separate verifier gets listed artifacts alone.

    The last of all is one that has such a verifier.
    """
    folder = tmp_path / "tasks"
    shutil.copytree(ROOT / "examples/tasks", folder)
    for file in folder.glob("*/task.toml"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("environment_mode")]
        file.write_text("\n".join(lines))
    for name, text in OWN_VERIFIER.items():
        (folder / "zebra" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "zebra" / name).write_text(text)
    return folder


def rewards(tasks: Path, environment: str) -> tuple[list[float], int]:
    """Rewards of trials that have one, and how many have an exception and none."""
    folder = tasks.parent
    options = (
        "--ek",
        "backend=local",
        "--ek",
        "slots_per_container=4",
        "--ek",
        "max_containers=1",
        "-n",
        "4",
        "-q",
        "-y",
    )
    run(
        "harbor",
        "run",
        "-p",
        tasks,
        "-a",
        "oracle",
        "--env",
        environment,
        *options,
        "-o",
        folder / "jobs",
        folder=folder,
    )
    given, failed = [], 0
    for file in (folder / "jobs").glob("*/*/result.json"):
        result = json.loads(file.read_text())
        reward = (result.get("verifier_result") or {}).get("rewards")
        if result.get("exception_info"):
            failed += 1
            assert reward is None, result
        else:
            given.append(reward["reward"])
    return given, failed


def test_the_oracle_scores_one_in_every_task(tasks: Path) -> None:
    count = len([*tasks.iterdir()])
    assert count >= 20
    assert rewards(tasks, "atropos.adapters.harbor:AtroposEnvironment") == ([1.0] * count, 0)
    print(f"harbor run, oracle: {count} of {count} tasks scored 1")


def test_its_environments_are_slots(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copytree(ROOT / "examples/tasks/top-words", tmp_path / "top-words")
    checks = HOSTS / "harbor_contract.py"
    shutil.copy(checks, tmp_path / "test_contract.py")
    output = run("python", "-m", "pytest", "-v", "-p", "no:cacheprovider", folder=tmp_path)
    assert output.count(" PASSED") == checks.read_text().count("\nasync def test_"), output


def test_a_misspelt_setting_is_refused_by_name(tasks: Path) -> None:
    said = run(
        "harbor", "run", "-p", tasks / "top-words", "-a", "oracle", "-q", "-o", tasks.parent / "jobs",
        "--env", "atropos.adapters.harbor:AtroposEnvironment", "--ek", "slots_per_contaner=4",
        folder=tasks.parent, status=1,
    )  # fmt: skip
    assert "ConfigError: --ek slots_per_contaner: no field" in said


def test_a_killed_container_is_an_exception_and_no_reward(tasks: Path) -> None:
    for folder in sorted(tasks.iterdir())[8:]:  # the fifth trial's container is killed, with the three beside it
        shutil.rmtree(folder)
    given, failed = rewards(tasks, "harbor_accident:AccidentEnvironment")
    assert failed >= 1
    assert given == [1.0] * (8 - failed)


def test_exported_trajectories_are_valid_for_its_own_model(tmp_path: Path) -> None:
    groups = [*ordinary(), hostile()]
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(one) + "\n" for one in groups))
    done = CliRunner().invoke(
        command_line(), ["trajectories", "export", str(tmp_path / "groups.jsonl"), "--to", str(tmp_path / "atif")]
    )
    assert done.exit_code == 0, done.output
    validate = (
        "import pathlib, harbor.models.trajectories as t\n"
        "print(sum(bool(t.Trajectory.model_validate_json(f.read_text()).steps) for f in pathlib.Path('atif').iterdir()))"
    )
    count = sum(len(one["scores"]) for one in groups)
    assert run("python", "-c", validate, folder=tmp_path) == f"{count}\n"
