"""The verifiers of README, docs and examples: the right answer scores 1, and five wrong ones 0."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from atropos.envs import AgentEnv, ToolContext
from atropos.envs.hermes.bridge import bridged
from atropos.envs.running.hooks import ExecTool
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tools import ToolExecutor, ToolExecutorConfig, build_tool_registry
from examples.envs.data_env import DataEnv, measurements
from examples.learn.env import LearnEnv
from examples.learn.task import WORDS, door

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
async def executor():
    config = SlotPoolConfig(backend="local", slots_per_container=4, min_containers=1, max_containers=1)
    tools = build_tool_registry(["default"])
    async with SlotPool(config) as pool, ToolExecutor(pool=pool, tools=tools, config=ToolExecutorConfig()) as running:
        yield running


def documented(page: str, name: str):
    """A class as a page writes it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    (block,) = (each for each in blocks if f"class {name}(" in each)
    namespace = {"__name__": "documented"}
    exec(compile(block, page, "exec"), namespace)
    return namespace[name]


async def score(executor, env_class, item, trajectory, *commands) -> float:
    """What an env's hook gives for a workspace in which these commands ran."""
    env, slot = env_class.__new__(env_class), await executor.slot(trajectory)
    run = lambda call: executor.execute(trajectory, call)  # noqa: E731
    try:
        if issubclass(env_class, AgentEnv):
            preparing = ExecTool(executor, trajectory, run, setup=True)
            await env.setup_trajectory_workspace(item, trajectory_id=trajectory, exec_tool=preparing)
        for command in commands:
            await slot.exec(command)
        if not issubclass(env_class, AgentEnv):
            ctx = ToolContext(executor, trajectory)
            return await bridged(lambda: env.compute_reward(item, None, ctx))
        context = {"trajectory_id": trajectory, "exec_tool": ExecTool(executor, trajectory, run), "agent_result": None}
        reward, _ = await env.verify_and_score_trajectory(item, "1", **context)
        return reward
    finally:
        await executor.release_trajectory(trajectory)


DATA = {"name": "seed-0", "seed": 0, "sensor": "attic"}
MEDIAN = statistics.median(row["celsius"] for row in measurements(0) if row["sensor"] == "attic")
OTHERS = statistics.median(row["celsius"] for row in measurements(0))
SQUARES, COUNT_LINES = ("docs/tutorial.md", "Squares"), ("README.md", "CountLines")
SOLVED, CHECKED = ("docs/environments.md", "Solved"), {"check": "grep -qx 42 answer.txt"}
DOOR = door(1, 0, WORDS)
CASES = {
    "README": (
        *(COUNT_LINES, {"lines": 12}, "wc -l < numbers.txt > answer.txt"),
        (
            "true",
            "echo 1 > answer.txt",
            "cp numbers.txt answer.txt",
            "echo 112 > answer.txt",
            "echo 12 or 13 > answer.txt",
        ),
    ),
    "tutorial": (
        *(SQUARES, {"number": 1}, "echo 1 > answer.txt"),
        (
            "true",
            "echo 2 > answer.txt",
            "echo 11 > answer.txt",
            "echo -1 > answer.txt",
            "printf '0\\n1\\n' > answer.txt",
        ),
    ),
    "environments": (
        *(SOLVED, CHECKED, "echo 42 > answer.txt"),
        ("true", "echo 421 > answer.txt", "echo 'not 42' > answer.txt", "mkdir answer.txt", "echo exit 0 > ~/.bashrc"),
    ),
    "data": (
        *(DataEnv, DATA, f"echo '{{\"median\": {MEDIAN:.2f}}}' > answer.json"),
        (
            *("true", f"echo '{{\"median\": {OTHERS:.2f}}}' > answer.json", f"echo {MEDIAN:.2f} > answer.json"),
            *("echo '{\"median\": null}' > answer.json", f"echo '{{\"median\": [{MEDIAN:.2f}]}}' > answer.json"),
        ),
    ),
    "learn": (
        *(LearnEnv, DOOR, f"./open {DOOR.place}; echo {DOOR.notes[DOOR.place]} > door"),
        (
            "true",
            "cat notes/* > door",
            f"echo {DOOR.notes[DOOR.place]} > door",
            f"./open {DOOR.place}",
            "./open nowhere; ls > door",
        ),
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_right_is_1_five_wrong_0(executor, name):
    env_class, item, right, wrong = CASES[name]
    if isinstance(env_class, tuple):
        env_class = documented(*env_class)
    assert len(set(wrong)) == 5
    assert await score(executor, env_class, item, f"{name}-right", right) == 1
    scores = {
        command: await score(executor, env_class, item, f"{name}-{n}", command) for n, command in enumerate(wrong)
    }
    assert scores == dict.fromkeys(wrong, 0.0)
