"""Calls that wait for a server's answer: they show one that accepts requests and answers none, as when paused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator


class PendingCalls:
    """The model calls that one server was sent. Times on the monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}
        self._answered_at = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Around one request; its end, but by a cancellation, is an answer."""
        # A key that equals no other: the same prompt may be sent several times at once.
        request = object()
        self._since[request] = time.monotonic()
        try:
            yield
        # A refusal is an answer, too. CancelledError is none, and no `Exception`.
        except Exception:
            self._answered_at = time.monotonic()
            raise
        else:
            self._answered_at = time.monotonic()
        finally:
            del self._since[request]

    def silence(self) -> tuple[int, float]:
        """How many wait, and for how many seconds none was answered while at least one of them waited."""
        now = time.monotonic()
        # From the later of both: before the oldest request there was nothing to answer.
        return len(self._since), now - max(min(self._since.values(), default=now), self._answered_at)
