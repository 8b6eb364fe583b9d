"""`atropos mcp` with a real MCP client over stdio."""

from __future__ import annotations

import asyncio
import sys

from mcp import Client, StdioServerParameters


async def test_an_mcp_client_works_in_a_slot():
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "atropos.cli", "mcp"])
    async with asyncio.timeout(60), Client(parameters) as client:
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
