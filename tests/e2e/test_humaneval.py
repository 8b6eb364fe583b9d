"""HumanEval through the executor on 16 slots: canonical solutions pass, empty bodies don't.

ATROPOS_FAULTS above 1 tries the empty body of every problem, not of every fourth.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atropos.envs import humaneval_check, humaneval_problems
from atropos.envs.adapter import APIServerConfig
from atropos.envs.humaneval_env import (
    MAX_SOLUTION_BYTES,
    SOLUTION,
    HumanEvalEnv,
    HumanEvalEnvConfig,
    answer_in,
)
from atropos.envs.humaneval_problems import judge, load_problems
from atropos.envs.running.rollout import TaskFault
from atropos.errors import ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tools import ToolCall, ToolExecutor, build_tool_registry
from examples.policy.tokenizer import FOLDER
from tests.repeats import TIMES
from tests.settings import shows

REPO = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ATROPOS_HUMANEVAL") or REPO.parent / "shared" / "data" / "HumanEval.jsonl.gz")
SLOTS = 16
EMPTY_EVERY = 1 if TIMES > 1 else 4


@pytest.fixture(scope="module")
async def executor():
    config = SlotPoolConfig(backend="local", slots_per_container=8, min_containers=2, max_containers=2)
    async with (
        SlotPool(config) as pool,
        ToolExecutor(pool=pool, tools=build_tool_registry(["default"])) as running,
    ):
        yield running
        await running.close()
        assert pool.stats().leased == 0


async def written(executor, problem):
    """As an agent would: the solution is written with a tool, and what was written is judged, in a fresh slot."""
    path, text = f"{problem.name.replace('/', '-')}.py", problem.prompt + problem.canonical_solution
    result = await executor.execute("agent", ToolCall(name="write_file", arguments={"path": path, "content": text}))
    assert result.success, result.error
    return (await (await executor.slot("agent")).read_file(path)).decode()


async def judged(executor, problem, text, timeout_s=120):
    name = f"{problem.name}-{hash(text)}"
    try:
        return await judge(await executor.slot(name), problem, text, timeout_s=timeout_s)
    finally:
        await executor.release_trajectory(name)


async def outcomes(judgements):
    """What each comes to, as many at once as there are slots."""
    room = asyncio.Semaphore(SLOTS)

    async def one(judgement):
        async with room:
            return await judgement

    return dict(zip(judgements, await asyncio.gather(*map(one, judgements.values())), strict=True))


@pytest.fixture(scope="module")
def problems():
    if not DATA.is_file():
        pytest.skip(f"HumanEval is not at {DATA}; set ATROPOS_HUMANEVAL to HumanEval.jsonl.gz")
    found = load_problems(DATA)
    assert len(found) == 164
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_canonical_solutions_pass(executor, problems):
    texts = {problem.name: await written(executor, problem) for problem in problems}
    await executor.release_trajectory("agent")
    ends = await outcomes({problem.name: judged(executor, problem, texts[problem.name]) for problem in problems})
    assert {name: why for name, (passed, why) in ends.items() if not passed} == {}


@pytest.mark.asyncio(loop_scope="module")
async def test_no_empty_body_passes(executor, problems):
    empty = problems[::EMPTY_EVERY]
    ends = await outcomes({problem.name: judged(executor, problem, problem.prompt + "    pass\n") for problem in empty})
    assert len(ends) >= 41
    assert [name for name, (passed, _) in ends.items() if passed] == []


PROBLEM = {
    "task_id": "Made/0",
    "prompt": 'def double(x: list):\n    """Each number twice.\n    >>> double([1])\n    [1, 1]\n    """\n',
    "entry_point": "double",
    "canonical_solution": "    return [n for n in x for _ in range(2)]\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == [1, 1, 2, 2]\n    assert candidate([]) == []\n",
}


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "made.jsonl"
    path.write_text(json.dumps(PROBLEM) + "\n\n")
    return load_problems(path)[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_solutions_that_cheat_fail(executor, made, monkeypatch):
    # for so long the endless ones take a core
    checker = humaneval_problems.CHECKER.replace("\nCALL_S = 10.0\n", "\nCALL_S = 1.0\n")
    assert checker != humaneval_problems.CHECKER
    monkeypatch.setattr(humaneval_problems, "CHECKER", checker)
    cheats = {
        "ends the process": "import os\nos._exit(0)\n",
        "exits": "import sys\nsys.exit(0)\n",
        "prints a verdict": 'print(\'{"passed": true, "detail": ""}\')\nimport os\nos._exit(0)\n',
        "equals everything": "class E(list):\n    __eq__ = lambda s, o: True\ndef double(x):\n    return E()\n",
        "reads the tests": "import os\ndef double(x):\n    return open('/check/problem.json').read()\n",
        "patches the tests": "import builtins\nbuiltins.AssertionError = type('A', (), {})\ndef double(x):\n    return []\n",
        "no such function": "def other(x):\n    return x\n",
        "is no python": "def double(x) return\n",
        "binary": "\x00\udcff\n",
        "endless": "while True:\n    pass\n",
        "memory": "def double(x):\n    return [0] * (1 << 40)\n",
        "forks": "import os\ndef double(x):\n    for _ in range(20):\n        if os.fork() == 0:\n            os.pause() if hasattr(os, 'pause') else __import__('time').sleep(100)\n    return []\n",
        "floods": "def double(x):\n    while True:\n        print('x' * 100000)\n",
    }
    ends = await outcomes({name: judged(executor, made, text, timeout_s=60) for name, text in cheats.items()})
    assert [name for name, (passed, _) in ends.items() if passed] == []
    assert ends["endless"][1] == "SolutionError: a call took more than 1 s of CPU time"
    assert await judged(executor, made, PROBLEM["prompt"] + PROBLEM["canonical_solution"], timeout_s=60) == (True, "")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("tests", ["def check(candidate) assert", "import nosuch", "def test(candidate):\n    pass\n"])
async def test_broken_tests_judge_nothing(executor, made, tests):
    with pytest.raises(TaskFault, match="the tests of Made/0 can't be run: "):
        await judged(executor, replace(made, test=tests), PROBLEM["prompt"] + PROBLEM["canonical_solution"])


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_have_cpu_time(executor, made, monkeypatch):
    """A solution that runs for a small part of the time, as on a host that is busy, is as good as ever."""
    checker = humaneval_problems.CHECKER.replace("\nCALL_S = 10.0\n", "\nCALL_S = 1.0\n")
    monkeypatch.setattr(humaneval_problems, "CHECKER", checker)
    slow = "import time\ntime.sleep(2.5)\n" + PROBLEM["prompt"] + PROBLEM["canonical_solution"]
    assert await judged(executor, made, slow, timeout_s=60) == (True, "")


@pytest.mark.asyncio(loop_scope="module")
async def test_solution_is_judged_whole(executor, made, tmp_path):
    """The second one raises at its end, which is beyond the bound."""
    config = HumanEvalEnvConfig(
        humaneval_path=str(tmp_path / "made.jsonl"), tool_pool_mode="local", tokenizer_name=str(FOLDER), use_wandb=False
    )
    env = HumanEvalEnv(config, [APIServerConfig(base_url="http://127.0.0.1:9/v1", api_key="x", server_type="openai")])
    env.backend.executor = executor
    text = PROBLEM["prompt"] + PROBLEM["canonical_solution"]
    longest = text + "#" * (MAX_SOLUTION_BYTES - len(text))
    for solution, expected in (
        (longest, (1.0, "")),
        (longest + "\nraise ValueError", (0.0, f"{SOLUTION} is longer than {MAX_SOLUTION_BYTES:,} bytes")),
    ):
        await (await executor.slot("writer")).write_file(SOLUTION, solution)
        score, seen = await env.verify_and_score_trajectory(
            made, "", trajectory_id="writer", exec_tool=env.hook_tools("writer"), agent_result=None
        )
        await executor.release_trajectory("writer")
        assert (score, seen["detail"]) == expected


FEW_IDS = """
import os, subprocess, sys
from atropos.sandbox.linux import syscalls

