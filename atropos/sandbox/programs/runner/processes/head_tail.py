"""The head and the tail of a stream, within a bound."""

from __future__ import annotations

from atropos.sandbox.programs.runner.loop import CHUNK


class HeadTail:
    """The head and the tail of a stream, within a bound."""

    __slots__ = ("half", "head", "tail", "total")

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.head: bytes | bytearray = b""
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Append `data`."""
        if not self.total and len(data) <= self.half:
            self.head = data  # usually the whole output
            self.total = len(data)
            return
        if isinstance(self.head, bytes):
            self.head = bytearray(self.head)
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        # Cut seldom: each time all that stays is moved.
        if len(self.tail) > 4 * self.half + 4 * CHUNK:
            del self.tail[: -self.half]

    def dropped(self) -> int:
        """Bytes of the middle that were dropped."""
        return max(0, self.total - len(self.head) - min(self.half, len(self.tail)))

    def value(self) -> bytes:
        """Both, with a line in between that says what was dropped."""
        if not self.tail:
            return bytes(self.head)
        lost = self.dropped()
        note = b"\n[... %d bytes dropped ...]\n" % lost if lost else b""
        return b"".join((self.head, note, self.tail[-self.half :]))
