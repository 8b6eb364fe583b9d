"""Turns at something that only a few may do at once, fair between the shares of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from weakref import WeakKeyDictionary

from atropos.slots.containers.share import Share


class Turns:
    """Of those that wait, the next is one of the share that has the fewest turns by its weight, or had one longest ago.

    Args:
        most: turns at once.
        each: of one share; so that those of one, if none comes to an end, don't keep all others waiting.
    """

    def __init__(self, most: int, each: int) -> None:
        self._free = most
        self._each = each
        self._in_use = Counter[Share]()
        self._waiting: dict[asyncio.Future[Share], Collection[Share]] = {}
        """And whose they are, in the order in which they came."""
        self._last = WeakKeyDictionary[Share, int]()
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<Turns free={self._free} waiting={len(self._waiting)}>"

    @contextlib.asynccontextmanager
    async def turn(self, wanted_by: Collection[Share]) -> AsyncGenerator[None]:
        """A turn, for the length of the block. `wanted_by`: any of them counts it as its own; may grow meanwhile."""
        served = asyncio.get_running_loop().create_future()
        self._waiting[served] = wanted_by
        self._serve()
        try:
            await served
            yield
        finally:
            self._waiting.pop(served, None)
            if served.done() and not served.cancelled():
                self._free += 1
                self._in_use[share := served.result()] -= 1
                if not self._in_use[share]:
                    del self._in_use[share]
            self._serve()

    def _serve(self) -> None:
        while self._free:
            able = (
                (self._in_use[share] / share.quotas.weight, self._last.get(share, 0), number, served, share)
                for number, (served, wanted_by) in enumerate(self._waiting.items())
                for share in wanted_by
                if self._in_use[share] < self._each and not served.cancelled()
            )
            chosen = min(able, default=None, key=lambda each: each[:3])
            if chosen is None:
                return
            *_, served, share = chosen
            del self._waiting[served]
            self._free -= 1
            self._in_use[share] += 1
            self._last[share] = next(self._numbers)
            served.set_result(share)
