"""`process` on a real atroposlib and a real HTTP policy: what is written is true, whole, and says what is missing."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from atropos.agent.transcript import CONTEXT_LOGPROB, MASKED
from atropos.envs import servers
from atropos.envs.running.rollout import GroupDropped, GroupsDropped, HookError, VerifierError
from atropos.errors import AcquireTimeout, ConfigError, InferenceError, NotSupported, SlotLost
from tests.e2e.hermes_support import sampled
from tests.settings import shows
from tests.unit.envs.support import ScriptEnv, StandInExecutor, call, items, make, turns

pytestmark = pytest.mark.waits


def groups_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_true(group, truth):
    """Each sampled run of each trajectory is an entry of the server's log, under exactly its prompt."""
    for index in range(len(group["tokens"])):
        runs = sampled(group, index)
        assert runs
        assert all(run in truth for run in runs)
        pairs = zip(group["masks"][index], group["inference_logprobs"][index], strict=True)
        assert all((mask == MASKED) == (logprob == CONTEXT_LOGPROB) for mask, logprob in pairs)


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_groups_are_as_sampled(policy, tmp_path, server_type):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", server_type=server_type)
    await env.process_manager()
    groups = groups_in(tmp_path / "g.jsonl")
    assert len(groups) == 3
    for group in groups:
        assert len(group["scores"]) == 3
        assert group["group_overrides"] == {}
        assert_true(group, policy.truth)
    assert (tmp_path / "g.html").read_text().count("<details>") == 3 + 9 + 1  # the chart's numbers
    assert env.stand_in.closed
    assert not env.stand_in.live


async def test_group_names_temperature(policy, tmp_path):
    class Env(ScriptEnv):
        def build_agent_config(self, item):
            drawn.append(self.config.agent_temperature if item["name"] == "item-0" else len(drawn))
            return replace(super().build_agent_config(item), temperature=drawn[-1])

    drawn = []
    env = make(Env, policy.url, tmp_path / "g.jsonl", agent_temperature=0.7, process_concurrency=1)
    await env.process_manager()
    same, other, _ = groups_in(tmp_path / "g.jsonl")
    assert same["generation_params"] == {"temperature": 0.7, "logprobs": "policy"}
    assert not any("temperature" in each for each in same["overrides"])
    assert sorted(each["temperature"] for each in other["overrides"]) == [3, 4, 5]


async def test_full_collections_skip_old_objects(policy, tmp_path):
    seen = []

    class Env(ScriptEnv):
        async def setup_agent_env(self):
            seen.append((gc.get_freeze_count(), len(gc.get_objects())))

    await make(Env, policy.url, tmp_path / "g.jsonl").process_manager()
    [(frozen, scanned)] = seen
    assert frozen > 5 * scanned


async def test_history_has_a_bound(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "HISTORY_KEPT", 5)
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    (server,) = env.server.servers
    metrics = await server.wandb_metrics({}, "s")
    assert len(server.request_timings) == 5
    assert metrics["server/s_request_time_avg"] == pytest.approx(sum(server.request_timings) / 5)
    assert metrics["server/s_average_num_attempts"] == 1


@pytest.mark.parametrize("server_type", ["openai", "trl"])
async def test_placeholder_groups_say_so(policy, tmp_path, server_type):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", server_type=server_type)
    await env.process_manager()
    groups = groups_in(tmp_path / "g.jsonl")
    assert [group["scores"] for group in groups] == [[4.0] * 3] * 3
    assert [group["generation_params"]["logprobs"] for group in groups] == ["placeholder"] * 3
    for group in groups:
        assert group["group_overrides"] == {"placeholder_tokens": True}
        assert [len(t) for t in group["tokens"]] == [len(m) for m in group["masks"]]


async def test_lost_slot_keeps_scores(policy, tmp_path):
    failed: set[str] = set()

    class Env(ScriptEnv):
        @staticmethod
        def fault(trajectory, _call):
            if "-r" not in trajectory and trajectory.endswith("-1"):
                failed.add(trajectory)
                raise SlotLost("killed")

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    groups = groups_in(tmp_path / "g.jsonl")
    assert [group["scores"] for group in groups] == [[4.0, 4.0, 4.0]] * 3
    assert sorted(t["attempts"] for g in groups for t in g["atropos"]["trajectories"]) == [1] * 6 + [2] * 3
    assert env.metrics.retries == {"slot_lost": 3}
    assert env.metrics.stop_reasons == {"final": 9}
    assert 0 <= env.metrics.phases["reset"] < 60
    assert failed <= set(env.stand_in.released)


