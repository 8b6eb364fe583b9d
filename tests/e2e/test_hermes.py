"""Hermes envs on real slots, over a real HTTP policy: what is scored is what was done, and what failed is no score."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from atropos.envs import HermesAgentBaseEnv, HermesAgentEnvConfig
from atropos.envs.running.rollout import GroupsDropped
from atropos.envs.sandbox_env import SandboxEnv
from atropos.errors import ConfigError, SlotLost
from examples.policy.truth import Truth
from tests.e2e.hermes_support import call, groups, sampled, script
from tests.e2e.hermes_support import make as make_env
from tests.processes import files_end_at
from tests.settings import shows

WRITES = script(
    {"text": "<think>a file, then</think>", "calls": [call("terminal", command="echo made > made.txt; pwd")]},
    {"calls": [call("terminal", command="cat made.txt"), call("write_file", path="more.txt", content="é")]},
    {"calls": [call("nosuch", x=1)]},
    "finished",
)


class Env(HermesAgentBaseEnv):
    """Rows carry the policy's script; the reward is what `judge` says."""

    name = "hermes_test"

    async def setup(self):
        self.rows = self.load_rows()

    async def get_next_item(self):
        return next(self.rows, None)

    async def compute_reward(self, item, result, ctx):
        self.seen = [*getattr(self, "seen", []), (item, result)]
        return await self.judge(item, result, ctx)

    async def judge(self, item, result, ctx):
        return float(ctx.terminal("grep -q made made.txt")["exit_code"] == 0)


def make(policy, tmp_path, rows, *, cls=Env, **settings):
    return make_env(
        cls, policy, tmp_path, [{"prompt": row} if isinstance(row, str) else row for row in rows], **settings
    )


@pytest.mark.parametrize("server_type", ["vllm", "sglang", "openai"])
async def test_run_from_prompt_to_reward(policy, tmp_path, server_type):
    env = make(policy, tmp_path, [WRITES, script("nothing to do")], server_type=server_type)
    await env.process_manager()
    by_score = {tuple(group["scores"]): group for group in groups(tmp_path)}
    assert set(by_score) == {(1.0, 1.0), (0.0, 0.0)}
    worked = by_score[1.0, 1.0]
    assert worked["group_overrides"] == ({"placeholder_tokens": True} if server_type == "openai" else {})
    for index, messages in enumerate(worked["messages"]):
        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
        results = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
        assert [r["success"] for r in results] == [True, True, True, False]
        assert results[0]["output"] == "/workspace\n"
        assert results[1]["output"] == "made\n"
        assert "nosuch" in results[3]["error"]
        made = [c["function"]["name"] for m in messages for c in m.get("tool_calls") or []]
        assert made == ["terminal", "terminal", "write_file", "nosuch"]
        ids = [c["id"] for m in messages for c in m.get("tool_calls") or []]
        assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ids
        if server_type != "openai":
            truth = Truth(policy[1])
            runs = sampled(worked, index)
            assert len(runs) == 4
            assert all(run in truth for run in runs)
    result = next(result for item, result in env.seen if item["prompt"] == WRITES)
    assert (result.turns_used, result.finished_naturally, result.final_response) == (4, True, "finished")
    assert result.reasoning_per_turn == ["a file, then", None, None, None]
    [error] = result.tool_errors
    assert (error.turn, error.tool_name, json.loads(error.arguments)) == (3, "nosuch", {"x": 1})


async def test_rewards_use_own_slot(policy, tmp_path):
    class Rewarded(Env):
        async def judge(self, item, result, ctx):
            assert ctx.terminal("cat made.txt")["output"] == "made\n"
            assert (await ctx.terminal("exit 3"))["exit_code"] == 3
            assert (await asyncio.to_thread(ctx.read_file, "more.txt"))["content"] == "é"
            assert "error" in ctx.read_file("none.txt")
            assert ctx.terminal("truncate -s 1T huge")["exit_code"] == 0
            assert "1,099,511,627,776 bytes" in ctx.read_file("huge")["error"]
            assert "1,099,511,627,776 bytes" in ctx.download("huge", tmp_path / "huge")["error"]
            assert "2 bytes" in ctx.read_file("more.txt", max_bytes=1)["error"]
            assert ctx.write_file("sub/x.bin", b"\x00\xff")["bytes_written"] == 2
            assert [m["path"] for m in ctx.search("ma.e")["matches"]] == ["/workspace/made.txt"]
            told = json.loads(ctx.call_tool("terminal", {"command": "echo hi"}))
            assert (told["output"], told["exit_code"]) == ("hi\n", 0)
            assert json.loads(await ctx.call_tool("nosuch"))["success"] is False
            assert ctx.terminal("sleep 30", timeout=0.2)["timed_out"] is True
            local = tmp_path / f"down-{ctx.trajectory_id}"
            assert ctx.download("sub", local)["success"]
            assert (local / "x.bin").read_bytes() == b"\x00\xff"
            assert ctx.upload(local, "back")["success"]
            assert "error" in ctx.upload(local, "made.txt/x", check=False)
            with pytest.raises(OSError, match="Input/output error"):
                ctx.upload("/proc/self/mem", "mem")  # a local file that can't be read
            assert ctx.terminal("cmp back/x.bin sub/x.bin")["exit_code"] == 0
            assert ctx.terminal("mkdir out; ln -s /etc/passwd out/link")["exit_code"] == 0
            assert "link" in ctx.download("out", tmp_path / f"out-{ctx.trajectory_id}")["error"]
            both = await asyncio.gather(self.of(ctx, "echo 1"), self.of(ctx, "echo 2"))
            assert both == ["1\n", "2\n"]
            ctx.cleanup()
            await ctx.cleanup()
            return 1.0

        async def of(self, ctx, command):
            return (await ctx.terminal(command))["output"]

    env = make(policy, tmp_path, [WRITES], cls=Rewarded)
    await env.process_manager()
    assert groups(tmp_path)[0]["scores"] == [1.0, 1.0]


