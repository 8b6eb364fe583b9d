"""What an executor tells when the infrastructure fails under it: real servers, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from atropos.errors import OutcomeUnknown, SandboxError, SlotLost
from atropos.slots import SlotPool
from atropos.tools import ToolCall, ToolExecutor, build_tool_registry
from tests.engines import pool_config


def terminal(command):
    return ToolCall(name="terminal", arguments={"command": command})


@pytest.mark.timeout(120)
async def test_a_killed_server_is_an_exception_and_the_next_trajectory_works():
    async with (
        SlotPool(pool_config("local", max_containers=1, reconnect_s=2)) as pool,
        ToolExecutor(pool, build_tool_registry(["default", "session"])) as executor,
    ):
        await executor.execute("a", ToolCall(name="session", arguments={"action": "start", "record": True}))
        running = asyncio.create_task(executor.execute("a", terminal("sleep 600")))
        waiting = asyncio.create_task(executor.execute("a", terminal("true")))
        await asyncio.sleep(0.2)
        os.kill(int(pool.backend.containers()[0].id.split("-")[0]), signal.SIGKILL)
        with pytest.raises((OutcomeUnknown, SlotLost)):
            await running
        with pytest.raises(SlotLost):
            await waiting
        with pytest.raises(SandboxError, match="must be released"):
            await executor.execute("a", terminal("true"))
        await executor.release_trajectory("a")
        async with asyncio.timeout(90):
            assert (await executor.execute("a", terminal("ls"))).output == ""


@pytest.mark.timeout(120)
async def test_a_wait_sees_what_was_shown_in_time_though_the_loop_was_blocked_past_its_deadline():
    command = "bash -c 'read; for i in {1..30}; do echo $i; sleep 0.1; done; echo whole; exec sleep 600'"
    async with (
        SlotPool(pool_config("local", max_containers=1)) as pool,
        ToolExecutor(pool, build_tool_registry(["session"])) as executor,
    ):

        async def use(trajectory="a", **arguments):
            return await executor.execute(trajectory, ToolCall(name="session", arguments=arguments))

        await use(action="start", command=command)
        await use(action="send", keys=["Enter"], timeout=0.01)
        waiting = asyncio.create_task(use(action="wait", pattern="whole", timeout=5))
        await use("b", action="list")  # meanwhile the first numbers are read
        time.sleep(8)  # noqa: ASYNC251 - the read that waits is answered with another number, the pattern comes after it
        found = await waiting
    assert found.success, found
