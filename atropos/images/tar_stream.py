"""The tar of a layer as it comes: read, decompressed and digested by a thread, ahead of who unpacks it."""

from __future__ import annotations

import hashlib
import queue
import tarfile
import threading
from collections.abc import Iterator

from atropos.images.tar_record import TarRecord
from atropos.images.untrusted import ImageRefused, decompressed

AHEAD = 8
"""Pieces that the thread may be ahead."""


class TarStream:
    """A file that is read once, from its beginning to its end, and at most `limit` bytes of it. `record` learns of all.

    What writers of layers leave out at its end is filled up with zeros: the last block, and all of a layer with no
    members.
    """

    def __init__(self, packed: Iterator[bytes], limit: int, record: TarRecord) -> None:
        self.size = 0
        self._limit = limit
        self._record = record
        self._digest = hashlib.sha256()
        # Bounded: a download may be faster than the disk. zlib and hashlib release the interpreter's lock, so both
        # threads run.
        self._pieces: queue.Queue[bytes | Exception | None] = queue.Queue(AHEAD)
        """None: there are no more."""
        self._ended = False
        self._piece = memoryview(b"")
        self._at = 0
        """Where reading goes on in the piece."""
        self._before = 0
        """Bytes before the piece."""
        # A daemon: where unpacking fails, it may hang in a read of the pipe or in a full queue.
        threading.Thread(target=self._read_ahead, args=(packed,), daemon=True).start()

    def _read_ahead(self, packed: Iterator[bytes]) -> None:
        try:
            for piece in decompressed(packed):
                self.size += len(piece)
                # A few kilobytes of gzip may unpack to terabytes.
                if self.size > self._limit:
                    raise ImageRefused("a layer that is larger than its bound")
                self._digest.update(piece)
                self._pieces.put(piece)
            self._pieces.put(bytes(-self.size % tarfile.BLOCKSIZE or (0 if self.size else tarfile.BLOCKSIZE)))
            self._pieces.put(None)
        # Raised by whoever reads: a thread's own exception would reach nobody.
        except Exception as error:
            self._pieces.put(error)

    def _some(self, most: int) -> memoryview:
        """The next bytes, as many as are there; none: this is the end."""
        # A loop, as pieces may be empty.
        while self._at == len(self._piece) and not self._ended:
            piece = self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            self._ended = piece is None
            self._before += len(self._piece)
            self._piece, self._at = memoryview(piece or b""), 0
        # A memoryview: what a file will hold is not copied on its way to `write`.
        some = self._piece[self._at : self._at + most]
        self._at += len(some)
        return some

    def _recorded(self, most: int) -> memoryview:
        some = self._some(most)
        self._record.bytes(some)
        return some

    def content(self, path: str, size: int) -> Iterator[memoryview]:
        """The next `size` bytes, as they come, which a file will hold.

        Raises:
            EOFError: there are less.
        """
        # Not the bytes: they are in the file, from which `repack` takes them.
        self._record.content(path, size)
        while size:
            some = self._some(size)
            if not some:
                raise EOFError("unexpected end of data")
            size -= len(some)
            yield some

    def read(self, size: int) -> bytes:
        """As a file's."""
        some = self._recorded(size)
        # The usual case: a header within one piece.
        if len(some) == size:
            return bytes(some)
        parts = [some]
        while (size := size - len(parts[-1])) and (some := self._recorded(size)):
            parts.append(some)
        return b"".join(parts)

    def tell(self) -> int:
        """As a file's."""
        return self._before + self._at

    def seek(self, position: int) -> None:
        """As a file's, forward alone."""
        if position < self.tell():
            # A header may name any size, and tarfile then seeks by it.
            raise ValueError("a tar that leads back")
        remaining = position - self.tell()
        while remaining and (some := self._recorded(remaining)):
            remaining -= len(some)

    def finish(self) -> str:
        """Read to the end; the SHA-256 of everything."""
        # What follows the end mark is part of the digest, too.
        while self._recorded(1 << 30):
            pass
        return self._digest.hexdigest()
