"""`atropos mcp`: a slot's tools for any MCP client, over stdio. One client, one trajectory, one slot."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import version
from io import FileIO
from typing import TYPE_CHECKING, Any, cast

from atropos.errors import SandboxError
from atropos.tools.models import ToolCall, ToolResult

if TYPE_CHECKING:
    from mcp import types
    from mcp.server.lowlevel import Server

    from atropos.tools import ToolExecutor

_MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest message of a client."""


def make_server(executor: ToolExecutor, trajectory_id: str) -> Server[Any]:
    """An MCP server whose tools run in the slot of one trajectory."""
    from mcp import types
    from mcp.server.lowlevel import Server

    async def list_tools(_: object, __: object) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.schema.parameters,
                    annotations=types.ToolAnnotations(read_only_hint=tool.read_only),
                )
                for tool in executor.tools
            ]
        )

    async def call_tool(_: object, wanted: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            result = await executor.execute(
                trajectory_id, ToolCall(name=wanted.name, arguments=dict(wanted.arguments or {}))
            )
        except SandboxError as error:
            # reported as an error of the call; the slot is gone, and the next call starts in a fresh one
            await executor.release_trajectory(trajectory_id)
            return _answer(
                f"the sandbox failed ({error.code}): {error}; the next call starts in a fresh one", error=True
            )
        return _answer(_shown(result), error=not result.success)

    return Server("atropos", version=version("atropos"), on_list_tools=list_tools, on_call_tool=call_tool)


def _shown(result: ToolResult) -> str:
    lines = [result.output] if result.output else []
    if result.error and result.error != f"exit code {result.exit_code}":
        lines.append(f"error: {result.error}")
    if result.exit_code is not None and result.exit_code != 0:
        lines.append(f"exit code: {result.exit_code}")
    return "\n".join(lines) or "(no output)"


def _answer(text: str, *, error: bool) -> types.CallToolResult:
    from mcp import types

    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=error)


async def serve(backend: str, toolsets: list[str], *, network: bool) -> None:
    """Serve until stdin ends or this is cancelled, then reset the slot and stop the pool.

    Raises:
        ConfigError: a setting is wrong.
        SandboxError: no slot is available.
    """
    from mcp.server.stdio import stdio_server

    from atropos.slots import SlotPool, SlotPoolConfig
    from atropos.tools import ToolExecutor, ToolExecutorConfig, build_tool_registry

    tools = build_tool_registry(toolsets)
    trajectory_id = f"mcp-{uuid.uuid4().hex}"
    size = {"slots_per_container": 1, "max_containers": 1}
    config = SlotPoolConfig(backend=backend, job_id=f"atropos-{trajectory_id}", allow_network=network, **size)
    source = await _stdin_lines()
    async with (
        SlotPool(config) as pool,
        ToolExecutor(pool=pool, tools=tools, config=ToolExecutorConfig(allow_network=network)) as executor,
    ):
        server = make_server(executor, trajectory_id)
        async with stdio_server(stdin=cast("Any", source)) as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())


async def _stdin_lines() -> AsyncIterator[str]:
    """The lines of stdin, read by the event loop: a blocked reader thread could not be ended by a signal."""
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    own = os.fdopen(os.dup(0), "rb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # child processes must not read the client's messages
    os.close(nothing)
    kind = os.fstat(own.fileno()).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or own.isatty()):
        return _file_lines(own)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), own)

    async def lines() -> AsyncIterator[str]:
        while line := await reader.readline():
            yield line.decode("utf-8", "replace")

    return lines()


async def _file_lines(source: FileIO) -> AsyncIterator[str]:
    """The lines of a file or of /dev/null, which an event loop can't watch and which don't block for long."""
    with io.BufferedReader(source) as lines:
        while line := await asyncio.to_thread(lines.readline):
            yield line.decode("utf-8", "replace")
