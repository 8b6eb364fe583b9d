"""What lies beside an agent's work is run by no verifier in its place, and honest work is scored beside it."""

from __future__ import annotations

import asyncio

import pytest

from atropos.tasks.folder import load_task
from tests.security.rigged_tasks import TASKS
from tests.security.test_verification_rigging import CHECK, reward

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRICKS = [(name, trick) for name, task in TASKS.items() for trick in task.tricks]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Each task, as its folder is."""
    found = {}
    for number, (name, task) in enumerate(TASKS.items()):
        folder = tmp_path_factory.mktemp("rigged") / f"{number:02}"
        check = "import hashlib, json, re\n" + CHECK.replace('"/workspace/answer"', "(sys.argv[1:] or [WORK])[0]")
        dockerfile = f"FROM debian\nWORKDIR {task.workdir}\n{task.image}"
        files = {
            "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n',
            "instruction.md": "Write 42 into answer.",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": f"#!/bin/bash\nif ({task.test}) >&2; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
            "tests/check.py": check.replace("WORK", repr(f"{task.workdir}/answer")),
            "tests/expected": "42\n",
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        found[name] = load_task(folder)
    return found


async def rewards(pool, works, mode):
    """The reward of each pair of a task and what is done in it, as many at once as there are slots for two each."""
    turn = asyncio.Semaphore(3)

    async def one(task, work):
        async with turn:
            return await reward(pool, task, work, mode)

    return dict(zip(works, await asyncio.gather(*(one(*pair) for pair in works.values())), strict=True))


async def test_there_are_tricks_enough():
    assert len(TRICKS) >= 60


@pytest.mark.parametrize("mode", ["view", "separate", "shared"])
async def test_honest_work_is_scored(pool, loaded, mode):
    works = {name: (loaded[name], task.work) for name, task in TASKS.items()}
    assert await rewards(pool, works, mode) == dict.fromkeys(works, 1)


@pytest.mark.parametrize("mode", ["view", "separate"])
async def test_no_trick_raises_a_reward(pool, loaded, mode):
    works = {pair: (loaded[pair[0]], TASKS[pair[0]].tricks[pair[1]]) for pair in TRICKS}
    found = await rewards(pool, works, mode)
    assert {pair: given for pair, given in found.items() if given} == {}


async def test_in_the_agents_slot_most_tricks_raise_one(pool, loaded):
    """That they are tricks at all."""
    works = {pair: (loaded[pair[0]], TASKS[pair[0]].tricks[pair[1]]) for pair in TRICKS}
    found = await rewards(pool, works, "shared")
    assert sum(given == 1 for given in found.values()) > len(works) // 2, found
