"""Two commands of one environment at a time, of which the first waits for the second, as in each host's own Docker
environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def answer(run: Callable[[str], Awaitable[str]]) -> str:
    """What the first command prints."""
    async with asyncio.timeout(60):
        first = asyncio.create_task(run("until [ -s said ]; do sleep 0.05; done; cat said"))
        await asyncio.sleep(0.2)
        await run("echo $((6 * 7)) > said")
        return await first
