"""mini-swe-agent on slots: the contract of its environments, and its benchmarks' command line with a model over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.adapters.peers import HOSTS, ROOT, needs, run
from tests.adapters.scripted_model import scripted_model

pytestmark = needs("mini-extra")
POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1}
TASKS = 24
"""Twenty, and as many as a container has slots."""
SILENT = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "1",
    "HF_HUB_OFFLINE": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
}


def test_its_contract(tmp_path: Path) -> None:
    checks = HOSTS / "mini_contract.py"
    options = ("-v", "-p", "no:cacheprovider", "-c", "/dev/null")
    output = run("python", "-m", "pytest", *options, checks, folder=tmp_path, MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path))
    assert len(re.findall(r" PASSED", output)) == checks.read_text().count("\ndef test_"), output


def test_tasks_outlast_a_killed_container(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    tasks = [
        {"instance_id": f"square-{n}", "problem_statement": f"RUN<square={n}; echo $((square * square)) >answer>RUN"}
        for n in range(TASKS)
    ]
    (tmp_path / "tasks/test.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    with scripted_model() as url:
        settings = {
            "agent": {"system_template": "You square.", "instance_template": "{{task}}", "step_limit": 5},
            "environment": {"environment_class": "mini_accident.AccidentEnvironment", "pool": POOL},
            "model": {"model_class": "mini_client.Client", "model_name": "scripted"},
        }
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        run(
            "mini-extra", "swebench", "--subset", "tasks", "--split", "test", "-c", "settings.yaml", "-w", "4", "-o", "out",
            folder=tmp_path, MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path), HF_HOME=str(tmp_path / "hf"), MODEL_URL=url, **SILENT,
        )  # fmt: skip
    answers: dict[str, Any] = json.loads((tmp_path / "out/preds.json").read_text())
    (statuses,) = (tmp_path / "out").glob("exit_statuses_*.yaml")
    ended: dict[str, list[str]] = yaml.safe_load(statuses.read_text())["instances_by_exit_status"]
    gone = set(ended.pop("SandboxGoneError", ()))
    assert 1 <= len(gone) <= 4
    assert ended.keys() == {"Submitted"}
    assert {name: answers[name]["model_patch"].strip() for name in ended["Submitted"]} == {
        f"square-{n}": str(n * n) for n in range(TASKS) if f"square-{n}" not in gone
    }
    assert all(answers[name]["model_patch"] == "" for name in gone)
    trajectory = json.loads((tmp_path / f"out/{ended['Submitted'][0]}/{ended['Submitted'][0]}.traj.json").read_text())
    assert "pool" not in trajectory["info"]["config"]["environment"]
    print(f"mini-extra swebench: {len(ended['Submitted'])} of {TASKS} submitted, {len(gone)} SandboxGoneError")


def test_a_process_ends_despite_its_threads(tmp_path: Path) -> None:
    """As after the Ctrl-C that ends `mini-extra swebench -w` at once."""
    code = f"""if True:
        import os, threading
        from atropos.adapters.mini_swe_agent import AtroposEnvironment

        def environment():
            return AtroposEnvironment(pool={POOL | {"slots_per_container": 1}})

        def work():
            while True:
                first.execute({{"command": "echo again"}})

        def ended(target):
            try:
                target()
            except Exception as error:  # said at once: tracebacks of two threads run into each other
                os.write(1, f"{{type(error).__name__}}: {{error}}\\n".encode())

        first = environment()
        for target in (work, environment):
            threading.Thread(target=ended, args=[target]).start()
        first.execute({{"command": "sleep 1"}})
    """
    output = run("python", "-c", code, folder=tmp_path, MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path), **SILENT)
    assert output.count("SandboxGoneError: sandbox_error: the process ends") == 2, output


def test_the_command_of_its_page_ends_a_task(tmp_path: Path) -> None:
    page = (ROOT / "docs/adapters/mini-swe-agent.md").read_text()
    found = re.search(r"\$ mini (.*?)\n```", page, re.DOTALL)
    assert found
    arguments = re.sub(r"\\\n", " ", found[1])
    with scripted_model() as url:
        (tmp_path / "mini").write_text(f"exec mini {arguments} --model-class mini_client.Client -o out.json")
        variables = {
            "MODEL_URL": url,
            "PATH": f"{ROOT}/.peers/bin:/usr/bin:/bin",
            "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
            **SILENT,
        }
        run("python", "-c", "import os; os.execv('/bin/sh', ['sh', 'mini'])", folder=tmp_path, **variables)
    assert json.loads((tmp_path / "out.json").read_text())["info"]["exit_status"] == "Submitted"
