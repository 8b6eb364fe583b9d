"""Small pieces that backends share: a flag for `changed()`, patience with what keeps failing, and persistence."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from atropos.errors import BackendUnavailable


class ChangeFlag:
    """Remembers that something changed until somebody has waited for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Something changed."""
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next change, or one that nobody has waited for yet; or until `timeout_s` seconds are over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()


@dataclass
class Patience:
    """Growing pauses between attempts that keep failing, with jitter so that many callers don't come in step.

    Attributes:
        first_s: the first pause, in seconds; each failure doubles it up to `longest_s`.
    """

    first_s: float = 0.5
    longest_s: float = 15.0
    failures: int = 0
    _until: float = 0.0

    def failed(self) -> float:
        """Note a failure; answers how long to wait, in seconds."""
        pause = min(self.longest_s, self.first_s * 2 ** min(self.failures, 20))
        self.failures += 1
        pause *= random.uniform(0.8, 1.2)
        self._until = time.monotonic() + pause
        return pause

    def worked(self) -> None:
        """Note a success: the next failure starts small again."""
        self.failures = 0
        self._until = 0.0

    @property
    def left_s(self) -> float:
        """How long until the next attempt is due, in seconds; 0 when it is."""
        return max(0.0, self._until - time.monotonic())


async def persist(action: Callable[[], Awaitable[None]], within_s: float) -> None:
    """Do what an engine may refuse for a moment: again and again, for at most `within_s` seconds.

    Raises:
        BackendUnavailable: it still refuses, or trying again can't change it.
    """
    patience = Patience(first_s=0.2, longest_s=2)
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await action()
        except BackendUnavailable as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
        await asyncio.sleep(patience.failed())
