"""External tools of one's own, for a ToolServer in a process of its own: `--tool tests.e2e.own_tools:TOOLS`."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

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


@tool(sandboxed=False, toolsets=("own",), read_only=True)
async def wait_for_file(path: str) -> str:
    """Wait until there is such a file, and change nothing."""
    while not os.path.exists(path):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return "it is there"


@tool(sandboxed=False, toolsets=("own",))
async def keep(item: str, scope: Any) -> str:
    """Keep something for the trajectory."""
    kept = scope.state.setdefault("kept", [])
    kept.append(item)
    return ",".join(kept)


_runs: Counter[str] = Counter()


@tool(sandboxed=False, toolsets=("own",))
async def tally(key: str) -> str:
    """Count how often this was run with the key."""
    _runs[key] += 1
    return str(_runs[key])


TOOLS = [echo, hang, explode, flood, nap, wait_for_file, keep, tally]
