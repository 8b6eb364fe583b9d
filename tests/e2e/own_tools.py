"""External tools of one's own, for a ToolServer in a process of its own: `--tool tests.e2e.own_tools:TOOLS`."""

from __future__ import annotations

import asyncio

from atropos.tools.base import tool


@tool(sandboxed=False, toolsets=("own",))
async def echo(text: str) -> str:
    """Say it again."""
    return text


@tool(sandboxed=False, toolsets=("own",))
async def hang() -> str:
    """Never end."""
    await asyncio.sleep(3600)
    return ""


@tool(sandboxed=False, toolsets=("own",))
async def explode() -> str:
    """Fail with a bug."""
    raise RuntimeError("boom")


@tool(sandboxed=False, toolsets=("own",))
async def flood(megabytes: int) -> str:
    """Answer a lot."""
    return "x" * (megabytes * 1_000_000)


@tool(sandboxed=False, toolsets=("own",))
async def nap(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "rested"


TOOLS = [echo, hang, explode, flood, nap]