async def test_incomplete_is_dropped(policy, tmp_path):
    class Env(ScriptEnv):
        @staticmethod
        def fault(trajectory, _call):
            if trajectory.startswith("item-1-"):
                raise AcquireTimeout("no slot")

    env = make(Env, policy.url, tmp_path / "g.jsonl", trajectory_retries=1)
    events = []
    env.observers.append(events.append)
    with pytest.raises(GroupsDropped, match=r"1 of 3 groups were dropped \(1 x acquire_timeout\)"):
        await env.process_manager()
    ended = {(event.kind, event.item) for event in events if event.kind in {"group", "dropped"}}
    assert ended == {("group", "item-0"), ("dropped", "item-1"), ("group", "item-2")}
    assert sorted(group["atropos"]["item"] for group in groups_in(tmp_path / "g.jsonl")) == ["item-0", "item-2"]
    assert (tmp_path / "g.html").exists()
    assert env.metrics.dropped == {"acquire_timeout": 1}
    assert not env.stand_in.live


async def test_incurable_faults_are_not_retried(policy, tmp_path):
    tried = []

    class Env(ScriptEnv):
        @staticmethod
        def fault(trajectory, _call):
            tried.append(trajectory)
            raise NotSupported("snapshots: not here")

    env = make(Env, policy.url, tmp_path / "g.jsonl", group_size=1)
    env.items = items(1)
    with pytest.raises(GroupsDropped, match="not_supported"):
        await env.process_manager()
    assert len(tried) == 1


@pytest.mark.parametrize("wrong", ["raises", "exits", "nan", "text", "none", "huge", "long"])
async def test_failed_reward_is_not_zero(policy, tmp_path, wrong, caplog):
    class Env(ScriptEnv):
        async def score_trajectory(self, item, final_response):
            if item["name"] != "item-0":
                return 1.0
            if wrong == "raises":
                raise ZeroDivisionError("in the reward")
            if wrong == "exits":
                sys.exit(0)  # as unittest.main() does
            return {"nan": float("nan"), "text": "1.0", "none": None, "huge": 10**400, "long": 10**5000}[wrong]

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    with pytest.raises(GroupsDropped, match="1 x hook_error"):
        await env.process_manager()
    assert [group["scores"] for group in groups_in(tmp_path / "g.jsonl")] == [[1.0] * 3] * 2
    assert "item-0" in caplog.text


