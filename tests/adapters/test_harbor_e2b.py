"""Harbor's own `--env e2b` on slots, as its command line has it: it builds templates of tasks' Dockerfiles."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.adapters.peers import ROOT, needs, run
from tests.adapters.test_e2b import TOKEN, serving
from tests.adapters.test_harbor import RUNS, rewards
from tests.files import write_files

SDK = ROOT / ".peers/share/harbor-e2b"
pytestmark = [needs("harbor"), needs("e2b", SDK)]
DOCKERFILE = """FROM base
ARG VERSION=3
ENV GREETING=hello
WORKDIR /app
COPY parts/ /opt/tools/
RUN sh /opt/tools/greet > greeted && echo $VERSION > version
"""
TASKS = {
    "dockerfile": (DOCKERFILE, '[ "$(cat /app/greeted /app/version /app/answer)" = "hello\n3\nhello" ]'),
    "image": ("", '[ "$(cat /app/answer)" = "" ] && [ -e /app/answer ]'),
}
"""By name: a Dockerfile (none: the task names an image), and what has to hold once the oracle has worked."""


def write_task(folder: Path, dockerfile: str, check: str) -> None:
    image = "" if dockerfile else '[environment]\ndocker_image = "base"\n'
    files = {
        "task.toml": f'version = "1.0"\n[metadata]\n{image}',
        "instruction.md": "Say what the greeting is.",
        "environment/parts/greet": '#!/bin/sh\necho "$GREETING"\n',
        "solution/solve.sh": '#!/bin/sh\nmkdir -p /app && echo "$GREETING" > /app/answer\n',
        "tests/test.sh": f"#!/bin/sh\nif {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        **({"environment/Dockerfile": dockerfile} if dockerfile else {}),
    }
    write_files(folder, files)


def test_built_and_judged_in_slots(tmp_path: Path):
    for name, parts in TASKS.items():
        write_task(tmp_path / "tasks" / name, *parts)
    with serving("--slots-per-container", "4") as server:
        urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), f"{server.url}/e2b")
        options = ("--env", "e2b", "-n", "2", "-q", "-y")
        runs = [json.dumps(["run", "-p", "tasks", *options, "-a", agent, "-o", agent]) for agent in ("oracle", "nop")]
        run("python", "-c", RUNS, *runs, folder=tmp_path, E2B_API_KEY=TOKEN, PYTHONPATH=f"{SDK}:{ROOT}", **urls)
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        assert rewards(tmp_path / agent) == ([reward] * len(TASKS), 0), [
            json.loads(file.read_text()).get("exception_info") for file in tmp_path.glob(f"{agent}/*/*/result.json")
        ]
    builds = re.findall(r"template\.end \w+ outcome=(\w+)", server.log)
    assert builds == ["ready"] * len(TASKS), "the second run finds what the first has built"
