"""Which answers of a sandbox server a client still has to acknowledge; the server keeps an answer until then."""

from __future__ import annotations

from collections import deque

ACKS_AT_ONCE = 64
"""With this many answers to acknowledge, the acknowledgement doesn't wait for a next call."""


class Acknowledgements:
    """The calls whose answers came, until the server is known to have read that.

    An acknowledgement may be lost with its connection: it is kept until the echo of a heartbeat that was sent after it.

    Attributes:
        due: whether they are sent even when no call goes out that could carry them.
    """

    def __init__(self) -> None:
        self.due = False
        self._waiting: list[str] = []
        self._sent: list[str] = []
        self._covered: deque[tuple[int, list[str]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def unconfirmed(self) -> bool:
        """Whether the server may not know of some."""
        return bool(self._waiting or self._sent)

    @property
    def many(self) -> bool:
        """Whether enough wait to be sent in a frame of their own."""
        return len(self._waiting) >= ACKS_AT_ONCE

    def add(self, call_id: str) -> None:
        """An answer came."""
        self._waiting.append(call_id)

    def take(self) -> tuple[str, ...]:
        """The ids to send now."""
        # `_sent` until a heartbeat covers them: TCP says nothing of what the server has read.
        ids, self._waiting, self.due = self._waiting, [], False
        self._sent += ids
        return tuple(ids)

    def beat(self, seq: int) -> None:
        """A heartbeat is sent."""
        self._covered.append((seq, self._sent))
        self._sent = []

    def echoed(self, seq: int) -> None:
        """A heartbeat came back: the server has read what was sent before it."""
        while self._covered and self._covered[0][0] <= seq:
            self._covered.popleft()

    def resend(self) -> None:
        """The connection is new: send again what the server may not have read."""
        # Acknowledging twice does no harm.
        self._waiting = [*(each for _, acks in self._covered for each in acks), *self._sent, *self._waiting]
        self._covered.clear()
        self._sent = []
        self.due = bool(self._waiting)
