"""The task env plays a task with a solution only where that scores 1: what a base lacks is no wrong answer."""

from __future__ import annotations

import os

import pytest

from atropos.envs import TaskEnv
from atropos.errors import ConfigError, SlotLost
from atropos.tasks import workspace
from tests.e2e.hermes_support import call, groups, script
from tests.e2e.test_task_env import run, steps_task, task
from tests.settings import shows

SOLVED = "test -e out; echo $((1 - $?)) > /logs/verifier/reward.txt"
NOTHING = script({"calls": [call("terminal", command="true")]}, "done")
LACKING = "no-such-program && touch out"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/atropos/proofs"


@pytest.fixture
def tried(monkeypatch):
    """The names of the tasks whose solutions were run."""
    found, solve = [], workspace.solve

    async def counted(slot, one):
        found.append(one.name)
        return await solve(slot, one)

    monkeypatch.setattr(workspace, "solve", counted)
    return found


def solvable(root, name, solution="touch out", prompt=NOTHING, test=SOLVED):
    task(root, name, prompt=prompt, test=test)
    path = root / "tasks" / name / "solution/solve.sh"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{solution}\n")


@shows("check_tasks")
@pytest.mark.parametrize("when", ["first", "all"])
async def test_unsolvable_is_left_out(policy, tmp_path, caplog, tried, when):
    solvable(tmp_path, "fine")
    solvable(tmp_path, "lacks", LACKING)
    task(tmp_path, "open", prompt=NOTHING)  # has no solution: nothing is known of it
    _, env = await run(policy, tmp_path, check_tasks=when, epochs=2)
    played = [(group["atropos"]["item"], group["scores"]) for group in groups(tmp_path)]
    assert sorted(played) == [("fine", [0.0, 0.0])] * 2 + [("open", [1.0, 1.0])] * 2
    assert "no-such-program: command not found" in env.left_out.pop("lacks")
    assert env.left_out == {}
    assert (env.metrics.as_dict()["env/items_left_out"], env.metrics.dropped) == (1, {})
    assert "atropos_env_items_left_out_total" in env.metrics_text()
    assert len([one for one in caplog.messages if one.startswith("task lacks is left out, since")]) == 1
    assert sorted(tried) == ["fine", "lacks"]


async def test_unprepared_is_left_out(policy, tmp_path, tried):
    solvable(tmp_path, "fine")
    solvable(tmp_path, "unbuilt")
    (tmp_path / "tasks/unbuilt/environment").mkdir(exist_ok=True)
    (tmp_path / "tasks/unbuilt/environment/Dockerfile").write_text("FROM debian\nRUN no-such-program\n")
    found, env = await run(policy, tmp_path)
    assert (list(found), tried, env.metrics.dropped) == (["fine"], ["fine"], {})
    assert "it can't be prepared" in env.left_out["unbuilt"]
    assert "no-such-program" in env.left_out["unbuilt"]


async def test_unchecked_are_played(policy, tmp_path, tried):
    solvable(tmp_path, "lacks", LACKING)
    found, _ = await run(policy, tmp_path, check_tasks="off")
    assert (found["lacks"]["scores"], tried) == ([0.0, 0.0], [])


async def test_proof_holds_until_a_change(policy, tmp_path, tried, cache, monkeypatch):
    solvable(tmp_path, "t")
    for _ in range(2):
        await run(policy, tmp_path)
    assert tried == ["t"]
    solvable(tmp_path, "t", "echo x > out")
    await run(policy, tmp_path)
    assert tried == ["t"] * 2
    solvable(tmp_path, "t", "echo x > out", test=f"true; {SOLVED}")
    await run(policy, tmp_path)
    assert tried == ["t"] * 3
    monkeypatch.setattr("atropos.tasks.proof.MOST_KEPT", 2)
    task(tmp_path, "t", toml="[agent]\ntimeout_sec = 77.0\n", prompt=NOTHING, test=f"true; {SOLVED}")
    await run(policy, tmp_path)
    assert tried == ["t"] * 4
    assert len(os.listdir(cache)) == 2


async def test_failed_proof_is_not_kept(policy, tmp_path, tried):
    for solution, left_out in ((LACKING, True), (LACKING, True), ("touch out", False)):
        solvable(tmp_path, "t", solution)
        solvable(tmp_path, "other", "echo other > out")
        _, env = await run(policy, tmp_path)
        assert ("t" in env.left_out) is left_out
    assert tried.count("t") == 3
    assert tried.count("other") == 1


async def test_outages_prove_nothing(policy, tmp_path, monkeypatch):
    solvable(tmp_path, "t")
    tries, solve = [], workspace.solve

    async def lost_once(slot, one):
        tries.append(one.name)
        if len(tries) == 1:
            raise SlotLost("the slot is lost")
        return await solve(slot, one)

    monkeypatch.setattr(workspace, "solve", lost_once)
    found, env = await run(policy, tmp_path)
    assert found["t"]["scores"] == [0.0, 0.0]
    assert (env.left_out, dict(env.metrics.retries), len(tries)) == ({}, {"slot_lost": 1}, 2)


async def test_steps_are_solved_in_turn(policy, tmp_path):
    for name, second in (("both", "test -e one && touch two"), ("half", LACKING)):
        folder = steps_task(
            tmp_path, name, [("true", SOLVED.replace("out", "one"), ""), ("true", SOLVED.replace("out", "two"), "")]
        )
        for step, solution in (("s0", "touch one"), ("s1", second)):
            (folder / step / "solution").mkdir()
            (folder / step / "solution/solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    found, env = await run(policy, tmp_path)
    assert (list(found), list(env.left_out)) == (["both"], ["half"])
    assert "its solution scores 0.5" in env.left_out["half"]


@pytest.mark.parametrize("when", ["first", "all"])
async def test_run_without_tasks_ends(policy, tmp_path, when):
    solvable(tmp_path, "lacks", LACKING)
    with pytest.raises(ConfigError, match="no task can be solved here"):
        await run(policy, tmp_path, check_tasks=when)


async def test_evaluations_are_solvable(policy, tmp_path, capsys):
    solvable(tmp_path, "fine", prompt=script({"calls": [call("terminal", command="touch out")]}, "done"))
    solvable(tmp_path, "lacks", LACKING)

    class Evaluating(TaskEnv):
        async def process_manager(self):
            await self._run_evaluate()

    await run(policy, tmp_path, cls=Evaluating, data_path_to_save_groups=str(tmp_path / "none.jsonl"))
    assert "1 of 1 solved, mean score 1.0000" in capsys.readouterr().out
