"""What an executor tells when the infrastructure fails under it: real servers, killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from atropos.errors import OutcomeUnknown, SandboxError, SlotLost
from atropos.slots import SlotPool
from atropos.tools import ToolCall, ToolExecutor, build_tool_registry
from tests.engines import pool_config
from tests.waiting import SLOWNESS


def terminal(command):
    return ToolCall(name="terminal", arguments={"command": command})


@pytest.mark.timeout(120 * SLOWNESS)
async def test_killed_server_is_raised():
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
        async with asyncio.timeout(90 * SLOWNESS):
            assert (await executor.execute("a", terminal("ls"))).output == ""


async def test_session_ended_unread():
    """A slot keeps 64 processes, those that have ended included."""
    async with (
        SlotPool(pool_config("local", max_containers=1)) as pool,
        ToolExecutor(pool, build_tool_registry(["default", "session"])) as executor,
    ):

        async def use(name, **arguments):
            return await executor.execute("a", ToolCall(name=name, arguments=arguments))

        old = await use("session", action="start", command="cat; until [ -e go ]; do sleep 0.01; done", record=True)
        new = await use("session", action="start", command="cat")
        await use("process", action="write", session_id=old.data["session_id"], data="\x04")
        await use("terminal", command="touch go")
        assert "exit code 0" in (await use("process", action="wait", session_id=old.data["session_id"])).output
        for _ in range(64):
            await use("terminal", command="true", background=True)
        listed = await use("session", action="list")
        assert listed.success, listed.error
        assert [": 80x24, ended]" in row for row in listed.output.splitlines()] == [True, False]
        shown = await use("session", action="send", text="hi", keys=["Enter"])
        assert (shown.data["session_id"], shown.data["screen"]) == (new.data["session_id"], "hi\nhi")
        for one in (old, new):
            assert (await use("session", action="close", session_id=one.data["session_id"])).success
