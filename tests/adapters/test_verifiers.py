"""verifiers on slots: the contract of its runtimes, and its own command line over a taskset."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.adapters.peers import HOSTS, ROOT, VERIFIERS, needs, run
from tests.adapters.scripted_model import scripted_model

pytestmark = needs("vf-eval", VERIFIERS)
POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1}
TASKS = 24
KILLED = 9


def test_a_runtime_keeps_its_contract(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / "verifiers_contract.py", tmp_path / "test_contract.py")
    output = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path, where=VERIFIERS)
    assert re.search(r"^15 passed", output, re.MULTILINE), output


def test_tasks_outlast_a_killed_container(tmp_path: Path) -> None:
    """The slots have no network: the model is reached through their leases."""
    with scripted_model() as url:
        run(
            "vf-eval", "vf_squares", "-m", "scripted", "-n", str(TASKS), "-r", "1", "-c", "4", "-o", "out",
            "--client.base-url", url, "--client.api-key-var", "KEY", "--rich", "None", "--push", "false",
            "--env.agent.harness.id", "vf_squares", "--env.slots.pool", json.dumps(POOL),
            folder=tmp_path, where=VERIFIERS, KEY="x", KILL_AT=str(KILLED),
        )  # fmt: skip
    (traces,) = tmp_path.glob("out/*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    ended: dict[int, dict[str, Any]] = {one["traces"][0]["task"]["data"]["idx"]: one["traces"][0] for one in episodes}
    failed = {number: trace for number, trace in ended.items() if trace["errors"]}
    assert sorted(ended) == list(range(TASKS))
    assert KILLED in failed
    assert 1 <= len(failed) <= 4
    for trace in failed.values():
        assert [error["type"] for error in trace["errors"]] == ["SandboxError"]
        assert not any(trace["rewards"].values())  # None where the scoring had begun
    for number in ended.keys() - failed.keys():
        assert ended[number]["rewards"] == {"right": {"score": 1.0, "weight": 1.0}}, ended[number]


def test_the_blocks_of_its_page_run(tmp_path: Path) -> None:
    """Each by itself, in one process: to load the package takes four seconds of CPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters/verifiers.md").read_text(), re.DOTALL)
    with scripted_model() as url:
        code = "import sys\nfor block in sys.argv[1:]:\n    exec(block, {'__name__': '__main__'})\n    print('over')"
        given = [block.replace("http://127.0.0.1:9001/v1", url) for block in blocks[:2]]
        output = run("python", "-c", code, *given, folder=tmp_path, where=VERIFIERS)
    assert output.splitlines().count("over") == 2, output