async def test_idle_model_does_score(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl")
    env.items = [{"name": "idle", "script": ["no"]}]
    await env.process_manager()
    assert groups_in(tmp_path / "g.jsonl")[0]["scores"] == [2.0, 2.0, 2.0]


@pytest.mark.slow("starts servers")
@pytest.mark.parametrize("fault", ["503", "nonsense", "reset"])
async def test_flaky_server_loses_none(faulty_policy, tmp_path, fault):
    async with faulty_policy(fault=fault, fault_rate=0.2) as policy:
        env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", trajectory_retries=8, model_retries=4)
        await env.process_manager()
        groups = groups_in(tmp_path / "g.jsonl")
        assert [group["scores"] for group in groups] == [[4.0] * 3] * 3
        for group in groups:
            assert_true(group, policy.truth)


@pytest.mark.parametrize("fault", ["400", "nonsense"])
@pytest.mark.parametrize("server_type", ["vllm", "openai"])
async def test_useless_server_is_found(faulty_policy, tmp_path, fault, server_type):
    async with faulty_policy(fault=fault) as policy:
        env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", server_type=server_type)
        with pytest.raises(InferenceError, match=r"openai\.base_url: http://127\.0\.0\.1"):
            await env.process_manager()
        assert not env.backend.running
        assert not (tmp_path / "g.jsonl").exists()


async def test_slots_bound_admission(policy, tmp_path):
    env = make(ScriptEnv, policy.url, None, slots_per_container=2, max_containers=2, process_concurrency=5)
    env.items = items(6)
    await env.process_manager()
    assert 0 < env.stand_in.most <= 4
    assert env.metrics.trajectories == 18


async def test_groups_fill_the_slots(policy):
    together = 0
    most = 0
    full = asyncio.Event()

    class Env(ScriptEnv):
        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            nonlocal together, most
            together += 1
            most = max(most, together)
            if together == 12:
                full.set()
            await full.wait()
            await asyncio.sleep(0.05)  # for one too many
            together -= 1
            return {}

    env = make(Env, policy.url, None, slots_per_container=6, max_containers=2)
    env.items = items(6)
    await env.process_manager()
    assert most == 12


async def test_workspace_is_set_up_once(policy, tmp_path):
    set_up = []

    class Env(ScriptEnv):
        async def setup_group_workspace(self, item, *, exec_tool):
            set_up.append(item["name"])
            await exec_tool(_tool("make"))

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    assert sorted(set_up) == ["item-0", "item-1", "item-2"]
    assert len(env.stand_in.forks) == 9
    assert len(env.stand_in.snapshots) == 3
    assert all(snapshot.dropped for snapshot in env.stand_in.snapshots)


async def test_lost_workspace_made_anew(policy, tmp_path, caplog):
    prepared = []

    class Losing(StandInExecutor):
        async def start_from(self, trajectory_id, snapshot):
            if snapshot is self.snapshots[0] and trajectory_id.endswith("-2"):
                raise SlotLost(f"snapshot {snapshot} is lost: its container is gone")
            return await super().start_from(trajectory_id, snapshot)

    class Env(ScriptEnv):
        async def start_tool_backend(self, tools=None):
            self.backend.executor = self.stand_in = Losing(tools or self.build_tools())

        async def setup_group_workspace(self, item, *, exec_tool):
            prepared.append(item["name"])

    env = make(Env, policy.url, tmp_path / "g.jsonl", process_concurrency=1)
    env.items = items(2)
    await env.process_manager()
    assert prepared == ["item-0", "item-0", "item-1"]
    assert env.metrics.retries == {"workspace_lost": 1}
    assert "newly prepared" in caplog.text
    for group in groups_in(tmp_path / "g.jsonl"):
        names = {t["trajectory_id"] for t in group["atropos"]["trajectories"]}
        assert len({id(snapshot) for name, snapshot in env.stand_in.forks if name in names}) == 1
    assert all(snapshot.dropped for snapshot in env.stand_in.snapshots)


async def test_retries_are_bounded(policy, tmp_path):
    class Losing(StandInExecutor):
        async def start_from(self, trajectory_id, snapshot):
            raise SlotLost("snapshot is lost: its container is gone")

    class Env(ScriptEnv):
        async def start_tool_backend(self, tools=None):
            self.backend.executor = self.stand_in = Losing(tools or self.build_tools())

        async def setup_group_workspace(self, item, *, exec_tool):
            pass

    env = make(Env, policy.url, tmp_path / "g.jsonl", trajectory_retries=1)
    env.items = items(1)
    with pytest.raises(GroupsDropped, match="1 x workspace_lost"):
        await env.process_manager()
    assert len(env.stand_in.snapshots) == 2


def _tool(command):
    from atropos.tools import ToolCall

    return ToolCall(name="terminal", arguments={"command": command})


async def test_hooks_see_one_workspace(policy, tmp_path):
    seen = []

    class Env(ScriptEnv):
        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            return {"prepared": trajectory_id}

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            result = await exec_tool(_tool("check"))
            seen.append((trajectory_id, agent_result.total_tool_calls, result.success))
            return 0.5, {"why": "half", "odd": {1, 2}}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(1)
    await env.process_manager()
    [group] = groups_in(tmp_path / "g.jsonl")
    summaries = group["atropos"]["trajectories"]
    assert (
        {s["info"]["prepared"] for s in summaries}
        == {name for name, _, _ in seen}
        == {s["trajectory_id"] for s in summaries}
    )
    assert all(s["info"]["why"] == "half" for s in summaries)
    assert {(calls, ok) for _, calls, ok in seen} == {(1, True)}


async def test_one_trajectory_by_itself(policy):
    env = make(ScriptEnv, policy.url, None)
    async with env.running():
        single, backlog = await env.collect_trajectory(items(1)[0])
        assert (single["scores"], backlog) == (4.0, [])
        assert len(single["tokens"]) == len(single["masks"]) == len(single["inference_logprobs"])
        answer, facts = await env.run_agent(env.build_task(items(1)[0]))
        assert (answer, facts) == ("done", {"success": True, "error": None, "tool_calls": 1})
        assert not env.stand_in.live
    await env.shutdown_tool_backend()


async def test_run_agent_keeps_workspace(policy):
    env = make(ScriptEnv, policy.url, None)
    async with env.running():
        await env.run_agent(env.build_task(items(1)[0]), trajectory_id="mine")
        assert env.stand_in.live == {"mine"}


async def test_hook_has_slot_when_full(policy, tmp_path):
    class Env(ScriptEnv):
        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            answer, _ = await self.run_agent(turns("fine"), trajectory_id=trajectory_id)
            return float(answer == "fine"), {}

    env = make(Env, policy.url, tmp_path / "g.jsonl", slots_per_container=3, max_containers=1, hook_timeout_s=20)
    await env.process_manager()
    assert [group["scores"] for group in groups_in(tmp_path / "g.jsonl")] == [[1.0] * 3] * 3


async def test_failed_agent_drops_group(policy, tmp_path):
    class Env(ScriptEnv):
        async def act(self, agent, item, task, trajectory_id):
            if item["name"] == "item-1":
                raise KeyError("a template")
            return await super().act(agent, item, task, trajectory_id)

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    with pytest.raises(GroupsDropped, match=r"1 of 3 groups were dropped \(1 x hook_error\)"):
        await env.process_manager()
    assert len(groups_in(tmp_path / "g.jsonl")) == 2
    assert env.metrics.hook_errors["the agent"] >= 1


async def test_template_takes_system(policy):
    env = make(ScriptEnv, policy.url, None)
    env.tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"env\.tokenizer_name: .* takes no system message.*System role not supported"
    ):
        await env.process_manager()


