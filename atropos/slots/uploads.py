"""Local files and folders as what travels to a slot: pieces of a file, and tar archives of about that size."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

PIECE_BYTES = 8 * 1024 * 1024
"""Files travel in pieces of this size: well below the wire's bound, so that calls of others pass between them."""


def pieces(content: bytes) -> Iterator[bytes]:
    """A file's content in order; one piece when it is empty."""
    yield content[:PIECE_BYTES]
    for start in range(PIECE_BYTES, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


class Bundle:
    """A tar archive of about PIECE_BYTES at most, and the files too large for one."""

    __slots__ = ("archive", "large")

    def __init__(self, archive: bytes, large: list[tuple[str, Path]]) -> None:
        self.archive = archive
        self.large = large


def bundles(folder: Path) -> Iterator[Bundle]:
    """A folder's contents as archives, in an order in which folders come before what is in them."""
    buffer, large = io.BytesIO(), list[tuple[str, Path]]()
    archive = tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 (many of them)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not file.is_symlink() and file.stat().st_size > PIECE_BYTES:
            large.append((name, file))
            continue
        archive.add(file, name, recursive=False, filter=_plain)
        if buffer.tell() > PIECE_BYTES:
            archive.close()
            yield Bundle(buffer.getvalue(), large)
            buffer, large = io.BytesIO(), []
            archive = tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
    archive.close()
    yield Bundle(buffer.getvalue(), large)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Who owns a file here means nothing there; sockets and devices stay behind."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None
