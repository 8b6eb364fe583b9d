"""Keeps the iterations of the event loop short while hundreds of trajectories run.

An iteration runs everything that is ready. When 256 answers arrive together and each costs a millisecond or two
(tokenizing, parsing, building the next request), one iteration takes half a second, in which no I/O is done. So such
pieces of work share one lock, and the loop does I/O between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine
from typing import TypeVar

from atropos.aio import Tasks

Value = TypeVar("Value")

SHORT_TOKENS = 256
"""A shorter turn is parsed in a few hundredths of a millisecond, which costs less than waiting for the lock."""

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


def gate() -> asyncio.Lock:
    """The lock around a piece of work without an await: one such piece in each iteration of the loop."""
    # A lock for each loop: asyncio's locks belong to the one that they were first waited for in.
    loop = asyncio.get_running_loop()
    if loop not in _gates:
        _gates[loop] = asyncio.Lock()
    return _gates[loop]


def gate_for(tokens: int) -> contextlib.AbstractAsyncContextManager[None]:
    """The lock for parsing a turn of this many tokens; a null context for a short one."""
    return gate() if tokens > SHORT_TOKENS else contextlib.nullcontext()


async def started_in_turn(work: Callable[[], Coroutine[object, object, Value]]) -> Value:
    """Await `work()` in a task of its own; its first step, which builds and sends a request, holds the lock too."""
    async with Tasks("turn") as tasks:
        async with gate():
            task = tasks.spawn(work(), "request", awaited=True)
            # The task begins here, and runs up to its first wait, while the lock is held.
            await asyncio.sleep(0)
        return await task
