"""The head and the tail of a stream, within a bound."""

from __future__ import annotations

from atropos.sandbox.programs.runner.loop import CHUNK


class HeadTail:
    """The head and the tail of a stream, within a bound."""

    __slots__ = ("half", "head", "tail", "tail_size", "total")

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.head: bytes | bytearray = b""
        self.tail: list[bytes] = []
        self.tail_size = 0
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
        if data:
            self.tail.append(data)
            self.tail_size += len(data)
            if self.tail_size > 4 * self.half + 4 * CHUNK:
                self._trim()

    def _trim(self) -> None:
        joined = b"".join(self.tail)[-self.half :]
        self.tail = [joined]
        self.tail_size = len(joined)

    def dropped(self) -> int:
        """Bytes of the middle that were dropped."""
        return max(0, self.total - len(self.head) - min(self.half, self.tail_size))

    def value(self) -> bytes:
        """Both, with a line in between that says what was dropped."""
        if not self.tail:
            return bytes(self.head)
        self._trim()
        lost = self.dropped()
        note = b"\n[... %d bytes dropped ...]\n" % lost if lost else b""
        return b"".join((self.head, note, self.tail[0]))
