"""A policy learns in real slots from what the trajectory API hands out; one position off, and none does.

The proof is sensitive: each of several small mistakes in the project's own code makes it fail.
"""

from __future__ import annotations

import argparse
import json

import pytest
import pytest_asyncio

from atropos.agent.transcript import MASKED, Transcript, sampled_runs
from atropos.envs import APIServerConfig
from atropos.envs.running import groups
from examples.learn.env import LearnConfig, LearnEnv
from examples.learn.school import School
from examples.learn.trainer import SHIFTS, shifted
from examples.policy.tokenizer import FOLDER
from examples.serve.processes import program

ARMS = ("as sent", "masks +1", "logprobs +1")


def test_shift_is_by_one():
    assert shifted([1, 2, 3], 1, -100) == [-100, 1, 2]
    assert shifted([1, 2, 3], -1, -100) == [2, 3, -100]
    assert shifted([1, 2, 3], 0, -100) == [1, 2, 3]
    assert {abs(by) for pair in SHIFTS.values() for by in pair} == {0, 1}


@pytest.mark.timeout(1200)
async def test_shifted_batches_fail(tmp_path):
    argv = ["-m", "examples.learn", "--shifts", ",".join(ARMS), "--stop-when-learned", "--out", str(tmp_path)]
    argv += ["--group-size=4", "--slots=12"]  # as many updates as with groups of 8, from half the trajectories
    async with program(*argv) as lesson:
        code = await lesson.wait()
    log = (tmp_path / "env.log").read_text() if (tmp_path / "env.log").exists() else ""
    assert code == 0, log[-4000:]
    rows = json.loads((tmp_path / "curve.json").read_text())["rows"]
    assert set(rows) == set(ARMS)
    assert rows["as sent"]["first"] < 0.7
    assert rows["as sent"]["last"] > 0.9
    assert rows["as sent"]["positions_used"] > 0.98
    assert rows["as sent"]["labels"] == rows["as sent"]["tokens_chosen"] > 1000
    assert all(rows[arm]["last"] < 0.3 and rows[arm]["updates"] >= 10 for arm in ARMS[1:])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()
    assert "Traceback" not in log


SENT = groups.scored_group
GIVEN, SAMPLED = Transcript.add_context, Transcript.add_sampled


def unmasked(self, ids):
    GIVEN(self, ids)
    self.masks[len(self.masks) - len(ids) :] = ids


def without_the_last(self, ids, logprobs, weights):
    SAMPLED(self, ids[:-1], logprobs[:-1], weights)


def sent_with(change):
    """`scored_group` with one of its lists changed for each member."""

    def mutant(rollouts, **options):
        group = SENT(rollouts, **options)
        change(group)
        return group

    return mutant


def moved(key, by, fill):
    def change(group):
        group[key] = [shifted(values, by, fill) for values in group[key]]

    return sent_with(change)


def mask_turns(begin, end=None):
    """Some turns of each member masked."""

    def change(group):
        for masks in group["masks"]:
            for first, last in [*sampled_runs(masks)][begin:end]:
                masks[first:last] = [MASKED] * (last - first)

    return sent_with(change)


def mask_last_tokens(group):
    for masks in group["masks"]:
        for _, last in [*sampled_runs(masks)]:
            masks[last - 1] = MASKED


def name_the_first_version(group):
    for facts in group["overrides"]:
        facts["weight_versions"] = [[begin, end, "0"] for begin, end, _ in facts["weight_versions"]]


def reverse(group):
    group["scores"] = [1.0 - score for score in group["scores"]]


MUTANTS = {
    "context unmasked": (Transcript, "add_context", unmasked),
    "each turn's last token lost": (Transcript, "add_sampled", without_the_last),
    "each turn's last token masked": (groups, "scored_group", sent_with(mask_last_tokens)),
    "masks moved": (groups, "scored_group", moved("masks", 1, MASKED)),
    "masks moved back": (groups, "scored_group", moved("masks", -1, MASKED)),
    "logprobs moved": (groups, "scored_group", moved("inference_logprobs", 1, 1.0)),
    "logprobs moved back": (groups, "scored_group", moved("inference_logprobs", -1, 1.0)),
    "first turn masked": (groups, "scored_group", mask_turns(0, 1)),
    "last turn masked": (groups, "scored_group", mask_turns(-1)),
    "scores reversed": (groups, "scored_group", sent_with(reverse)),
    "temperature left out": (groups, "scored_group", sent_with(lambda group: group.update(generation_params={}))),
    "another version named": (groups, "scored_group", sent_with(name_the_first_version)),
}
LATER = {"temperature left out": 24, "another version named": 24}
"""Most updates that a mutant needs to show: until a group has a good score to learn from, temperatures and versions are
alike."""


class Lesson:
    """One pupil's lesson in this process: the env's groups go straight to the trainer, on-policy."""

    def __init__(self, school: School, env: LearnEnv) -> None:
        self._school = school
        self._env = env

    async def after(self, updates: int) -> School:
        """The school after so many updates, from nothing; or after the first group that is wrong."""
        self._school.restart(updates)
        while not self._school.finished(when_learned=True) and not self._school.groups_wrong("amy"):
            group, _ = await self._env.collect_trajectories(await self._env.get_next_item())
            self._school.take(group)
        return self._school


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lesson():
    school = School(argparse.Namespace(shifts=["as sent"], seed=1, updates=1))
    async with school.server.running() as url:
        config = LearnConfig(
            tool_pool_mode="local",
            tokenizer_name=str(FOLDER),
            group_size=8,
            slots_per_container=16,
            max_containers=1,
            max_token_length=4096,
            agent_temperature=0.7,
            agent_max_steps=3,
            allow_network=False,
            slot_memory_mib=128,
            verifier_mode="shared",
            use_wandb=False,
        )
        env = LearnEnv(config, [APIServerConfig(base_url=url, server_type="vllm", model_name="m", api_key="x")])
        try:
            await env.setup()
            yield Lesson(school, env)
        finally:
            await env.shutdown_tool_backend()


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mistake_fails_soon(lesson, monkeypatch, name):
    owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    school = await lesson.after(LATER.get(name, 1))
    assert school.groups_wrong("amy"), "the proof is blind to it"


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_sampled_tokens_are_labels(lesson):
    """That a policy learns from such groups is proved above."""
    school = await lesson.after(updates=10)
    assert school.groups_wrong("amy") == []
    assert school.misjudged == {"amy": 0}
    seen = school.totals("amy")
    assert seen.used == seen.labels == seen.spoken == school.server.sampled["amy"]
