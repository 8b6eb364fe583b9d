"""Packing files and folders as tar archives, in a child."""

from __future__ import annotations

import errno
import os
from stat import S_ISLNK, S_ISREG
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.files.tar_headers import CONTENT_END, TAR_END, XATTR, pax_record, tar_header
from atropos.sandbox.programs.runner.opening import open_at_once
from atropos.sandbox.programs.runner.paths import path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    from atropos.sandbox.programs.runner.work import Outcome

PACK_BYTES = 1 << 18
"""What is gathered before it is written; a file that is longer than half of it is written by itself."""
REPLACED = {errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL}
"""Errors of opening what has become something else."""


def op_tar(call: int, path: str, max_bytes: int) -> None:
    """Answer with an archive."""
    path = path_of(path)
    Work(call, lambda: pack(path, max_bytes))


class BoundedBuffer:
    """A file to write to, in memory, that refuses to grow beyond a bound."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.parts: list[bytes] = []

    def write(self, data: bytes | bytearray) -> None:
        """Add to it."""
        self.claim(len(data))
        self.size += len(data)
        self.parts.append(bytes(data))

    def copy(self, fd: int, size: int) -> int:
        """Add at most `size` bytes of an open file; returns how many there were."""
        remaining = size
        while remaining and (data := os.read(fd, min(remaining, PACK_BYTES))):
            self.write(data)
            remaining -= len(data)
        return size - remaining

    def claim(self, size: int) -> None:
        """Raises `OpFailed` where `size` more bytes would exceed the bound."""
        if self.size + size > self.limit:
            raise OpFailed("too_large", f"the archive is larger than {self.limit} bytes", "output")


def pack(path: str, max_bytes: int) -> Outcome:
    """An archive of a file, or of a folder's contents."""
    out = BoundedBuffer(max_bytes)
    write_archive(out, path)
    return "file_result", {"size": out.size, "mode": 0o644, "sha256": None}, {"data": b"".join(out.parts)}


def write_archive(out: BoundedBuffer, path: str) -> None:
    """Write the archive."""
    status = os.lstat(path)
    packer = Packer(out)
    if os.path.isdir(path):
        packer.add_folders(path)
    else:
        packer.add(None, path, path.rstrip("/").rpartition("/")[2], link=S_ISLNK(status.st_mode))
    packer.pending += TAR_END
    out.write(packer.pending)


class Packer:
    """Writes one archive; tarfile would take ten times as long for a small file.

    Programs of the slot may move things meanwhile: below the top no link is followed, nothing of /proc is read, and
    what vanishes, or becomes something else, is left out.
    """

    def __init__(self, out: BoundedBuffer) -> None:
        self.out = out
        self.pending = bytearray()
        self.names: dict[tuple[int, int], str] = {}
        """Names of files that have several, by device and inode."""

    def add_folders(self, top: str) -> None:
        """A folder and all below it."""
        pending = [(top, ".")]
        while pending:
            path, name = pending.pop()
            # The top may be a link, which the caller named; below it a link could lead out.
            follow = 0 if name == "." else os.O_NOFOLLOW
            try:
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
            except (FileNotFoundError, NotADirectoryError):
                continue
            below: list[tuple[str, str]] = []
            try:
                status = os.fstat(folder)
                # /proc has endless files, and files of PID 1's own.
                if is_special(status.st_dev):
                    continue
                self.header(f"{name}/", status, b"5", records=attributes(folder))
                with os.scandir(folder) as listing:
                    entries = sorted(listing, key=lambda entry: entry.name)
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below.append((f"{path}/{entry.name}", f"{name}/{entry.name}"))
                    elif entry.is_symlink() or entry.is_file(follow_symlinks=False):
                        self.add(folder, entry.name, f"{name}/{entry.name}", link=entry.is_symlink())
                pending += reversed(below)
            finally:
                os.close(folder)

    def add(self, folder: int | None, entry: str, name: str, *, link: bool) -> None:
        """A symbolic link, or a regular file."""
        try:
            if link:
                status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                if not is_special(status.st_dev):
                    self.header(name, status, b"2", os.readlink(entry, dir_fd=folder))
                return
            # What it is was asked of the name; it is asked again of the descriptor below.
            fd = open_at_once(entry, os.O_RDONLY | os.O_NOFOLLOW, folder=folder)
        except OSError as error:
            if error.errno in REPLACED:
                return
            raise
        try:
            status = os.fstat(fd)
            if S_ISREG(status.st_mode) and not is_special(status.st_dev):
                self.add_file(fd, status, name)
        finally:
            os.close(fd)

    def add_file(self, fd: int, status: os.stat_result, name: str) -> None:
        """An open regular file, or that it is one that is in the archive already."""
        if status.st_nlink > 1:
            first = self.names.setdefault((status.st_dev, status.st_ino), name)
            if first != name:
                self.header(name, status, b"1", first)
                return
        size = status.st_size
        self.header(name, status, b"0", records=attributes(fd))
        # Before it is read: a file beyond the bound shall not be read for nothing.
        self.out.claim(len(self.pending) + size)
        if size > PACK_BYTES // 2:
            self.out.write(self.pending)
            self.pending.clear()
            got = self.out.copy(fd, size)
        else:
            data = os.read(fd, size) if size else b""
            self.pending += data
            got = len(data)
        # The header has promised `size` bytes; what follows would be read as content.
        if got < size:
            raise OpFailed("io", "a file became shorter while it was read")
        self.pending += CONTENT_END[: -size % 512]

    def header(self, name: str, status: os.stat_result, kind: bytes, link: str = "", records: bytes = b"") -> None:
        """The start of a member."""
        self.pending += tar_header(name, status, kind, link, records)
        if len(self.pending) > PACK_BYTES // 2:
            self.out.write(self.pending)
            self.pending.clear()


def attributes(fd: int) -> bytes:
    """Records of the extended attributes of an open file or folder."""
    records = b""
    try:
        for name in os.listxattr(fd):
            if "=" not in name:  # it would end the record's keyword
                records += pax_record(os.fsencode(XATTR + name), os.getxattr(fd, name))
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENODATA):  # none here, or one that is gone by now
            raise
    return records
