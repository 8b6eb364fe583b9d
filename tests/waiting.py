"""Waiting in tests: for something that is sure to come, with a deadline that only a failure meets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str = "the condition", seconds: float = 30) -> None:
    """Poll until `condition()` is true; an AssertionError that says `what` after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come about within {seconds} s"
        await asyncio.sleep(0.01)
