"""Harbor on slots: its oracle agent over the example tasks by its command line, and a container that is killed
meanwhile."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atropos.cli.app import command_line
from tests.adapters.peers import HOSTS, ROOT, needs, run
from tests.files import write_files
from tests.repeats import TIMES
from tests.unit.dashboard.support import hostile, ordinary, sampled

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


RUNS = """
import json, sys
from harbor.cli.main import app
for arguments in map(json.loads, sys.argv[1:]):
    try:
        app(arguments)
    except SystemExit as end:
        assert not end.code, end.code
"""
ACCIDENT = 8
"""Tasks of the run in which the fifth trial's container is killed, with the three beside it."""


@pytest.fixture(name="ran", scope="module")
def ran_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after two runs of Harbor's command line in one process: to load the package takes seconds of CPU.

    The tasks are every second example, above ATROPOS_FAULTS=1 all, and one with services, verified where the agent
    worked: for Harbor a separate verifier gets listed artifacts alone. The last of all is one that has such a verifier.
    """
    folder = tmp_path_factory.mktemp("harbor")
    for task in sorted((ROOT / "examples/tasks").iterdir())[:: 1 if TIMES > 1 else 2]:
        shutil.copytree(task, folder / "tasks" / task.name)
    shutil.copytree(ROOT / "examples/services/order-totals", folder / "tasks/order-totals")
    for file in folder.glob("tasks/*/task.toml"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("environment_mode")]
        file.write_text("\n".join(lines))
    write_files(folder / "tasks/zebra", OWN_VERIFIER)
    for task in sorted((folder / "tasks").iterdir())[:ACCIDENT]:
        shutil.copytree(task, folder / "some" / task.name)
    settings = ("backend=local", "slots_per_container=4", "max_containers=1")
    options = ("-a", "oracle", "-n", "4", "-q", "-y", *(word for setting in settings for word in ("--ek", setting)))
    run("python", "-c", RUNS, *(
        json.dumps(["run", "-p", tasks, "--env", environment, "-o", jobs, *options]) for tasks, environment, jobs in (
            ("tasks", "atropos.adapters.harbor:AtroposEnvironment", "jobs"),
            ("some", "harbor_accident:AccidentEnvironment", "accident"),
        )
    ), folder=folder)  # fmt: skip
    return folder


def rewards(jobs: Path) -> tuple[list[float], int]:
    """Rewards of trials that have one, and how many have an exception and none."""
    given, failed = [], 0
    for file in jobs.glob("*/*/result.json"):
        result = json.loads(file.read_text())
        reward = (result.get("verifier_result") or {}).get("rewards")
        if result.get("exception_info"):
            failed += 1
            assert reward is None, result
        else:
            given.append(reward["reward"])
    return given, failed


def test_the_oracle_scores_one_in_every_task(ran: Path) -> None:
    count = len([*(ran / "tasks").iterdir()])
    assert count >= 10
    assert rewards(ran / "jobs") == ([1.0] * count, 0)
    print(f"harbor run, oracle: {count} of {count} tasks scored 1")


def test_a_killed_container_is_no_reward(ran: Path) -> None:
    given, failed = rewards(ran / "accident")
    assert failed >= 1
    assert given == [1.0] * (ACCIDENT - failed)


def test_its_environments_are_slots(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copytree(ROOT / "examples/tasks/top-words", tmp_path / "top-words")
    checks = HOSTS / "harbor_contract.py"
    shutil.copy(checks, tmp_path / "test_contract.py")
    output = run("python", "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", folder=tmp_path)
    print(output[output.rfind("short test summary") :])
    ended = len(re.findall(r" (?:PASSED|SKIPPED) +\[", output))
    assert ended == checks.read_text().count("\nasync def test_"), output


def test_exports_pass_its_own_model(tmp_path: Path) -> None:
    groups = [*ordinary(), hostile(), sampled()]
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
