"""What a layer's tar is beside the content of its files, so that it can be made again, byte for byte.

    8 bytes           the size of the tar
    gzip              records: lengths (`_RECORD`), bytes of the tar, and the path of the file whose content follows

Without site-packages but isal's.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import IO

from isal import isal_zlib

from atropos.images.untrusted import decompressed, pieces

_SIZE = struct.Struct(">Q")
_RECORD = struct.Struct(">IQI")
"""Of a record: bytes of the tar, the content's size, and bytes of the file's path; without one, no content follows."""
PIECE_BYTES = 1 << 16
"""What is packed, and written, at once."""


class TarRecord:
    """The record of a tar that is being read.

    Args:
        file: what it is written to.
        count: called with how many bytes are about to be written.
    """

    def __init__(self, file: IO[bytes], count: Callable[[int], None]) -> None:
        self._file = file
        self._count = count
        # The fastest level: headers consist of zeros and repeated names, which any level shrinks to some percent.
        self._packer = isal_zlib.compressobj(1, wbits=31)
        self._raw, self._packed = bytearray(), bytearray(_SIZE.pack(0))

    def bytes(self, data: memoryview) -> None:
        """What the tar has beside contents."""
        self._raw += data
        while len(self._raw) >= PIECE_BYTES:
            self._write(0, b"")

    def content(self, path: str, size: int) -> None:
        """A file's content."""
        self._write(size, path.encode("utf-8", "surrogateescape"))

    def finish(self, size: int) -> None:
        """The tar has so many bytes, whatever was read beyond."""
        self._write(0, b"")
        self._packed += self._packer.flush()
        self._flush()
        self._file.seek(0)
        # Known at the end alone; `__init__` has kept its place.
        self._file.write(_SIZE.pack(size))

    def _write(self, size: int, path: bytes) -> None:
        raw = self._raw[:PIECE_BYTES]  # the same records, in whatever pieces the tar comes
        self._packed += self._packer.compress(_RECORD.pack(len(raw), size, len(path)) + raw + path)
        del self._raw[:PIECE_BYTES]
        if len(self._packed) >= PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        # Before the write: it is what would fill the disk.
        self._count(len(self._packed))
        self._file.write(self._packed)
        self._packed.clear()


def tar_size(record: str) -> int | None:
    """The size of the tar; None: there is no record, since it can't be made again."""
    try:
        with open(record, "rb") as file:
            return int(_SIZE.unpack(file.read(_SIZE.size))[0])
    except (OSError, struct.error):
        return None


def read(record: IO[bytes]) -> Iterator[tuple[bytes, str, int]]:
    """The parts of a tar, one after the other: bytes, then a file's path and its size; without a path, no content."""
    record.seek(_SIZE.size)
    stream, buffer = decompressed(pieces(record.fileno())), bytearray()

    def take(size: int) -> bytes:
        # A record may begin in one decompressed piece and end in the next.
        while len(buffer) < size:
            buffer.extend(next(stream))
        part = bytes(buffer[:size])
        del buffer[:size]
        return part

    for piece in stream:
        buffer += piece
        while buffer:
            raw, size, path = _RECORD.unpack(take(_RECORD.size))
            yield take(raw), os.fsdecode(take(path)), size
