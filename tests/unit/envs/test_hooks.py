"""What goes wrong in an env's own code has a name, and none of it is ever a score."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
import time

import pytest

from atropos.envs import AgentEnv, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
from atropos.envs.hermes.bridge import bridged
from atropos.envs.hermes.tool_context import ToolContext
from atropos.envs.running.hooks import HookCalls, Hooks
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import GroupDropped, GroupsDropped, HookError, TaskFault
from atropos.errors import ConfigError, SlotLost, ToolServerUnavailable
from atropos.tools import ToolCall, ToolResult, build_tool_registry
from examples.policy.tokenizer import FOLDER
from tests.settings import shows
from tests.unit.envs.support import ScriptEnv, StandInExecutor, items, make
from tests.unit.envs.test_process import groups_in

pytestmark = pytest.mark.waits


def terminal(command):
    return ToolCall(name="terminal", arguments={"command": command})


@pytest.mark.parametrize("failure", [SlotLost("killed"), ToolServerUnavailable("gone")])
@pytest.mark.parametrize("hook", ["setup_group", "setup", "verify"])
async def test_caught_fault_is_no_score(policy, tmp_path, hook, failure):
    class Env(ScriptEnv):
        faults = 0

        @classmethod
        def fault(cls, _trajectory, tool_call):
            if tool_call.arguments == {"command": hook} and cls.faults < 2:
                cls.faults += 1
                raise failure

        async def guarded(self, command, exec_tool):
            try:
                await exec_tool(terminal(command))
            except Exception:
                return 0.0
            return 1.0

        async def setup_group_workspace(self, item, *, exec_tool):
            await self.guarded("setup_group", exec_tool)

        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            return {"prepared": await self.guarded("setup", exec_tool)}

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            return await self.guarded("verify", exec_tool), {}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    groups = groups_in(tmp_path / "g.jsonl")
    assert [group["scores"] for group in groups] == [[1.0] * 3] * 3
    assert {t["info"]["prepared"] for group in groups for t in group["atropos"]["trajectories"]} == {1.0}
    assert env.metrics.retries == {failure.code: 2}


async def test_silent_slots_no_score(policy, tmp_path):
    """Its loss is known later than the hook's own timeout. With slots that are really frozen: e2e/test_frozen_slots."""

    def frozen(trajectory_id):
        """Whether it is the first try of one member."""
        return trajectory_id.startswith("item-1-") and trajectory_id.endswith("-1")

    class Frozen(StandInExecutor):
        async def execute(self, trajectory_id, tool_call):
            if frozen(trajectory_id) and tool_call.arguments == {"command": "check"}:
                await asyncio.Event().wait()
            return await super().execute(trajectory_id, tool_call)

        async def check_alive(self, trajectory_id):
            if frozen(trajectory_id):
                raise SlotLost("it does not answer")

    class Env(ScriptEnv):
        async def start_tool_backend(self, tools=None):
            self.stand_in = Frozen(tools or self.build_tools())
            self.backend.executor = self.stand_in

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            try:
                await asyncio.wait_for(exec_tool(terminal("check")), 0.1 if frozen(trajectory_id) else None)
            except TimeoutError:
                return 0.0, {}
            return 1.0, {}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    assert [group["scores"] for group in groups_in(tmp_path / "g.jsonl")] == [[1.0] * 3] * 3
    assert env.metrics.retries == {"slot_lost": 1}


async def test_hook_s_timeout_is_verdict(policy, tmp_path):
    class Env(ScriptEnv):
        async def start_tool_backend(self, tools=None):
            await super().start_tool_backend(tools)
            run = self.stand_in.execute

            async def execute(trajectory_id, tool_call):
                if tool_call.arguments == {"command": "slow tests"}:
                    await asyncio.Event().wait()
                return await run(trajectory_id, tool_call)

            self.stand_in.execute = execute

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(exec_tool(terminal("slow tests")), 0.05)
            return 0.5, {}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    assert [group["scores"] for group in groups_in(tmp_path / "g.jsonl")] == [[0.5] * 3] * 3


async def test_a_caught_fault_stays_one(policy, tmp_path):
    class Env(ScriptEnv):
        @staticmethod
        def fault(trajectory, tool_call):
            if tool_call.arguments == {"command": "check"} and "-r" not in trajectory:
                raise SlotLost("killed")

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            try:
                await exec_tool(terminal("check"))
            except SlotLost:
                raise AssertionError("the check did not run") from None
            return 1.0, {}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    await env.process_manager()
    assert [group["scores"] for group in groups_in(tmp_path / "g.jsonl")] == [[1.0] * 3] * 3