async def test_failures_are_no_scores(policy, tmp_path):
    class Failing(Env):
        async def judge(self, item, result, ctx):
            if item["kind"] == "raises":
                raise KeyError("oops")
            if item["kind"] == "nan":
                return float("nan")
            if item["kind"] == "swallows":
                try:
                    await ctx.terminal("echo")
                    ctx.failure = SlotLost("made up: the slot went away")
                except Exception:
                    pass
                return 0.0
            return 1.0

    rows = [{"prompt": WRITES, "kind": kind, "name": kind} for kind in ("raises", "nan", "swallows", "fine")]
    env = make(policy, tmp_path, rows, cls=Failing, trajectory_retries=1)
    with pytest.raises(GroupsDropped, match="3 of 4"):
        await env.process_manager()
    assert [group["atropos"]["item"] for group in groups(tmp_path)] == ["fine"]
    assert env.metrics.dropped == {"hook_error": 2, "slot_lost": 1}
    assert env.metrics.retries["slot_lost"] >= 1


async def test_full_disk_is_no_score(policy, tmp_path):
    """A failed download scores 0 here, as it should where the model left nothing, or what can't be unpacked."""
    deep = "mkdir out; cd out; for _ in $(seq 30); do d=$(printf %0200d); mkdir $d; cd -P $d; done"

    class Downloading(Env):
        async def judge(self, item, result, ctx):
            made = {
                "file": "head -c 2M /dev/zero > out",
                "folder": "mkdir out; head -c 2M /dev/zero > out/x",
                "deep": deep,
            }
            ctx.terminal(made.get(item["name"], "true"))
            local = tmp_path / f"{item['name']}-{ctx.trajectory_id}"
            with files_end_at(1 << 20):
                return float("success" in ctx.download("out", local))

    rows = [{"prompt": WRITES, "name": name} for name in ("file", "folder", "deep", "nothing")]
    env = make(policy, tmp_path, rows, cls=Downloading, process_concurrency=1, group_size=1)
    with pytest.raises(GroupsDropped, match="2 x hook_error"):
        await env.process_manager()
    found = {group["atropos"]["item"]: group["scores"] for group in groups(tmp_path)}
    assert found == {"deep": [0.0], "nothing": [0.0]}


async def test_members_are_forks(policy, tmp_path):
    class Forking(Env):
        prepared = 0

        async def setup_group(self, item, ctx):
            Forking.prepared += 1
            assert ctx.terminal("echo base > base.txt; mkdir -p /opt/x; touch /opt/x/y")["exit_code"] == 0

        async def judge(self, item, result, ctx):
            assert ctx.read_file("base.txt")["content"] == "base\n"
            ctx.terminal("(setsid sleep 1000 &) >/dev/null 2>&1")
            async with ctx.fork() as clean:
                mine = clean.terminal(
                    "cat base.txt made.txt; ls /opt/x; ls /proc | grep -c '^[0-9]'; echo fork > base.txt"
                )
            assert mine["output"].splitlines()[:3] == ["base", "made", "y"]
            return float(ctx.read_file("base.txt")["content"] == "base\n")

    env = make(policy, tmp_path, [WRITES], cls=Forking, slots_per_container=2)
    await env.process_manager()
    assert groups(tmp_path)[0]["scores"] == [1.0, 1.0]
    assert Forking.prepared == 1
    assert env.metrics.retries == {}  # no rollout of a full pool waits for another's slot


