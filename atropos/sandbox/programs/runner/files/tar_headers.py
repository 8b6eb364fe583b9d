"""Headers of tar archives (POSIX.1-2001: ustar, with pax records for what its fields can't hold)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

TAR_END = bytes(1024)
CONTENT_END = bytes(511)
"""What pads a member's content."""
USTAR = b"ustar\x0000"
XATTR = "SCHILY.xattr."
"""Begins the keyword of an extended attribute's record."""
MOST = 0o77777777777
"""Largest size or time that a header's field holds; no slot has an id that is too large for its."""


def tar_header(name: str, status: os.stat_result, kind: bytes, link: str = "", records: bytes = b"") -> bytes:
    """A member's header: a regular file (b"0"), hard link (b"1"), symbolic link (b"2") or folder (b"5").

    Args:
        name: the member's.
        status: what it is.
        kind: its type as in tar.
        link: where a link leads.
        records: of its extended attributes.
    """
    member, target = name.encode("utf-8", "surrogateescape"), link.encode("utf-8", "surrogateescape")
    # Only a regular file has content: a reader would skip as many bytes after a link or folder.
    mtime, size = int(status.st_mtime), status.st_size if kind == b"0" else 0
    if not fits(member):
        records += pax_record(b"path", member)
    if not fits(target):
        records += pax_record(b"linkpath", target)
    if not 0 <= mtime <= MOST:
        records += pax_record(b"mtime", b"%d" % mtime)
        mtime = 0
    if size > MOST:
        records += pax_record(b"size", b"%d" % size)
        size = 0
    block = header_block(member, kind, status.st_mode & 0o7777, status.st_uid, status.st_gid, size, mtime, target)
    if not records:
        return block
    if not is_utf8(member + target):
        records = pax_record(b"hdrcharset", b"BINARY") + records
    padded = records + CONTENT_END[: -len(records) % 512]
    return header_block(b"././@PaxHeader", b"x", 0, 0, 0, len(records), 0, b"") + padded + block


def fits(name: bytes) -> bool:
    """Whether a header's field holds a name, in the characters that every reader knows."""
    return len(name) <= 100 and name.isascii()


def is_utf8(data: bytes) -> bool:
    """Whether pax records hold it as it is."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def pax_record(key: bytes, value: bytes) -> bytes:
    """`length key=value` as a line, whose length counts itself."""
    rest = len(key) + len(value) + 3
    # Twice: the first length may have one digit more than its rest.
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


def header_block(name: bytes, kind: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, link: bytes) -> bytes:
    """The 512 bytes, with their checksum, which counts its own field as spaces."""
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, mtime)
    name, rest = name[:100], kind + link[:100].ljust(100, b"\0") + USTAR
    checksum = sum(name) + sum(numbers) + sum(rest) + 8 * 32
    return (b"%b%b%06o\0 %b" % (name.ljust(100, b"\0"), numbers, checksum, rest)).ljust(512, b"\0")