class FailingExecutor(StandInExecutor):
    async def execute(self, trajectory_id, tool_call):
        await super().execute(trajectory_id, tool_call)
        if tool_call.name == "read_file":
            return ToolResult.failure("no such file")
        command = tool_call.arguments["command"]
        if command.startswith("exit"):
            return ToolResult(success=False, output="E: no such package\n", exit_code=int(command[5:]))
        return ToolResult(success=command != "late", output="", timed_out=command == "late", exit_code=0)


class Preparing(ScriptEnv):
    """`calls` are made in set-up; errors are caught where `caught`."""

    calls: tuple[ToolCall, ...] = ()
    caught = False
    check: bool | None = None

    async def start_tool_backend(self, tools=None):
        self.stand_in = FailingExecutor(tools or self.build_tools())
        self.backend.executor = self.stand_in

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        with contextlib.suppress(Exception) if self.caught else contextlib.nullcontext():
            for one in self.calls:
                await (exec_tool(one) if self.check is None else exec_tool(one, check=self.check))
        return {}


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (terminal("exit 100"), "terminal 'exit 100' ended with exit code 100: E: no such package"),
        (terminal("late"), "terminal 'late' timed out"),
        (ToolCall(name="read_file", arguments={"path": "x"}), "read_file .* failed: no such file"),
        (ToolCall(name="termnal", arguments={"command": "true"}), "exec_tool: .*termnal"),
    ],
)
async def test_failed_set_up_no_score(policy, tmp_path, call, says, caught, caplog):
    env = make(Preparing, policy.url, tmp_path / "g.jsonl")
    env.items, env.calls, env.caught = items(1), (terminal("true"), call), caught
    with pytest.raises(GroupsDropped, match="1 x task_fault"):
        await env.process_manager()
    assert not (tmp_path / "g.jsonl").exists()
    assert not env.metrics.retries
    [line] = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert "setup_trajectory_workspace: " in line
    assert re.search(says, line)


async def test_set_up_call_may_fail(policy, tmp_path):
    env = make(Preparing, policy.url, tmp_path / "g.jsonl")
    env.calls, env.check = (terminal("exit 1"),), False
    await env.process_manager()
    assert len(groups_in(tmp_path / "g.jsonl")) == 3


async def test_raising_set_up_is_tasks(policy, tmp_path):
    class Env(ScriptEnv):
        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            raise KeyError("fixture")

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(1)
    with pytest.raises(GroupsDropped, match="1 x task_fault"):
        await env.process_manager()


async def test_misspelt_tool_is_no_score(policy, tmp_path):
    class Env(ScriptEnv):
        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            result = await exec_tool(ToolCall(name="termnal", arguments={"command": "pytest"}))
            return float(result.success), {}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(1)
    with pytest.raises(GroupsDropped, match="1 x hook_error"):
        await env.process_manager()


@shows("hook_timeout_s")
@pytest.mark.parametrize(("hook", "code"), [("setup", "task_fault"), ("verify", "hook_error")])
async def test_hanging_hook_has_a_limit(policy, tmp_path, hook, code, caplog):
    class Env(ScriptEnv):
        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            if hook == "setup":
                await asyncio.Event().wait()
            return {}

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            await asyncio.Event().wait()
            return 1.0, {}

    env = make(Env, policy.url, tmp_path / "g.jsonl", hook_timeout_s=0.3)
    env.items = items(1)
    with pytest.raises(GroupsDropped, match=f"1 x {code}"):
        await env.process_manager()
    assert "did not end within hook_timeout_s (0.3 s)" in caplog.text


async def test_a_traceback_is_logged_once(caplog):
    hooks = Hooks("Env", EnvMetrics(), 1.0)
    for error in (ValueError("1"), ValueError("2"), KeyError("3")):
        with pytest.raises(HookError), hooks.guard("verify"):
            raise error
    assert [str(record.exc_info[1]) for record in caplog.records] == ["1", "'3'"]
    assert hooks._metrics.hook_errors["verify"] == 3


async def test_files_of_set_up_take_no_place_of_an_agents():
    """There is none yet: nothing is asked of the slot."""
    for calls, paths in ((HookCalls(None, "t", setup=True), ["/a"]), (HookCalls(None, "t"), [])):
        await calls.make_way(paths)
    await HookCalls(None, "t", setup=True).take_place("/a")


async def test_blocked_loop_not_hooks():
    async def hook():
        asyncio.get_running_loop().call_soon(time.sleep, 2.5)  # as a hook of another trajectory does, or a stop
        await asyncio.sleep(0.1)
        return 1.0

    assert await Hooks("Env", EnvMetrics(), 1.5).call("compute_reward", hook) == 1.0


