"""Waiting in tests: for a condition that will hold, with a deadline that only a failure reaches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

SLOWNESS = float(os.environ.get("ATROPOS_SLOWNESS", "1"))
"""What deadlines are multiplied by, where the machine is an emulated one (`make test-cgroup2`)."""


async def until(
    condition: Callable[[], object], what: str | Callable[[], str] = "the condition", seconds: float = 30
) -> None:
    """Poll until `condition()` is true, on a tenth of a CPU at most; after `seconds`, an AssertionError with `what`.

    A function as `what` is called then, to tell how it stands.
    """
    seconds *= SLOWNESS
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        began = time.thread_time()
        if condition():
            return
        if asyncio.get_running_loop().time() >= deadline:
            raise AssertionError(f"{what if isinstance(what, str) else what()} did not come about within {seconds} s")
        await asyncio.sleep(max(0.01, 9 * (time.thread_time() - began)))
