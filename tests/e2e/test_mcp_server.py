"""`atropos mcp` with a real MCP client over stdio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

from tests.processes import adopt_orphans, descendants, gone_within, running
from tests.waiting import until

adopt_orphans()


async def test_mcp_client_works_in_slot():
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "atropos.cli", "mcp"])
    async with asyncio.timeout(120), Client(parameters) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"terminal", "read_file", "write_file"} <= set(listed)
        assert listed["terminal"].input_schema["required"] == ["command"]
        await client.call_tool("write_file", {"path": "a.txt", "content": "kept between calls\n"})
        answer = await client.call_tool("terminal", {"command": "cat a.txt; hostname"})
        assert "kept between calls" in answer.content[0].text
        failed = await client.call_tool("terminal", {"command": "echo no; exit 3"})
        assert failed.is_error is True
        assert "exit code: 3" in failed.content[0].text
        wrong = await client.call_tool("terminal", {"cmd": "x"})
        assert wrong.is_error is True
        assert "'command' is missing" in wrong.content[0].text


async def test_a_lost_slot_is_replaced():
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "atropos.cli", "mcp"])
    async with asyncio.timeout(120), Client(parameters) as client:
        await client.call_tool("write_file", {"path": "a.txt", "content": "x"})
        hanging = asyncio.create_task(client.call_tool("terminal", {"command": "sleep 600"}))
        await until(lambda: running("sleep 600"), "the call's program")
        for pid in [pid for pid, line in descendants().items() if "atropos.sandbox" in line]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lost = await hanging
        assert lost.is_error is True
        assert "the next call starts in a fresh one" in lost.content[0].text
        while True:  # a container takes a moment to come
            answer = await client.call_tool("terminal", {"command": "ls -A"})
            if not answer.is_error:
                break
        assert answer.content[0].text == "(no output)"


async def test_leaving_client_is_tidy():
    before = set(descendants())
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "atropos.cli", "mcp"])
    async with asyncio.timeout(120):
        async with Client(parameters) as client:
            await client.call_tool("terminal", {"command": "true"})
            hanging = asyncio.create_task(client.call_tool("terminal", {"command": "sleep 601"}))
            await until(lambda: running("sleep 601"), "the call's program")
        await asyncio.gather(hanging, return_exceptions=True)
    assert await gone_within(20, but=before) == []


@pytest.mark.parametrize("stdin", ["/dev/null", "file"])
async def test_any_stdin_is_read_whole(stdin: str, tmp_path: Path):
    if stdin == "file":
        stdin = str(tmp_path / "messages")
        Path(stdin).write_text("no JSON\n")
    with open(stdin) as source:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atropos.cli", "mcp"),
            stdin=source,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, b"Traceback" in said) == (0, False), said
