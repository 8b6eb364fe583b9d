"""Truth 4 in a whole env: sandboxes killed at random and a flaky inference server change no token, no score, no group.

Each attempt of a trajectory has one chance in five that its sandbox is killed, at a call and a moment drawn by its
name; one inference call in ten fails, all through the run. What is sent is compared with a run of the same seeds
without faults, and what was done with what was lost: faults may cost the attempts that they ended, and nothing else.
`ATROPOS_FAULTS=N` runs N times as many groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos.envs import AgentEnvConfig, APIServerConfig
from atropos.tools import ToolCall
from examples.policy.tokenizer import FOLDER
from examples.policy.truth import Truth
from tests.e2e.hermes_support import running_policy, sampled
from tests.e2e.script_env import ScriptEnv
from tests.e2e.test_demo_endings import containers, left_by, name
from tests.processes import descendants, first_processes
from tests.repeats import TIMES
from tests.waiting import until

GROUPS = 6 * TIMES
MEMBERS, TURNS = 4, 5
KILLED, FAILING = 0.2, 0.1
NAMESPACE = ToolCall(name="terminal", arguments={"command": "readlink /proc/self/ns/pid"})


@dataclass
class Work:
    """What a run did.

    Attributes:
        calls: begun, by attempt of a trajectory.
        killed: attempts whose sandbox was killed.
        unverified: of these, attempts whose last call in a turn was answered before the kill: opening the view fails.
        answers: of the inference server.
    """

    calls: Counter[str] = field(default_factory=Counter[str])
    killed: set[str] = field(default_factory=set[str])
    unverified: set[str] = field(default_factory=set[str])
    answers: int = 0
    seconds: float = 0.0


class NumberingEnv(ScriptEnv):
    """Each turn appends its number to a file; the score says whether each stands there once, and whose file it is."""

    kills = 0.0
    count = GROUPS
    work: Work

    def build_task(self, item):
        turns = [
            {
                "calls": [
                    {"name": "terminal", "arguments": {"command": f"sleep 0.05; echo {turn} >> answer; cat answer"}}
                ]
            }
            for turn in range(TURNS)
        ]
        return f"{item['name']}\n```policy\n{json.dumps([*turns, 'done'])}\n```"

    async def get_next_item(self):
        number = next(self.numbers)
        return {"name": f"item-{number}"} if number < self.count else None

    async def setup_agent_env(self):
        self.numbers = itertools.count()

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> Any:
        number = self.work.calls[trajectory_id]
        self.work.calls[trajectory_id] += 1
        draw = random.Random(trajectory_id)
        if draw.random() >= self.kills or number != draw.randrange(TURNS + 1):
            return await super().execute_tool(trajectory_id, call)
        self.work.killed.add(trajectory_id)
        told = await super().execute_tool(trajectory_id, NAMESPACE)
        async with asyncio.TaskGroup() as tasks:  # an infrastructure failure stays one, within a group of errors too
            running = tasks.create_task(super().execute_tool(trajectory_id, call))
            await asyncio.sleep(draw.random() * 0.1)
            kill_namespace(told.output.strip())
        if number == TURNS - 1:
            self.work.unverified.add(trajectory_id)
        return running.result()

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        written = await exec_tool(ToolCall(name="terminal", arguments={"command": "cat answer"}))
        member = int(trajectory_id.rpartition("-r")[0 if "-r" in trajectory_id else 2].rpartition("-")[2])
        right = written.output.split() == [str(turn) for turn in range(TURNS)]
        return right * (1 + member) / MEMBERS, {}

    async def shutdown_tool_backend(self) -> None:
        if self.pool is not None:
            stats = self.pool.stats()
            assert (stats.leased, stats.waiting) == (0, 0), stats
        await super().shutdown_tool_backend()


def kill_namespace(namespace: str) -> None:
    """Kill a sandbox by the PID namespace that its programs see: its first process.

    None of its processes is there where its container was killed at the same moment.
    """
    for pid in first_processes(namespace=namespace):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def run(
    folder: Path, *, kills: float, failing: float, env_class: type[NumberingEnv] = NumberingEnv, count: int = GROUPS
):
    """The groups by item, the server's log, the env, and what was done."""
    folder.mkdir()
    path, work = folder / "groups.jsonl", Work()
    async with running_policy(folder, fault="503", fault_rate=failing) as (url, log):
        config = AgentEnvConfig(
            tool_pool_mode="local",
            tokenizer_name=str(FOLDER),
            slots_per_container=4,
            min_containers=2,
            max_containers=2,
            group_size=MEMBERS,
            include_messages=True,
            ensure_scores_are_not_same=False,
            use_wandb=False,
            trajectory_retries=12,
            model_retries=1,
            model_timeout_s=60,
            seed=3,
            slot_memory_mib=256,
            allow_network=False,
            data_path_to_save_groups=str(path),
        )
        env = env_class(config, [APIServerConfig(base_url=url, server_type="vllm", model_name="m", api_key="x")])
        env.kills, env.work, env.count = kills, work, count
        started = time.monotonic()
        await env.process_manager()
        work.seconds = time.monotonic() - started
    work.answers = len(log.read_text().splitlines()) - 3  # those of the start
    groups = {group["atropos"]["item"]: group for group in map(json.loads, path.read_text().splitlines())}
    return groups, Truth(log), env, work


