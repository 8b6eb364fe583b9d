"""A hook that gives a call up by a timeout of its own, and scores that, makes no score of a slot that is frozen.

The slots are real. A sandbox is stopped by its first process, a container by its server: neither ends, and neither
answers, so that nothing but time would tell them from a program of the agent's that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal

import pytest

from atropos.envs import AgentEnv, AgentEnvConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
from atropos.errors import SlotLost
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.slot import slot
from atropos.tools import ToolCall, ToolExecutor, ToolRegistry, build_tool_registry, tool
from tests.e2e.hermes_support import call, groups, make, running_policy, script
from tests.e2e.test_demo_endings import containers
from tests.processes import first_processes

GIVES_UP_S, THAWS_S = 2.0, 12.0
WAITS_S = 60.0
"""For a slot that is not frozen."""
READ = ToolCall(name="read_file", arguments={"path": "answer"})


def freeze(namespace: str) -> int:
    """Stop the first process of a sandbox, by the PID namespace that its programs see."""
    found = first_processes(namespace=namespace)
    assert len(found) == 1, (namespace, found)
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


class Freezing:
    """Freezes what it verifies in, once for each item; then it gives up and scores 0.

    Attributes:
        frozen: the processes that were stopped, by item.
        whole: whether the container is stopped, instead of one sandbox in it.
    """

    whole = False

    async def setup(self):
        self.frozen = {}
        await super().setup()

    async def get_next_item(self):
        return self.items.pop(0) if self.items else None

    def freeze(self, way, namespace):
        """Freeze the first attempt; returns after how long the hook gives up."""
        if way in self.frozen:
            return WAITS_S
        if self.whole:
            (server,) = containers(os.getpid())
            os.kill(server, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(THAWS_S, os.kill, server, signal.SIGCONT)  # for the next attempt
        self.frozen[way] = server if self.whole else freeze(namespace.strip())
        return GIVES_UP_S


class FilesAloneEnv(Freezing, AgentEnv):
    """Its tools are of files: there is no terminal in it that could be asked anything."""

    name = "frozen_agent"

    def build_tools(self):
        every = build_tool_registry(["default"])
        return ToolRegistry([tool for tool in every if tool.name in {"read_file", "write_file"}])

    def build_task(self, item):
        return script({"calls": [call("write_file", path="answer", content="42\n")]}, "done")

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        leased = await self.executor.slot(trajectory_id)
        gives_up_s = self.freeze(item["way"], (await leased.exec("readlink /proc/self/ns/pid")).output)
        try:
            found = await getattr(self, item["way"])(leased, exec_tool, gives_up_s)
        except Exception:
            return 0.0, {}
        return float("42" in found), {}

    async def cancelled(self, leased, exec_tool, gives_up_s):
        return (await asyncio.wait_for(exec_tool(READ), gives_up_s)).output

    async def left_running(self, leased, exec_tool, gives_up_s):
        reading = asyncio.ensure_future(exec_tool(READ))
        await asyncio.wait([reading], timeout=gives_up_s)
        return reading.result().output if reading.done() else ""

    async def beside_its_tools(self, leased, exec_tool, gives_up_s):
        async with asyncio.timeout(gives_up_s):
            return (await leased.read_file("answer")).decode()


class HermesEnv(Freezing, HermesAgentBaseEnv):
    """The same in reward functions."""

    name = "frozen_hermes"

    def format_prompt(self, item):
        return script({"calls": [call("terminal", command="echo 42 > answer")]}, "done")

    async def compute_reward(self, item, result, ctx):
        async with contextlib.AsyncExitStack() as stack:
            if item["way"] == "forked":
                ctx = await stack.enter_async_context(ctx.fork())
            gives_up_s = self.freeze(item["way"], ctx.terminal("readlink /proc/self/ns/pid")["output"])
            try:
                found = await self.read(item["way"], ctx, gives_up_s)
            except Exception:
                return 0.0
            return float("42" in found)

    async def read(self, way, ctx, gives_up_s):
        if way == "in_a_thread":
            return (await asyncio.wait_for(asyncio.to_thread(ctx.read_file, "answer"), gives_up_s))["content"]
        async with asyncio.timeout(gives_up_s):  # noqa: ASYNC100 - the bridge awaits it
            return ctx.terminal("cat answer")["output"]


KINDS = {
    FilesAloneEnv: (AgentEnvConfig, ("cancelled", "left_running", "beside_its_tools")),
    HermesEnv: (HermesAgentEnvConfig, ("plainly", "in_a_thread", "forked")),
}


@pytest.mark.parametrize(
    ("env_class", "whole"),
    [
        pytest.param(FilesAloneEnv, False, id="a sandbox"),
        pytest.param(HermesEnv, False, id="a sandbox, Hermes"),
        pytest.param(HermesEnv, True, id="its container, Hermes"),
    ],
)
async def test_a_frozen_slot_is_no_score(tmp_path, monkeypatch, env_class, whole):
    monkeypatch.setattr(slot, "ALIVE_S", 1.0)
    config_cls, ways = KINDS[env_class]
    settings = {"terminal_backend": "local"} if env_class is HermesEnv else {"tool_pool_mode": "local"}
    async with running_policy(tmp_path) as policy:
        env = make(env_class, policy, tmp_path, [], config_cls=config_cls, group_size=1, **settings)
        env.items = [{"way": way, "name": way} for way in (ways[:1] if whole else ways)]
        env.n_groups_to_process = len(env.items)
        env.whole = whole
        await env.process_manager()
    assert {group["atropos"]["item"]: group["scores"] for group in groups(tmp_path)} == {
        way: [1.0] for way in env.frozen
    }
    assert len(env.frozen) == env.n_groups_to_process
    assert env.metrics.retries == {"slot_lost": len(env.frozen)}, json.dumps(env.metrics.retries)


class BusyEnv(HermesEnv):
    """What the agent wrote keeps the slot as busy as it can while it is tested."""

    name = "busy_hermes"

    def format_prompt(self, item):
        loops = "for i in $(seq 100); do (while :; do :; done) & done; wait"
        return script({"calls": [call("write_file", path="solution.sh", content=loops)]}, "done")

    async def compute_reward(self, item, result, ctx):
        try:
            async with asyncio.timeout(GIVES_UP_S):  # noqa: ASYNC100 - the bridge awaits it
                ctx.terminal("bash solution.sh")
        except TimeoutError:
            return 0.0
        return 1.0


async def test_a_busy_slot_is_a_verdict(tmp_path):
    """Else an agent could have its group dropped instead of scored."""
    async with running_policy(tmp_path) as policy:
        env = make(BusyEnv, policy, tmp_path, [], group_size=1, terminal_backend="local")
        env.items, env.n_groups_to_process = [{"name": "busy"}], 1
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[0.0]]
    assert not env.metrics.retries


@tool(toolsets=("test",), timeout_s=2)
async def wait(slot) -> str:
    """Wait for what never comes."""
    return (await slot.exec("sleep 600")).output


async def test_frozen_tool_has_no_result():
    config = SlotPoolConfig(backend="local", slots_per_container=1, max_containers=1)
    async with SlotPool(config) as pool, ToolExecutor(pool, build_tool_registry(tools=[wait])) as executor:
        asked = ToolCall(name="terminal", arguments={"command": "readlink /proc/self/ns/pid"})
        namespace = (await executor.execute("t", asked)).output.strip()
        slow = await executor.execute("t", ToolCall(name="wait"))
        assert (slow.success, slow.timed_out) == (False, True)
        freeze(namespace)
        with pytest.raises(SlotLost, match="does not answer"):
            await executor.execute("t", ToolCall(name="wait"))