async def test_missing_template_refused(policy):
    env = make(ScriptEnv, policy.url, None)
    env.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"^tokenizer_name: this tokenizer has no chat template"):
        await env.process_manager()


async def test_seeds_make_runs_repeat(policy, tmp_path):
    from examples.policy.play import TASKS

    class Env(ScriptEnv):
        def build_task(self, item):
            return (TASKS / "top-words" / "instruction.md").read_text()

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            return float(len(agent_result.messages)), {"said": [step.text for step in agent_result.steps]}

    said = []
    for name in "ab":
        env = make(Env, policy.url, tmp_path / f"{name}.jsonl", seed=5, group_size=6, agent_max_steps=8)
        env.items = items(1)
        await env.process_manager()
        [group] = groups_in(tmp_path / f"{name}.jsonl")
        said.append([t["info"]["said"] for t in group["atropos"]["trajectories"]])
    assert said[0] == said[1]
    assert len({json.dumps(one) for one in said[0]}) > 1


@pytest.mark.parametrize("end", ["cancel", "signal", "error"])
async def test_every_ending_releases_all(policy, tmp_path, end):
    class Env(ScriptEnv):
        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            await exec_tool(_tool("ls"))
            if item["name"] != "item-0":
                if end == "error":
                    raise ConfigError("env.x: wrong")
                first_written.set()
                await asyncio.Event().wait()
            return {}

    first_written = asyncio.Event()
    env = make(Env, policy.url, tmp_path / "g.jsonl", process_concurrency=1)
    task = asyncio.create_task(env.process_manager())
    if end == "error":
        with pytest.raises(ConfigError, match=r"env\.x: wrong"):
            await task
    else:
        await asyncio.wait_for(first_written.wait(), 60)
        if end == "cancel":
            task.cancel()
        else:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            signal.raise_signal(signal.SIGTERM)  # a second one changes nothing
        with pytest.raises(asyncio.CancelledError):
            await task
        assert env.lifetime.signal == (signal.SIGTERM if end == "signal" else None)
        assert env.metrics.cancelled_groups == 1
    assert env.stand_in.closed
    assert not env.stand_in.live
    assert len(groups_in(tmp_path / "g.jsonl")) == 1
    assert "item-0" in (tmp_path / "g.html").read_text()
    assert asyncio.all_tasks() - {asyncio.current_task()} <= policy_tasks()


def policy_tasks():
    return {task for task in asyncio.all_tasks() if "aiohttp" in repr(task.get_coro())}


