"""The code of the README and of the docs runs as it is written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import privileges

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def policy():
    process = subprocess.Popen([sys.executable, "-m", "examples.policy"], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def process(script: Path, settings: dict[str, object]) -> str:
    """What an env's `process` prints, run as a user would, in its own folder for a home."""
    done = subprocess.run(
        [
            sys.executable,
            script,
            "process",
            *(str(x) for name, value in settings.items() for x in (f"--{name}", value)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(script.parent)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_slot_in_five_lines():
    block = next(block for block in BLOCKS if "pool.lease" in block)
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr


def test_environment_of_ones_own(policy, tmp_path: Path):
    block = next(block for block in BLOCKS if "class CountLines" in block)
    assert len(block.strip().splitlines()) <= 42
    script = tmp_path / "count_lines.py"
    script.write_text(block)
    out = tmp_path / "out.jsonl"
    settings = {
        "env.total_steps": 2,
        "env.max_containers": 1,
        "env.tokenizer_name": policy["tokenizer"],
        "env.data_path_to_save_groups": out,
        "openai.base_url": policy["base_url"],
        "openai.model_name": policy["model"],
    }
    process(script, settings)
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(group["scores"]) for group in groups] == [4, 4]
    assert out.with_suffix(".html").exists()


def lesson(name: str, page: str) -> str:
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return textwrap.dedent(next(block for block in blocks if name in block))


def test_hermes_lesson(policy, tmp_path: Path):
    script, out = tmp_path / "env.py", tmp_path / "out.jsonl"
    script.write_text(lesson("class Solved", "environments"))
    play = [{"calls": [{"name": "terminal", "arguments": {"command": "echo 1 > made"}}]}, "done"]
    row = {"prompt": f"Make it.\n```policy\n{json.dumps(play)}\n```", "check": "grep 1 made"}
    settings = {
        "env.dataset_name": json.dumps([row, {**row, "check": "false"}]),
        "env.max_containers": 1,
        "env.tokenizer_name": policy["tokenizer"],
        "env.data_path_to_save_groups": out,
        "openai.base_url": policy["base_url"],
        "openai.server_type": "vllm",
    }
    process(script, settings)
    scores = [group["scores"] for group in map(json.loads, out.read_text().splitlines())]
    assert sorted(scores) == [[0.0] * 4, [1.0] * 4]


def test_env_without_items_says_so(policy, tmp_path: Path):
    script = tmp_path / "squares.py"
    script.write_text(lesson("class Squares", "tutorial").replace("range(1, 4)", "range(0)"))
    settings = {"openai.base_url": policy["base_url"], "env.tokenizer_name": policy["tokenizer"]}
    said = process(script, settings | {"env.data_path_to_save_groups": tmp_path / "out.jsonl"})
    assert said.startswith("0 groups"), said


def test_tutorial(policy, tmp_path: Path):
    """The env is that of the page, and so is each command but the port; training is tests/e2e/test_learn.py's."""
    script, out = tmp_path / "squares.py", tmp_path / "out.jsonl"
    script.write_text(lesson("class Squares", "tutorial"))
    lines = re.findall(r"^\$ \.venv/bin/(.*)$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE)
    command = next(line for line in lines if "squares.py process" in line)
    flags = shlex.split(command.replace("out.jsonl", str(out)).partition("process ")[2])
    process(
        script,
        {"openai.base_url": policy["base_url"]} | dict(zip([f[2:] for f in flags[::2]], flags[1::2], strict=True)),
    )
    stats = next(line for line in lines if "trajectories stats" in line).replace("out.jsonl", str(out))
    done = subprocess.run(shlex.split(stats), capture_output=True, text=True, check=True, timeout=60)
    assert "12" in done.stdout
    assert not next(line for line in lines if "examples.learn" in line).strip().endswith("\\")


def test_pool_and_executor(tmp_path: Path):
    code = """
import asyncio
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, build_tool_registry

async def main():
    async with SlotPool(SlotPoolConfig(backend="local", slots_per_container=4, max_containers=2)) as pool:
        async with ToolExecutor(pool=pool, tools=build_tool_registry(["default"]), config=ToolExecutorConfig()) as executor:
            result = await executor.execute("trajectory-1", ToolCall(name="terminal", arguments={"command": "echo hi"}))
            assert (result.success, result.exit_code, result.output) == (True, 0, "hi\\n"), result
            await executor.release_trajectory("trajectory-1", reset_workspace=True)
        async with pool.lease("trajectory-2") as slot:
            r = await slot.exec("python3 -c 'print(6*7)'", timeout_s=10)
            assert (r.exit_code, r.output, r.timed_out, r.limit) == (0, "42\\n", False, None), r
            await slot.write_file("a.bin", b"\\x00")
            assert await slot.read_file("a.bin") == b"\\x00"
            snap = await slot.snapshot()
            async with pool.lease("trajectory-3", snapshot=snap) as fork:
                assert await fork.read_file("a.bin") == b"\\x00"
        print(repr(pool), pool.stats())

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


TESTED_ELSEWHERE = {"environments.md", "backends.md", "images.md"}
"""Pages whose code needs a model server, a backend or an image of its own."""
RUN_EACH = """
import json, sys
for name, block in json.load(sys.stdin).items():
    exec(compile(block, name, "exec"), {"__name__": "__main__"})
"""


@privileges.cgroups
def test_the_blocks_of_the_docs() -> None:
    """Each in a namespace of its own; one process for all of them, which imports what they need once."""
    blocks = {
        f"docs/{page.name}, block {number}": block
        for page in sorted((ROOT / "docs").glob("*.md"))
        if page.name not in TESTED_ELSEWHERE
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        )
        if ".cli()" not in block  # an env: run above, with its policy
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(blocks) >= 10
