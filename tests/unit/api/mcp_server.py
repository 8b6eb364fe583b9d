"""An MCP server with a few tools: over stdio, or over HTTP when a port is given."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("little")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("it went wrong")


@server.tool()
async def slow() -> str:
    """Never end."""
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