@pytest.mark.parametrize("hook", ["build_task", "verify"])
async def test_cancelled_drops_group(policy, tmp_path, hook, caplog):
    async def await_a_cancelled_task():
        task = asyncio.create_task(asyncio.sleep(9))
        task.cancel()
        await task

    class Env(ScriptEnv):
        async def build_task(self, item):
            if hook == "build_task" and item["name"] == "item-1":
                await await_a_cancelled_task()
            return ScriptEnv.build_task(self, item)

        async def score_trajectory(self, item, final_response):
            if hook == "verify" and item["name"] == "item-1":
                await await_a_cancelled_task()
            return 1.0

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    with pytest.raises(GroupsDropped, match=r"1 of 3 groups were dropped \(1 x hook_error\)"):
        await env.process_manager()
    assert len(groups_in(tmp_path / "g.jsonl")) == 2
    assert "what it awaited was cancelled, and not by its caller" in caplog.text


@pytest.mark.parametrize(("hook", "code"), [("group", "task_fault"), ("setup", "task_fault"), ("verify", "hook_error")])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_unawaited_call_is_a_fault(policy, tmp_path, hook, code, caplog):
    class Env(ScriptEnv):
        async def setup_group_workspace(self, item, *, exec_tool):
            self.forgetful("group", exec_tool)

        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            self.forgetful("setup", exec_tool)
            return {}

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            self.forgetful("verify", exec_tool)
            return 1.0, {}

        def forgetful(self, name, exec_tool):
            if name == hook:
                exec_tool(terminal("prepare"))

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(1)
    with pytest.raises(GroupsDropped, match=f"1 x {code}"):
        await env.process_manager()
    assert "a call was not awaited, so it never ran" in caplog.text


@pytest.mark.parametrize(("setup", "fault"), [(True, TaskFault), (False, HookError)])
async def test_unawaited_hermes_is_fault(setup, fault):
    context = ToolContext(StandInExecutor(None), "t", setup=setup)

    async def hook():
        async def helper():
            context.write_file("tests/test_it.py", "...")

        await asyncio.gather(helper())
        return 1.0

    with pytest.raises(fault, match="compute_reward: a call was not awaited"):
        await Hooks("Env", EnvMetrics(), 10).call("compute_reward", lambda: bridged(hook), calls=context, setup=setup)


async def test_reward_without_tool_fails():
    context = ToolContext(StandInExecutor(build_tool_registry(["default"])), "t")

    def reward():
        with contextlib.suppress(Exception):
            return float(context.web_search("answer")["success"])
        return 0.0

    with pytest.raises(
        HookError, match=r"compute_reward: ctx\.web_search: there is no tool 'web_search'.*enabled_toolsets"
    ):
        await Hooks("Env", EnvMetrics(), 10).call("compute_reward", lambda: bridged(reward), calls=context)


@pytest.mark.parametrize("how", ["given up", "not awaited", "no dict"])
async def test_unfinished_set_up_fault(policy, tmp_path, how, caplog):
    class Slow(StandInExecutor):
        async def execute(self, trajectory_id, tool_call):
            if tool_call.arguments == {"command": "slow"}:
                await asyncio.sleep(60)
            return await super().execute(trajectory_id, tool_call)

    class Env(ScriptEnv):
        async def start_tool_backend(self, tools=None):
            self.backend.executor = Slow(tools or self.build_tools())

        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            if how == "given up":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(exec_tool(terminal("slow")), 0.05)
            elif how == "not awaited":
                self.running = asyncio.ensure_future(exec_tool(terminal("slow")))
                await asyncio.sleep(0.05)
            else:
                return ["prepared"]
            return {}

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    env.items = items(1)
    with pytest.raises(GroupsDropped, match="1 x task_fault"):
        await env.process_manager()
    assert "setup_trajectory_workspace" in caplog.text


class Wordless:
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("details", [{("a", 1): 2}, {"a": Wordless()}, "a circle", "deep"])
async def test_bad_details_drop_group(policy, tmp_path, details):
    class Env(ScriptEnv):
        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            if item["name"] != "item-1":
                return 1.0, {}
            found = {}
            if details == "a circle":
                found["itself"] = found
            elif details == "deep":
                for _ in range(50_000):  # deeper than any version of Python writes as JSON
                    found = {"in": found}
            else:
                found = details
            return 1.0, found

    env = make(Env, policy.url, tmp_path / "g.jsonl")
    with pytest.raises(GroupsDropped, match=r"1 of 3 groups were dropped \(1 x hook_error\)"):
        await env.process_manager()
    assert len(groups_in(tmp_path / "g.jsonl")) == 2


