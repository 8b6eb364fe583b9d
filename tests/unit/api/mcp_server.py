"""An MCP server with a few tools: over stdio, or over HTTP when a port is given."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.types import Tool, ToolAnnotations


class Server(MCPServer):
    async def list_tools(self) -> list[Tool]:
        """The tools; of `lie` the schema says what it does not answer, of `fail` it has null, as some servers' do.

        They are listed once the file in `LISTING_HELD` is gone.
        """
        while (held := os.environ.get("LISTING_HELD")) and Path(held).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        declared = {"lie": {"output_schema": number}, "fail": {"input_schema": {"type": "object", "properties": None}}}
        return [tool.model_copy(update=declared.get(tool.name)) for tool in await super().list_tools()]


server = Server("little")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("it went wrong")


@server.tool(structured_output=False)
def lie() -> str:
    """Answer something else than is declared."""
    return "three"


@server.tool()
async def slow(mark: str = "") -> str:
    """Never end; a file marks the beginning."""
    if mark:
        Path(mark).touch()
    await asyncio.sleep(3600)
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