async def test_faults_change_no_group(tmp_path):
    tasks = asyncio.all_tasks()
    quiet, _, _, calm = await run(tmp_path / "quiet", kills=0, failing=0)
    descriptors = len(os.listdir("/proc/self/fd"))
    stormy, truth, env, storm = await run(tmp_path / "stormy", kills=KILLED, failing=FAILING)
    retries = sum(env.metrics.retries.values())
    trajectories = GROUPS * MEMBERS
    lost = {attempt: calls for attempt, calls in storm.calls.items() if attempt not in scored(stormy)}
    print(
        f"\n{trajectories} trajectories; {len(storm.killed)} sandboxes killed of {len(storm.calls)}; tried again: "
        f"{dict(env.metrics.retries)}; calls {sum(calm.calls.values())} -> {sum(storm.calls.values())} "
        f"({sum(storm.calls.values()) / sum(calm.calls.values()):.2f}), of these lost {sum(lost.values())}; answers "
        f"{calm.answers} -> {storm.answers} ({storm.answers / calm.answers:.2f}); {calm.seconds:.1f} s -> "
        f"{storm.seconds:.1f} s ({storm.seconds / calm.seconds:.2f})"
    )
    assert set(stormy) == set(quiet) == {f"item-{n}" for n in range(GROUPS)}
    assert not env.metrics.dropped
    for item, group in stormy.items():
        assert group["scores"] == quiet[item]["scores"] == [(1 + n) / MEMBERS for n in range(MEMBERS)]
        for key in ("tokens", "masks", "inference_logprobs", "messages"):
            assert group[key] == quiet[item][key], f"{key} of {item} differ from those without faults"
        for index in range(MEMBERS):
            runs = sampled(group, index)
            assert len(runs) == TURNS + 1
            assert all(run in truth for run in runs)

    assert len(storm.killed) >= KILLED / 2 * trajectories
    assert retries >= len(storm.killed) / 2
    # What faults may cost: the attempts that they ended, up to where they were; no sibling, and nothing twice.
    whole = TURNS + 1  # calls of a trajectory, verification included; as many answers
    assert sum(calm.calls.values()) == calm.answers == trajectories * whole
    assert len(storm.calls) <= trajectories + retries
    assert sum(storm.calls.values()) == trajectories * whole + sum(lost.values())
    assert all(calls <= whole for calls in storm.calls.values())
    # an answer to each, and the final one of attempts that ended before the call that verifies them
    before_verification = sum(storm.calls[attempt] == TURNS for attempt in storm.unverified)
    assert 0 <= storm.answers - sum(storm.calls.values()) <= before_verification
    assert storm.answers / calm.answers <= 1 + retries / trajectories
    await nothing_left(tasks)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "no descriptor")


def scored(groups: dict[str, Any]) -> set[str]:
    """The attempts whose work is in the groups."""
    return {summary["trajectory_id"] for group in groups.values() for summary in group["atropos"]["trajectories"]}


async def nothing_left(tasks: set[asyncio.Task[Any]]) -> None:
    """No sandbox, server, mount, folder or task of this process is left; what was just killed may need a moment."""
    kinds = ("atropos-runner", "python")
    await until(lambda: not any(name(pid).startswith(kinds) for pid in descendants()), "no sandbox and no server")
    assert left_by(os.getpid()) == []
    await until(lambda: not asyncio.all_tasks() - tasks, "no task")


class CatchingEnv(NumberingEnv):
    """Its verification catches everything, and its sandbox is killed while it runs."""

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        first = "-r" not in trajectory_id
        # the first attempt's check ends with its sandbox, however late the kill comes
        check = ToolCall(name="terminal", arguments={"command": f"sleep {120 if first else 0}; cat answer"})
        try:
            told = await exec_tool(NAMESPACE)
            async with asyncio.TaskGroup() as tasks:
                written = tasks.create_task(exec_tool(check))
                await asyncio.sleep(0.1)
                if first:
                    self.work.killed.add(trajectory_id)
                    kill_namespace(told.output.strip())
        except Exception:
            return 0.0, {}
        return float(written.result().output.split() == [str(turn) for turn in range(TURNS)]), {}


async def test_killed_is_never_scored(tmp_path):
    groups, _, env, work = await run(tmp_path / "caught", kills=0, failing=0, env_class=CatchingEnv, count=3)
    assert len(work.killed) == 3 * MEMBERS
    assert [group["scores"] for group in groups.values()] == [[1.0] * MEMBERS] * 3
    assert sum(env.metrics.retries.values()) == 3 * MEMBERS


class ForkingEnv(NumberingEnv):
    """A group's members start from one prepared workspace; as the first of them work, every container is killed."""

    async def setup_group_workspace(self, item, *, exec_tool):
        await exec_tool(ToolCall(name="terminal", arguments={"command": "echo $RANDOM$RANDOM > prepared"}))

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> Any:
        item = trajectory_id[: len("item-0")]
        if item not in self.work.killed and "setup" not in trajectory_id:
            self.work.killed.add(item)
            for pid in containers(os.getpid()):
                with contextlib.suppress(ProcessLookupError):  # killed for the other group just before
                    os.kill(pid, signal.SIGKILL)
        return await super().execute_tool(trajectory_id, call)

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        seen = await exec_tool(ToolCall(name="terminal", arguments={"command": "cat prepared"}))
        score, _ = await super().verify_and_score_trajectory(
            item, final_response, trajectory_id=trajectory_id, exec_tool=exec_tool, agent_result=agent_result
        )
        return score, {"prepared": seen.output}


async def test_groups_survive_losses(tmp_path):
    count = 2
    groups, _, env, work = await run(tmp_path / "forked", kills=0, failing=0, env_class=ForkingEnv, count=count)
    assert len(work.killed) == len(groups) == count
    assert not env.metrics.dropped
    assert env.metrics.retries["workspace_lost"] >= 1
    assert sum(env.metrics.retries.values()) <= 2 * count * MEMBERS, env.metrics.retries
    for group in groups.values():
        assert group["scores"] == [(1 + n) / MEMBERS for n in range(MEMBERS)]
        assert len({each["info"]["prepared"] for each in group["atropos"]["trajectories"]}) == 1
