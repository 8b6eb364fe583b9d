"""What lies beside an agent's work is run by no verifier in its place, and honest work is scored beside it.

By tests of tasks in each mode, and by the verifying hooks of both envs. In the default mode all are tried; ATROPOS_FAULTS
above 1 tries all in the others, too, and not every sixth.
"""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from atropos.envs import AgentEnvConfig
from atropos.envs.running import verification
from atropos.envs.running.rollout import HookError
from atropos.tasks import workspace
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from atropos.tools import ToolExecutor, ToolExecutorConfig, build_tool_registry
from tests.e2e.test_hooks_own_files import Agent, Hermes
from tests.e2e.test_tasks import no_server_is_awaited
from tests.files import write_files
from tests.security.rigged_files import FILES
from tests.security.rigged_machines import MACHINES, OWN_PACKAGES
from tests.security.rigged_places import PLACES
from tests.security.rigged_programs import PROGRAMS
from tests.security.rigged_tasks import SURROUNDINGS
from tests.security.test_verification_rigging import CHECK, reward, some

__all__ = ["no_server_is_awaited"]
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]  # some 200 verdicts each

TASKS = SURROUNDINGS | PROGRAMS | MACHINES | FILES | PLACES
ALL = TASKS | {"packages of its own": OWN_PACKAGES}
TRICKS = {(name, trick): command for name, task in TASKS.items() for trick, command in task.tricks.items()}
PACKAGES = {("packages of its own", kind): command for kind, command in OWN_PACKAGES.honest.items()}
HONEST = {(name, kind): command for name, task in TASKS.items() for kind, command in task.honest.items()}
DAEMON = "; (sleep 1000 >/dev/null 2>&1 &)"
"""A program of the agent's that is left running, beside which a view shows its folders in another way: so hooks
verify."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Each task, as its folder is."""
    return {name: load_task(written(tmp_path_factory.mktemp("rigged"), task)) for name, task in ALL.items()}


def written(folder, task):
    """A folder with a task in it."""
    check = "import hashlib, json, re\n" + CHECK.replace('"/workspace/answer"', "(sys.argv[1:] or [WORK])[0]")
    files = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n',
        "instruction.md": task.instruction,
        "environment/Dockerfile": f"FROM debian\nWORKDIR {task.workdir}\n{task.image}",
        "tests/test.sh": f"#!/bin/bash\nif ({task.test}) >&2; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        "tests/check.py": check.replace("WORK", repr(f"{task.workdir}/answer")),
        "tests/expected": "42\n",
    }
    write_files(folder, files)
    return folder


async def each(works, judged):
    """What `judged` gives for the task's name and the commands of each, as many at once as there are slots for two
    each."""
    turn = asyncio.Semaphore(3)

    async def one(key, command):
        async with turn:
            return await judged(key[0], command)

    return dict(zip(works, await asyncio.gather(*(one(*work) for work in works.items())), strict=True))


def guarded(pool, loaded, mode):
    """How tests of a task judge work in a mode."""
    return lambda name, work: reward(pool, loaded[name], work, mode)


async def test_there_are_tricks_enough():
    assert len(TRICKS) >= 150


@pytest.mark.parametrize(
    ("mode", "tricks"), [("view", TRICKS), ("separate", some(TRICKS, 2))], ids=["view", "separate"]
)
async def test_no_trick_raises_a_reward(pool, loaded, mode, tricks):
    found = await each(tricks, guarded(pool, loaded, mode))
    assert {key: given for key, given in found.items() if given} == {}


@pytest.mark.parametrize(("mode", "works"), [("view", HONEST), ("separate", some(HONEST, 2))], ids=["view", "separate"])
async def test_honest_work_is_scored(pool, loaded, mode, works):
    assert await each(works, guarded(pool, loaded, mode)) == dict.fromkeys(works, 1)


async def test_packages_serve_own_code(pool, loaded):
    assert await each(PACKAGES, guarded(pool, loaded, "view")) == dict.fromkeys(PACKAGES, 1)


async def test_packages_hide_from_tests(pool, loaded):
    for trick in OWN_PACKAGES.tricks.values():
        assert await reward(pool, loaded["packages of its own"], trick, "view") == 0


async def test_shared_mode_is_open(pool, loaded):
    """That they are tricks at all."""

    judged, honest = guarded(pool, loaded, "shared"), some(HONEST)
    assert await each(honest, judged) == dict.fromkeys(honest, 1)
    found = await each(some(TRICKS), judged)
    assert sum(given == 1 for given in found.values()) > len(found) // 2, found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def executor(pool):
    async with ToolExecutor(pool=pool, tools=build_tool_registry(["default"]), config=ToolExecutorConfig()) as running:
        yield running


@pytest.fixture
def by_hooks(pool, executor, loaded):
    """Verification by a hook of each env, one after the other in the view of one slot."""
    images, config = TaskImages(pool), AgentEnvConfig(tokenizer_name="none")

    async def judged(name, work):
        task, trajectory = ALL[name], f"hooks-{id(work)}-{name}"
        prepared = await images.prepare(loaded[name])
        slot = await executor.slot(trajectory, image=prepared.image)
        try:
            await workspace.enter(slot, prepared.task)
            await slot.exec(work + DAEMON)
            texts = await verification.begin(executor, trajectory, config, task.instruction)
            return [await verified(kind(executor, trajectory, texts=texts), task) for kind in (Agent, Hermes)]
        except HookError as error:
            print(name, error)
            return [None]
        finally:
            await executor.release_trajectory(trajectory)

    return judged


async def verified(hook, task):
    """Whether a hook finds the work done."""
    await hook.write_file("/tests/check.py", "import hashlib, json, re\n" + CHECK)
    await hook.write_file("/tests/expected", "42\n")
    return (await hook.terminal(f"cd {task.workdir}; ({task.test}) >&2"))["exit_code"] == 0


FOR_HOOKS = [name for name, task in TASKS.items() if task.workdir == "/workspace" and not task.by_texts]
"""What hook envs have: other folders are a setting of theirs, and what hooks will do isn't known before a view opens."""


async def test_no_trick_raises_hooks(by_hooks):
    found = await each(some({key: work for key, work in TRICKS.items() if key[0] in FOR_HOOKS}, 4), by_hooks)
    assert {key: given for key, given in found.items() if any(given)} == {}


async def test_hooks_score_honest_work(by_hooks):
    works = PACKAGES | some({key: work for key, work in HONEST.items() if key[0] in FOR_HOOKS}, 4)
    assert await each(works, by_hooks) == {key: [True, True] for key in works}
