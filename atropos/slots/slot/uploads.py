"""Local files and folders as what travels to a slot: pieces of a file, or of a tar archive."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

PIECE_BYTES = 4 * 1024 * 1024
"""What is sent at once, and sent again when its connection breaks, in bytes."""


def pieces(content: bytes) -> Iterator[bytes]:
    """A content in order; one piece when it is empty."""
    yield content[:PIECE_BYTES]
    for start in range(PIECE_BYTES, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def pieces_of(file: Path) -> Iterator[bytes]:
    """A file's content in order."""
    with file.open("rb", buffering=0) as source:
        while piece := source.read(PIECE_BYTES):
            yield piece


def archive_of(folder: Path) -> Iterator[bytes]:
    """A folder's contents as an archive, in an order in which folders come before what is in them.

    Who owns a file here means nothing there; sockets and devices stay behind.

    Raises:
        OSError: something can't be read, or became shorter while it was.
    """
    buffer = bytearray()
    seen: dict[tuple[int, int], str] = {}
    for name, path, status in _below(str(folder), ""):
        member = _member(name, path, status, seen)
        if member is None:
            continue
        buffer += member.tobuf(tarfile.PAX_FORMAT)
        if member.size:
            yield from _content(path, member.size, buffer)
        # Many small members make one piece, since each piece is a request.
        if len(buffer) >= PIECE_BYTES:
            yield bytes(buffer)
            buffer.clear()
    # Two blocks of zeros end an archive (POSIX).
    buffer += bytes(2 * tarfile.BLOCKSIZE)
    yield bytes(buffer)


def _below(folder: str, prefix: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Name, path and status of everything below a folder."""
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        yield prefix + entry.name, entry.path, entry.stat(follow_symlinks=False)
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, f"{prefix}{entry.name}/")


def _member(name: str, path: str, status: os.stat_result, seen: dict[tuple[int, int], str]) -> tarfile.TarInfo | None:
    """The header of a file, folder, link or FIFO; None for anything else. `seen`: names of files that have several."""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    member.uname = member.gname = "root"
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        member.type = tarfile.DIRTYPE
    elif kind == stat.S_IFLNK:
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif kind == stat.S_IFIFO:
        member.type = tarfile.FIFOTYPE
    elif kind != stat.S_IFREG:
        return None
    elif status.st_nlink > 1 and (first := seen.setdefault((status.st_dev, status.st_ino), name)) != name:
        member.type, member.linkname = tarfile.LNKTYPE, first
    else:
        member.size = status.st_size
    return member


def _content(path: str, size: int, buffer: bytearray) -> Iterator[bytes]:
    """Add a file's content to the buffer, which is given away whenever it is full."""
    remaining = size
    with open(path, "rb", buffering=0) as source:
        while remaining:
            data = source.read(min(remaining, PIECE_BYTES))
            if not data:
                # The header with its size has been sent already.
                raise OSError(errno.EIO, "became shorter while it was read", path)
            remaining -= len(data)
            buffer += data
            if len(buffer) >= PIECE_BYTES:
                yield bytes(buffer)
                buffer.clear()
    buffer += bytes(-size % tarfile.BLOCKSIZE)
