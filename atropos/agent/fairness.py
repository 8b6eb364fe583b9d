"""Short turns of the event loop, though hundreds of trajectories go on at once.

A pass of the loop runs everything that is ready. When 256 answers come together and each costs a millisecond or two
(tokenizing, parsing, building the next request), that is one pass of half a second in which no I/O is seen. So such
pieces go through one gate, and the loop gets round between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")

SHORT_TOKENS = 256
"""A turn of so many tokens is read in a few hundredths of a millisecond: hundreds at once are no long pass of the loop,
and waiting in line behind longer pieces would cost more than it saves."""

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


def gate() -> asyncio.Lock:
    """Held around a piece of work without an await: one such piece a pass of the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _gates:
        _gates[loop] = asyncio.Lock()
    return _gates[loop]


def gate_for(tokens: int) -> contextlib.AbstractAsyncContextManager[None]:
    """The gate around reading a turn of so many tokens; none where that is short work."""
    return gate() if tokens > SHORT_TOKENS else contextlib.nullcontext()


async def started_in_turn(work: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
    """Await `work()`, whose first step (a request being built and sent) is one such piece as well."""
    async with gate():
        task = asyncio.get_running_loop().create_task(work())
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
    return await task
