"""Concurrency and rate limits: a FIFO semaphore with a bounded queue, and a token bucket in front of it."""

from __future__ import annotations

import asyncio
from collections import deque

from atropos.api.http import Refusal, TokenBucket
from atropos.api.settings import Bounds

Place = asyncio.Future[None]
"""In a turnstile; done when it is its turn. To be awaited shielded: a cancelled one would count as a turn that was
taken."""


class Turnstile:
    """Lets `concurrency` calls in, `queue` wait in order, and refuses the rest with 429.

    Joining the queue is synchronous (`enter`), so that the order of requests is the order of turns.
    """

    def __init__(self, name: str, bounds: Bounds) -> None:
        self._name = name
        self._bounds = bounds
        self._running = 0
        self._waiting: deque[Place] = deque()
        self._bucket = TokenBucket(bounds.rate_per_s, bounds.burst)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits and the bucket is full, so that the turnstile can be discarded."""
        return not self._running and not self._waiting and self._bucket.full

    def __repr__(self) -> str:
        return f"<Turnstile {self._name} running={self._running} waiting={len(self._waiting)}>"

    def enter(self) -> Place:
        """Take a turn, or a place in the queue; it must be left, also before its turn.

        Raises:
            Refusal: 429, with the time after which to retry.
        """
        if wait_s := self._bucket.wait_s():
            text = f"{self._name}: at most {self._bounds.rate_per_s:g} calls a second; retry later"
            raise Refusal(429, "rate_limited", text, retry_after_s=wait_s)
        place: Place = asyncio.get_running_loop().create_future()
        if self._running < self._bounds.concurrency and not self._waiting:
            self._running += 1
            place.set_result(None)
        elif len(self._waiting) >= self._bounds.queue:
            raise Refusal(
                429,
                "busy",
                f"{self._name}: {self._running} calls run and {len(self._waiting)} wait; retry later",
                retry_after_s=1,
            )
        else:
            self._waiting.append(place)
        self._bucket.take()
        return place

    def leave(self, place: Place) -> None:
        """End a turn, or give up a place in the queue."""
        if not place.done():
            self._waiting.remove(place)
            place.cancel()
            return
        self._running -= 1
        while self._waiting and self._running < self._bounds.concurrency:
            self._running += 1
            self._waiting.popleft().set_result(None)