async def test_hermes_prompt_is_text(policy):
    """Templates such as Qwen3's render a list of messages, or None, as an empty one."""

    class Env(HermesAgentBaseEnv):
        def format_prompt(self, item):
            return [{"role": "user", "content": "go"}]

        async def compute_reward(self, item, result, ctx):
            return 1.0

    config = HermesAgentEnvConfig(tokenizer_name=str(FOLDER), use_wandb=False, enabled_toolsets=["default"])
    env = Env(config, [APIServerConfig(base_url=policy.url, server_type="vllm", model_name=str(FOLDER), api_key="x")])
    env.backend.executor = StandInExecutor(env.build_tools())
    with pytest.raises(GroupDropped, match="format_prompt must return text, not list"):
        await env.collect_trajectory({"name": "x"})


async def test_hermes_failure_is_a_fault(policy, tmp_path, caplog):
    ways = {
        "terminal": "terminal 'echo no; exit 4' ended with exit code 4: no",
        "read_file": "read_file missing failed: No such file or directory: missing",
        "call_tool": "nosuch '{}' failed: there is no tool 'nosuch'",
        "search": "search '(' failed: the pattern is not a regular expression",
        "download": "download missing failed: No such file or directory",
        "given up": "a call was given up, or was not awaited",
    }
    unchecked = []

    class Env(HermesAgentBaseEnv):
        name = "h"

        async def get_next_item(self):
            return self.left.pop() if self.left else None

        def format_prompt(self, item):
            return '```policy\n["done"]\n```'

        async def setup_rollout(self, item, ctx):
            way = item["name"]
            if way == "terminal":
                unchecked.append(ctx.terminal("exit 1", check=False)["exit_code"])
                ctx.terminal("echo no; exit 4")
            elif way == "read_file":
                ctx.read_file("missing")
            elif way == "search":
                ctx.search("(")
            elif way == "download":
                ctx.download("missing", tmp_path / "downloaded")
            elif way == "given up":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3):  # noqa: ASYNC100 - the bridge awaits it
                        ctx.terminal("sleep 30")
            else:
                ctx.call_tool("nosuch")

        async def compute_reward(self, item, result, ctx):
            return 1.0

    config = HermesAgentEnvConfig(
        tokenizer_name=str(FOLDER), use_wandb=False, group_size=2, enabled_toolsets=["default"], max_containers=1,
        slots_per_container=2, ensure_scores_are_not_same=False, data_path_to_save_groups=str(tmp_path / "g.jsonl"),
        allow_network=False,
    )  # fmt: skip
    env = Env(config, [APIServerConfig(base_url=policy.url, server_type="vllm", model_name=str(FOLDER), api_key="x")])
    env.left = [{"name": way} for way in ways]
    with pytest.raises(GroupsDropped, match=f"{len(ways)} x task_fault"):
        await env.process_manager()
    assert set(unchecked) == {1}
    for way, why in ways.items():  # and not for an error of the hook itself
        [line] = [each for each in caplog.messages if f"group {way} dropped" in each]
        assert f"setup_rollout: {why}" in line


@pytest.mark.parametrize("hook", ["build_task", "verify"])
async def test_ctrl_c_interrupts_blocking_hooks(policy, tmp_path, hook):
    class Env(ScriptEnv):
        def build_task(self, item):
            if hook == "build_task":
                self.block()
            return super().build_task(item)

        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            self.block()
            return 1.0, {}

        def block(self):
            self.blocked.set()
            time.sleep(60)

    env = make(Env, policy.url, tmp_path / "g.jsonl", group_size=4)
    env.items, env.blocked = items(1), threading.Event()

    def press():
        env.blocked.wait()
        time.sleep(2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await env.process_manager()
    assert time.monotonic() - started < 60
    assert env.lifetime.signal == signal.SIGINT
    assert env.stand_in.closed


async def test_a_missing_method_is_named():
    class NoItems(AgentEnv):
        def build_task(self, item):
            return ""

    class NoScore(NoItems):
        async def get_next_item(self):
            return None

    for cls, named in ((NoItems, r"get_next_item\(\) and score_trajectory"), (NoScore, "must define score_trajectory")):
        env = make(cls, "http://127.0.0.1:9/v1", None)
        for command in (env.process_manager, env.env_manager):
            with pytest.raises(ConfigError, match=named):
                await command()


async def test_no_evaluation_is_told():
    env = make(ScriptEnv, "http://127.0.0.1:9/v1", None)
    with pytest.raises(ConfigError, match="ScriptEnv has no evaluation"):
        await env._run_evaluate()