ready, mapped = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    os.write(ready[1], b".")
    os.read(mapped[0], 1)
    os.setgroups([])
    os.execv("/usr/bin/python3", ["/usr/bin/python3", "-I", *sys.argv[1:]])
os.read(ready[0], 1)
for file in ("uid_map", "gid_map"):
    with open(f"/proc/{child}/{file}", "w") as map:
        map.write("0 0 4096")
os.write(mapped[1], b".")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Runs the check in a user namespace of 4,096 ids, as a slot has it where /etc/subuid gives no more."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can give a namespace several ids")
@pytest.mark.asyncio(loop_scope="module")
async def test_few_user_ids_judge_as_well(tmp_path):
    problem, solution = tmp_path / "problem.json", tmp_path / "solution.py"
    problem.write_text(json.dumps(PROBLEM))
    solution.write_text(PROBLEM["prompt"] + PROBLEM["canonical_solution"])
    command = [sys.executable, "-c", FEW_IDS, humaneval_check.__file__, str(problem), str(solution)]
    judging = await asyncio.create_subprocess_exec(*command, cwd=REPO, stdout=asyncio.subprocess.PIPE)
    out, _ = await judging.communicate()
    assert json.loads(out) == {"passed": True, "detail": ""}


RIGGED = """
import asyncio, json, sys
from atropos.envs.humaneval_problems import HumanEvalProblem, judge
from atropos.slots import SlotPool, SlotPoolConfig

async def main(problem, solution):
    config = SlotPoolConfig(backend="local", slots_per_container=1, max_containers=1)
    async with SlotPool(config) as pool, pool.lease("t") as slot:
        print(await judge(slot, HumanEvalProblem(**problem), solution, timeout_s=60))

asyncio.run(main(*json.load(sys.stdin)))
"""
"""Judges in slots of an ordinary user's server."""


