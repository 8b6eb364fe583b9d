"""Every example task on real slots: its solution scores 1.0, an untouched workspace 0.0; and verifiers that misbehave."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks import workspace
from atropos.tasks.carry import TaskBroken, VerifierFailed
from atropos.tasks.folder import load_task, load_tasks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
TASKS = load_tasks(EXAMPLES)


@pytest.fixture(scope="module")
async def pool():
    config = SlotPoolConfig(backend="local", slots_per_container=8, min_containers=1, max_containers=1)
    async with SlotPool(config) as running:
        yield running
        stats = running.stats()
        assert stats.leased == 0, "a slot was not given back"


class Attempt:
    """One slot at a time, as a trajectory has it."""

    def __init__(self, pool, task):
        self.pool, self.task, self.slot = pool, task, None

    async def __aenter__(self):
        await self.fresh()
        return self

    async def __aexit__(self, *_):
        await self.slot.release()

    async def fresh(self):
        if self.slot is not None:
            await self.slot.release()
        self.slot = await self.pool.acquire(self.task.name)
        await workspace.build(self.slot, self.task)
        return self.slot

    async def verify(self, mode="task"):
        return await workspace.verify(self.slot, self.task, mode=mode, fresh=self.fresh)


async def attempt(pool, task, room, *, solved):
    async with room, Attempt(pool, task) as run:
        if solved:
            result = await workspace.solve(run.slot, task)
            assert result.exit_code == 0, f"{task.name}: {result.output}"
        return await run.verify()


@pytest.mark.asyncio(loop_scope="module")
async def test_solutions_score_one_and_untouched_workspaces_zero(pool):
    room = asyncio.Semaphore(2 * (os.cpu_count() or 1))
    cases = [(task, solved) for task in TASKS for solved in (True, False)]
    verdicts = await asyncio.gather(*(attempt(pool, task, room, solved=solved) for task, solved in cases))
    wrong = {
        f"{task.name}, {'solved' if solved else 'untouched'}": (verdict.reward, verdict.log)
        for (task, solved), verdict in zip(cases, verdicts, strict=True)
        if verdict.reward != float(solved)
    }
    assert wrong == {}


# ------------------------------------------------------------------------------------------- tasks made for one purpose


def make_task(root, *, test="echo 1 > /logs/verifier/reward.txt", toml="", files=None, setup=None, dockerfile=None):
    for name, text in {
        "task.toml": f'version = "1.0"\n{toml}',
        "instruction.md": "Do it.",
        "environment/given.txt": "given\n",
        "tests/test.sh": test,
        **(files or {}),
        **({"environment/setup.sh": setup} if setup else {}),
        **({"environment/Dockerfile": dockerfile} if dockerfile else {}),
    }.items():
        path = root / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(root / "made")


@contextlib.asynccontextmanager
async def working_on(pool, task):
    async with Attempt(pool, task) as run:
        yield run


@pytest.mark.asyncio(loop_scope="module")
async def test_set_up_follows_the_dockerfile(pool, tmp_path):
    task = make_task(
        tmp_path,
        dockerfile="FROM debian:trixie\nWORKDIR /app\nCOPY given.txt data/\nCOPY sub /opt/sub\nRUN umask && pwd > where\n",
        files={"environment/sub/deep/x.txt": "x"},
    )
    async with working_on(pool, task) as run:
        result = await run.slot.exec("pwd; cat /app/where data/given.txt; ls -A; find /opt/sub -type f")
        lines = result.output.split()
        assert lines[0] == "/workspace"
        assert lines[2] == "given"
        assert "/opt/sub/deep/x.txt" in lines
        assert (await run.slot.exec("[ /app -ef /workspace ] && [ ! -e Dockerfile ]")).exit_code == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_set_up_that_fails_or_hangs_is_the_tasks_fault(pool, tmp_path):
    for setup, toml, named in (
        ("echo no such luck; exit 3", "", "no such luck"),
        ("sleep 60", "[environment]\nbuild_timeout_sec = 0.5", "took too long"),
    ):
        task = make_task(tmp_path, setup=setup, toml=toml)
        slot = await pool.acquire("broken")
        async with slot:
            with pytest.raises(TaskBroken, match=named):
                await workspace.build(slot, task)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("test", "toml", "named"),
    [
        ("true", "", "wrote no"),
        ("echo much > /logs/verifier/reward.txt", "", "holds no reward"),
        ("echo nan > /logs/verifier/reward.txt", "", "not finite"),
        ("echo 1 2 > /logs/verifier/reward.txt", "", "holds no reward"),
        (": > /logs/verifier/reward.txt", "", "holds no reward"),
        ("mkdir /logs/verifier/reward.txt", "", "wrote no"),
        ("echo '{}' > /logs/verifier/reward.json", "", "object of numbers"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", "", "not a number"),
        ("sleep 60; echo 1 > /logs/verifier/reward.txt", "[verifier]\ntimeout_sec = 0.5", "took longer"),
    ],
)
async def test_a_verifier_without_a_reward_is_no_score(pool, tmp_path, test, toml, named):
    task = make_task(tmp_path, test=test, toml=toml)
    async with working_on(pool, task) as run:
        with pytest.raises(VerifierFailed, match=named):
            await run.verify()


@pytest.mark.asyncio(loop_scope="module")
async def test_rewards_are_read_as_written(pool, tmp_path):
    for test, reward in (
        ("echo 0.25 > /logs/verifier/reward.txt; exit 7", 0.25),
        ("printf ' 1e-1 \\n' > /logs/verifier/reward.txt", 0.1),
        ('echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json', 0.5),
        ("echo '{\"accuracy\": 0.75}' > /logs/verifier/reward.json", 0.75),
    ):
        async with working_on(pool, make_task(tmp_path, test=test)) as run:
            assert (await run.verify()).reward == reward


@pytest.mark.asyncio(loop_scope="module")
async def test_the_verifier_runs_clean_and_after_the_agents_processes(pool, tmp_path):
    test = """
    out=0
    [ "$PWD" = /workspace ] || out=wrong-folder
    [ -z "$LEFT_BY_AGENT" ] || out=agent-environment
    [ "$FROM_TOML" = yes ] || out=no-toml-environment
    [ "$(cat /workspace/given.txt)" = given ] || out=agent-changed
    python3 -c 'import json' || out=python
    pgrep -f agent-daemon >/dev/null 2>&1 && out=agent-process
    [ -e /tests/planted ] && out=planted
    [ "$out" = 0 ] && echo 1 > /logs/verifier/reward.txt || echo "why: $out"
    """
    task = make_task(tmp_path, test=test, toml='[verifier.env]\nFROM_TOML = "yes"\n')
    spoil = """
    mkdir -p /tests /logs/verifier ~/.local/lib
    echo 0 > /tests/planted; echo 1 > /logs/verifier/reward.txt; export LEFT_BY_AGENT=1
    echo 'export LEFT_BY_AGENT=1' >> ~/.bashrc; echo 'export LEFT_BY_AGENT=1' >> ~/.bash_profile
    for v in $(ls -d /usr/lib/python3.* | sed 's,.*/,,'); do
      mkdir -p ~/.local/lib/$v/site-packages
      echo 'import os; os._exit(0)' > ~/.local/lib/$v/site-packages/usercustomize.py
    done
    (exec -a agent-daemon setsid sleep 1000) >/dev/null 2>&1 &
    (while :; do echo 0 > /logs/verifier/reward.txt; sleep 0.01; done) >/dev/null 2>&1 &
    """
    for mode in ("shared", "separate"):
        async with working_on(pool, task) as run:
            assert (await run.slot.exec(spoil)).exit_code == 0
            assert (await run.verify(mode)).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(pool, tmp_path):
    test = """
    cat /workspace/kept.txt /data/one.txt > /logs/verifier/seen 2>&1
    [ -e /workspace/given.txt ] && echo given-still-there >> /logs/verifier/seen
    [ -e /data/other.txt ] && echo other >> /logs/verifier/seen
    [ -x /workspace/run ] && [ "$(readlink /workspace/link)" = kept.txt ] || echo modes >> /logs/verifier/seen
    [ -e /root/outside ] && echo outside >> /logs/verifier/seen
    [ "$(bash --version | head -c 3)" = GNU ] || echo shell >> /logs/verifier/seen
    if [ "$(tr '\\n' ' ' < /logs/verifier/seen)" = "kept one " ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
    cat /logs/verifier/seen
    """
    toml = 'artifacts = ["/workspace", "/data/one.txt", "/missing"]\n[verifier]\nenvironment_mode = "separate"\n'
    task = make_task(tmp_path, test=test, toml=toml)
    work = """
    set -e
    rm given.txt; echo kept > kept.txt; ln -s kept.txt link; printf '#!/bin/sh\\n' > run; chmod 755 run
    mkdir -p /data; echo one > /data/one.txt; echo other > /data/other.txt; touch /root/outside
    mkfifo pipe; mkdir deep; ln -s / deep/root
    rm /bin; mkdir /bin; printf '#!/usr/bin/env python3\\nprint("evil")\\n' > /bin/bash; /usr/bin/chmod 755 /bin/bash
    """
    async with working_on(pool, task) as run:
        await run.slot.exec(work)
        verdict = await run.verify()
        assert (verdict.reward, verdict.log) == (1.0, "kept\none\n")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_large_artifact_is_carried_in_pieces(pool, tmp_path):
    test = "cmp <(head -c 40000000 /dev/zero) big && [ -s small ] && echo 1 > /logs/verifier/reward.txt"
    task = make_task(tmp_path, test=test)
    async with working_on(pool, task) as run:
        await run.slot.exec("head -c 40000000 /dev/zero > big; echo x > small")
        assert (await run.verify("separate")).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_that_fills_its_disk_gets_no_reward_where_it_worked_and_its_due_in_a_fresh_slot(pool, tmp_path):
    task = make_task(tmp_path, test="[ -s /workspace/given.txt ] && echo 1 > /logs/verifier/reward.txt")
    fill = "head -c 2000000000 /dev/zero > /var/tmp/fill 2>/dev/null || head -c 2000000000 /dev/zero > /tmp/fill; echo"
    async with working_on(pool, task) as run:
        await run.slot.exec(fill)
        with pytest.raises(VerifierFailed):
            await run.verify("shared")
        assert (await run.verify("separate")).reward == 1.0