@shows("terminal_lifetime")
async def test_rollouts_are_bounded(policy, tmp_path):
    endless = script(*[{"calls": [call("terminal", command="echo again")]}] * 50)
    env = make(policy, tmp_path, [endless], max_agent_turns=3)
    await env.process_manager()
    assert [result.stop_reason for _, result in env.seen] == ["max_turns"] * 2
    assert {result.turns_used for _, result in env.seen} == {3}

    flood = script(*[{"calls": [call("terminal", command="seq 3000")]}] * 50)
    env = make(policy, tmp_path / "b", [flood], max_token_length=8000)
    await env.process_manager()
    assert {result.stop_reason for _, result in env.seen} == {"context_length"}
    assert all(len(result.transcript) <= 8000 for _, result in env.seen)

    settings = {"terminal_lifetime": 0.0001, "trajectory_retries": 0}
    env = make(policy, tmp_path / "c", [WRITES], **settings)
    with pytest.raises(GroupsDropped, match="lease_expired"):
        await env.process_manager()


async def test_groups_draw_toolsets_once(policy, tmp_path):
    ask = script({"calls": [call("terminal", command="echo hi"), call("read_file", path="x")]}, "end")
    settings = {"enabled_toolsets": None, "distribution": "interactive", "seed": 3}
    env = make(policy, tmp_path, [{"prompt": ask, "name": f"n{n}"} for n in range(8)], **settings)
    await env.process_manager()
    drawn = []
    for group in groups(tmp_path):
        names = [info["info"]["toolsets"] for info in group["atropos"]["trajectories"]]
        assert names[0] == names[1], "members of a group have the same tools"
        drawn.append(tuple(names[0]))
        for messages in group["messages"]:
            results = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
            refused = "there is no tool 'read_file'" in str(results[1].get("error"))
            assert refused == ("read_file" not in names[0])
    assert len(set(drawn)) > 1, "groups differ"


def test_wrong_settings_are_refused_by_name(tmp_path):
    for settings, named in (
        ({"distribution": "default", "enabled_toolsets": ["default"]}, "exclude each other"),
        ({"distribution": "nosuch"}, "unknown 'nosuch'"),
        ({"terminal_backend": "moon"}, "terminal_backend.*'singularity' or 'nomad'.*moon"),
        ({"tool_call_parser": "nosuch"}, "nosuch"),
        ({"tool_pool_mode": "docker"}, "differ"),
        ({"tool_pool_size": 0}, "tool_pool_size"),
        ({"max_agent_turns": 0}, "max_agent_turns"),
        ({"nosuch": 1}, "nosuch"),
    ):
        with pytest.raises(ValueError, match=named):
            HermesAgentEnvConfig(**settings)
    with pytest.raises(ConfigError, match="extra_body"):
        make(("http://127.0.0.1:9/v1", None), tmp_path, [WRITES], extra_body={"a": 1})


def test_settings_take_effect():
    config = HermesAgentEnvConfig(terminal_backend="docker", terminal_timeout=900, extra_body={"a": {"b": 1}})
    assert config.pool_config().backend == "docker"
    assert config.executor_config().limits.command_timeout_s == 900
    assert config.executor_config().limits.max_timeout_s == 900
    assert config.extra_body == {"a": {"b": 1}}
    assert HermesAgentEnvConfig().pool_config().backend == "local"
    assert HermesAgentEnvConfig(disabled_toolsets="web,browser").disabled_toolsets == ["web", "browser"]


def test_rows_of_files_lists_parquet(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet

    from atropos.envs.hermes.data import load_rows

    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "r.json").write_text(json.dumps(rows))
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    for name in ("r.jsonl", "r.json", "r.parquet"):
        assert load_rows(str(tmp_path / name)) == rows
    assert load_rows(json.dumps(rows)) == rows
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{')
    (tmp_path / "bad.parquet").write_text("nonsense")
    for name, named in (
        (str(tmp_path / "bad.jsonl"), "line 2: not JSON"),
        (str(tmp_path / "bad.parquet"), "no Parquet"),
        (str(tmp_path / "none.jsonl"), "there is no file"),
        ("[1]", "^dataset_name: the list, row 1: not an object"),
        ("[]", "^dataset_name: the list: no rows"),
        ("[", "not JSON"),
    ):
        with pytest.raises(ConfigError, match=named):
            load_rows(name)


async def test_tool_errors_count_alike(policy, tmp_path, monkeypatch):
    """Unknown tools, calls that can't be read, calls beyond a turn's bound, failing tools; not the env's own calls."""
    many = [call("terminal", command="true")] * 34  # two more than are run
    turn = {"text": "<tool_call>{broken</tool_call>", "calls": [call("nosuch"), call("read_file", path="none"), *many]}

    class Counted(Env):
        async def judge(self, item, result, ctx):
            assert json.loads(ctx.call_tool("nosuch"))["success"] is False
            assert result.tool_errors_count == 7
            return 1.0

    env = make(policy, tmp_path, [script(turn, "over")], cls=Counted)
    logged = []

    async def log(self, metrics=None):
        logged.append(metrics)

    monkeypatch.setattr(SandboxEnv, "wandb_log", log)
    await env.process_manager()
    await env.wandb_log()
    assert env.metrics.tool_errors == sum(metrics["train/tool_errors_count"] for metrics in logged) == 14