@pytest.mark.asyncio(loop_scope="module")
async def test_one_user_judges_nothing(made):
    solution = (
        "import os\nout = open(f'/proc/{os.getppid()}/fd/1', 'w')\n"
        'print(\'{"passed": true, "detail": ""}\', file=out, flush=True)\nos.kill(os.getppid(), 9)\n'
    )
    command = [sys.executable, "-m", "tests.unit.sandbox.as_user", sys.executable, "-c", RIGGED]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    judging = await asyncio.create_subprocess_exec(*command, cwd=REPO, **pipes)
    out, errors = await judging.communicate(json.dumps([vars(made), solution]).encode())
    text = (out + errors).decode()
    # an ordinary user who has ids in /etc/subuid has slots with a second user
    assert "ConfigError: HumanEval needs slots with a second user" in text or "(False, " in text, text


@shows("humaneval_path")
def test_bad_files_named_by_line(tmp_path):
    path = tmp_path / "x.jsonl"
    for text, named in (("", "holds no problem"), ("{", "line 1 is not JSON"), ("[]", "line 1 is not an object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=named):
            load_problems(path)
    path.write_text('{"task_id": "a", "prompt": "b"}')
    with pytest.raises(ConfigError, match="entry_point is missing"):
        load_problems(path)
    with pytest.raises(ConfigError, match="can't be read"):
        load_problems(tmp_path / "none.jsonl.gz")
    path.write_bytes(b"\x1f\x8bgarbage")
    with pytest.raises(ConfigError, match="can't be read"):
        load_problems(path)


def test_code_in_answer_is_found():
    assert answer_in("text\n```python\na = 1\n```\nmore\n```\nb = 2\n```\n") == "b = 2\n"
    assert answer_in("no code") is None