@shows("max_token_length")
async def test_too_long_item_drops_group(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", max_token_length=6000)
    env.items = [*items(1), {"name": "long", "script": ["x" * 60_000]}]
    with pytest.raises(GroupsDropped, match="1 x prompt_too_long"):
        await env.process_manager()
    assert len(groups_in(tmp_path / "g.jsonl")) == 1


async def test_incomplete_single_fails(policy):
    class Env(ScriptEnv):
        @staticmethod
        def fault(_trajectory, _call):
            raise SlotLost("gone")

    env = make(Env, policy.url, None, trajectory_retries=0)
    async with env.running():
        with pytest.raises(GroupDropped, match="SlotLost"):
            await env.collect_trajectory(items(1, {"calls": [call("x")]}, "y")[0])


async def test_left_out_are_counted(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", ensure_scores_are_not_same=True)
    await env.process_manager()
    assert env.metrics.unsent == {"same_scores": 3}
    assert env.metrics.as_dict()["env/groups_unsent/same_scores"] == 3


async def test_scores_must_be_finite(policy, tmp_path):
    class Env(ScriptEnv):
        async def postprocess_histories(self, trajectories):
            scores = np.array(trajectories["scores"], dtype=np.float32) / 8
            name = trajectories["atropos"]["item"]
            bad = {"item-1": [*scores[:2], float("nan")], "item-2": scores[:2], "item-3": [*scores[:2], None]}
            given = bad.get(name, scores)
            return {**trajectories, "scores": given, "advantages": [scores[:1], list(scores[:1]), scores]}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(4)
    await env.process_manager()
    [kept] = groups_in(tmp_path / "g.jsonl")
    assert kept["scores"] == [0.5] * 3
    assert kept["advantages"] == [[0.5], [0.5], [0.5] * 3]
    assert env.metrics.unsent == {"bad_scores": 3}


async def test_mismatched_left_out(policy, tmp_path):
    """An env's own code that shortens the tokens, say, and forgets what belongs to them."""

    class Env(ScriptEnv):
        async def postprocess_histories(self, trajectories):
            name = trajectories["atropos"]["item"]
            if name == "item-3":
                return {**trajectories, "inference_logprobs": None}
            part = {"item-0": "tokens", "item-1": "masks", "item-2": "inference_logprobs"}[name]
            return {**trajectories, part: [each[:-1] for each in trajectories[part]]}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(4)
    await env.process_manager()
    assert [group["atropos"]["item"] for group in groups_in(tmp_path / "g.jsonl")] == ["item-3"]
    assert env.metrics.unsent == {"bad_lengths": 3}


async def test_hook_error_is_named(policy, tmp_path, caplog):
    class Env(ScriptEnv):
        async def postprocess_histories(self, trajectories):
            raise KeyError("mine")

    with pytest.raises(HookError, match="postprocess_histories raised KeyError: 'mine'"):
        await make(Env, policy.url, tmp_path / "g.jsonl").process_manager()
    assert "Traceback" in caplog.text


async def test_hopeless_run_ends(policy, tmp_path):
    class Env(ScriptEnv):
        @staticmethod
        def fault(_trajectory, _call):
            raise NotSupported("x: not here")

    env = make(Env, policy.url, tmp_path / "g.jsonl", process_concurrency=1)
    env.items = items(50)
    with pytest.raises(GroupsDropped, match=r"3 groups in a row were dropped; the last one: .*x: not here"):
        await env.process_manager()
    assert len(env.items) > 40
    assert env.stand_in.closed


async def test_drops_slow_a_run_down(policy, tmp_path, monkeypatch):
    class Env(ScriptEnv):
        @staticmethod
        def fault(_trajectory, _call):
            raise AcquireTimeout("no slot")

    monkeypatch.setattr("atropos.envs.running.groups.DROPPED_IN_A_ROW", 4)
    settings = {"process_concurrency": 1, "group_size": 1, "trajectory_retries": 0}
    env = make(Env, policy.url, tmp_path / "g.jsonl", **settings)
    env.items = items(9)
    began = time.monotonic()
    with pytest.raises(GroupsDropped, match="4 groups in a row were dropped"):
        await env.process_manager()
    assert time.monotonic() - began >= 0.5  # after the third


async def test_no_reward_ends_no_run(policy, tmp_path):
    class Env(ScriptEnv):
        async def score_trajectory(self, item, final_response):
            raise VerifierError("no reward was written")

    env = make(Env, policy.url, tmp_path / "g.jsonl", group_size=1, trajectory_retries=0)
    env.items = items(25)
    with pytest.raises(GroupsDropped, match=r"25 of 25 .*25 x verifier_failed"):
        await env.process_manager()
    assert env.items == []


async def test_metrics_show_loop_s_cpu(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl")

    def cpu_s():
        lines = env.metrics_text().splitlines()
        return next(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith("atropos_env_loop_cpu_seconds_total")
        )

    before, until = cpu_s(), time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    assert 0.2 <= cpu_s() - before < 1
