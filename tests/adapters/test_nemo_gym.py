"""NeMo Gym on slots: its sandbox API, and its own command line over tasks of an agent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from examples.serve.processes import free_port
from tests.adapters.peers import HOSTS, NEMO_GYM, ROOT, needs, run
from tests.adapters.scripted_model import scripted_model
from tests.processes import descendants

pytestmark = needs("gym", NEMO_GYM)
NEWER = ROOT / ".peers/share/nemo-gym"
PAGE = (ROOT / "docs/adapters/nemo-gym.md").read_text()
TASKS = 24
KILLED = 9


def test_its_sandboxes_are_slots(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / "nemo_gym_contract.py", tmp_path / "test_contract.py")
    output = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path, where=NEMO_GYM)
    assert re.search(r"^16 passed", output, re.MULTILINE), output


@pytest.mark.skipif(not NEWER.exists(), reason="scripts/peers.sh installs it")
def test_its_newer_version(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / "nemo_gym_services.py", tmp_path / "test_services.py")
    shutil.copy(HOSTS / "nemo_gym_contract.py", tmp_path / "test_contract.py")
    folders = f"{NEWER}:{ROOT}:{HOSTS}"
    output = run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path, where=NEMO_GYM, PYTHONPATH=folders
    )
    assert re.search(r"^23 passed", output, re.MULTILINE), output


def test_the_block_of_its_page_runs(tmp_path: Path) -> None:
    assert run("python", "-c", blocks("python")[0], folder=tmp_path, where=NEMO_GYM) == "42\n"


@pytest.mark.timeout(900)  # Ray and a server for each part start first: a minute of CPU
def test_tasks_outlast_a_killed_container(tmp_path: Path) -> None:
    agent = tmp_path / "responses_api_agents/in_slots"
    agent.mkdir(parents=True)
    (agent / "app.py").write_text(blocks("python")[1])
    (tmp_path / "config.yaml").write_text(blocks("yaml")[1])
    assert json.loads(blocks("json")[0]).keys() == task(0).keys()
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(task(number)) for number in range(TASKS)))
    commands = re.sub(r"^\$ ", "", blocks("console")[1], flags=re.MULTILINE)

    def accident(text: str) -> None:
        if text.endswith(f" {KILLED}"):
            (server,) = (pid for pid, line in descendants().items() if " -m atropos.sandbox " in line)
            os.kill(server, signal.SIGKILL)

    with scripted_model(accident) as url:
        assert "http://127.0.0.1:9001/v1" in commands
        rollouts(commands.strip().replace("http://127.0.0.1:9001/v1", url), tmp_path)
    ended, failed = rows(tmp_path / "out/rollouts.jsonl"), rows(tmp_path / "out/rollouts_failures.jsonl")
    assert KILLED in failed
    assert 1 <= len(failed) <= 4
    assert sorted([*ended, *failed]) == list(range(TASKS))
    for row in failed.values():
        assert row["_ng_failure_class"] == "sandbox"
        assert "reward" not in row
    assert {number: row["reward"] for number, row in ended.items()} == {
        number: float(number % 3 > 0) for number in ended
    }
    (metrics,) = json.loads((tmp_path / "out/rollouts_aggregate_metrics.json").read_text())
    mean = sum(row["reward"] for row in ended.values()) / len(ended)
    assert metrics["key_metrics"]["mean/reward"] == pytest.approx(mean)
    print(f"gym eval run: {len(ended)} of {TASKS} scored, {len(failed)} of failure class sandbox")


def rollouts(commands: str, folder: Path) -> None:
    """Run the page's commands, again where Ray itself wasn't up within the 30 s that it gives itself.

    NeMo Gym kills the shells of its servers a second after SIGINT and ends; the servers end by themselves soon after.
    """
    for attempt in range(3):
        try:
            with tempfile.TemporaryDirectory(prefix="ray-") as ray:  # its sockets' paths must be short
                run(
                    "python", "-c", "import os, sys; os.execv('/bin/sh', ['sh', '-ec', sys.argv[1]])",
                    f"{commands} ++head_server.host=127.0.0.1 ++head_server.port={free_port()}",
                    folder=folder, where=NEMO_GYM, grace_s=20, HOME=str(folder), RAY_TMPDIR=ray,
                    RAY_USAGE_STATS_ENABLED="0", PATH=f"{NEMO_GYM}:/usr/bin:/bin", VIRTUAL_ENV=str(NEMO_GYM.parent), WANDB_MODE="disabled",
                )  # fmt: skip
            return
        except AssertionError as error:
            if attempt == 2 or "The current node timed out during startup" not in str(error):
                raise


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def task(number: int) -> dict[str, Any]:
    """One whose answer the scripted model gets wrong where 3 divides the number."""
    command = f"n={number}; sleep 0.2; echo $((n * n + (n % 3 == 0))) >answer"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"RUN<{command}>RUN {number}"}]},
        "check": f"grep -qx {number**2} answer",
    }


def rows(path: Path) -> dict[int, dict[str, Any]]:
    return {row["_ng_task_index"]: row for row in map(json.loads, path.read_text().splitlines())}
