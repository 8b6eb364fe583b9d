"""Packing files and folders as tar archives, in a child."""

from __future__ import annotations

import errno
import posix as os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.opening import open_regular
from atropos.sandbox.programs.runner.paths import is_folder, path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    import tarfile

    from atropos.sandbox.programs.runner.work import Outcome


def op_tar(call: int, path: str, max_bytes: int, offset: int | None) -> None:
    """Answer with an archive."""
    path = path_of(path)
    Work(call, lambda: pack(path, max_bytes, offset))


class Enough(Exception):
    """The part that was asked for is complete."""


class BoundedBuffer:
    """A file to write to, in memory, that refuses to grow beyond a bound; with `offset` it keeps one part."""

    def __init__(self, limit: int, offset: int | None) -> None:
        self.limit, self.size = limit, 0
        self.offset = offset
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        """As a file's."""
        self.claim(len(data))
        start, self.size = self.size, self.size + len(data)
        first = self.offset or 0
        if self.size > first + self.limit:
            self.parts.append(bytes(data)[max(0, first - start) : first + self.limit - start])
            raise Enough
        if self.size > first:
            self.parts.append(bytes(data)[max(0, first - start) :])
        return len(data)

    def claim(self, size: int) -> None:
        """Raises `OpFailed` where so many bytes more are too many."""
        if self.offset is None and self.size + size > self.limit:
            raise OpFailed("too_large", f"the archive is larger than {self.limit} bytes", "output")


def forget_names() -> None:
    """Have `tarfile` not ask the name service, which would load libraries of the slot."""
    import tarfile

    tarfile.pwd = tarfile.grp = None  # pyright: ignore[reportAttributeAccessIssue]


def pack(path: str, max_bytes: int, offset: int | None = None) -> Outcome:
    """An archive of a file, or of a folder's contents."""
    out = BoundedBuffer(max_bytes, offset)
    try:
        write_archive(out, path)
    except Enough:
        pass
    return "file_result", {"size": out.size, "mode": 0o644, "sha256": None}, {"data": b"".join(out.parts)}


def write_archive(out: BoundedBuffer, path: str) -> None:
    """Write the archive."""
    import posixpath
    import tarfile

    forget_names()
    os.lstat(path)
    with tarfile.open(  # pyright: ignore[reportCallIssue]
        fileobj=out,  # pyright: ignore[reportArgumentType] (a stream needs `write` alone)
        mode="w|",
        format=tarfile.PAX_FORMAT,
        bufsize=512 * 128,
    ) as archive:
        if is_folder(path):
            add_folders(archive, out, path)
        else:
            add_file(archive, out, None, path, posixpath.basename(posixpath.normpath(path)))


def add_folders(archive: tarfile.TarFile, out: BoundedBuffer, top: str) -> None:
    """A folder and all below it.

    Programs of the slot may move things meanwhile: below it no link is followed, nothing of /proc is read, and what
    vanishes is left out.
    """
    pending = [(top, ".")]
    while pending:
        path, name = pending.pop()
        follow = 0 if name == "." else os.O_NOFOLLOW
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            if is_special(os.fstat(folder).st_dev):
                continue
            archive.addfile(whole_seconds(archive.gettarinfo(f"/proc/self/fd/{folder}/.", name)))
            below: list[tuple[str, str]] = []
            for entry in sorted(os.listdir(folder)):
                try:
                    found = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                    if found.st_mode & 0o170000 == 0o040000:
                        below.append((f"{path}/{entry}", f"{name}/{entry}"))
                    else:
                        add_file(archive, out, folder, entry, f"{name}/{entry}")
                except FileNotFoundError:
                    pass
            pending += reversed(below)
        finally:
            os.close(folder)


def add_file(archive: tarfile.TarFile, out: BoundedBuffer, folder: int | None, entry: str, name: str) -> None:
    """A file or link; anything else is left out, and so is what has become something else by the time it is opened."""
    found = os.stat(entry, dir_fd=folder, follow_symlinks=False)
    if is_special(found.st_dev):
        return
    kind = found.st_mode & 0o170000
    if kind == 0o120000:
        info = archive.gettarinfo(entry if folder is None else f"/proc/self/fd/{folder}/{entry}", name)
        if info.issym():
            archive.addfile(whole_seconds(info))
    elif kind == 0o100000:
        try:
            fd, found = open_regular(entry, os.O_RDONLY | os.O_NOFOLLOW, folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return
            raise
        with open(fd, "rb") as file:
            if not is_special(found.st_dev):
                out.claim(found.st_size)
                archive.addfile(whole_seconds(archive.gettarinfo(arcname=name, fileobj=file)), file)


def whole_seconds(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """A fraction of a second would cost every member a header more."""
    info.mtime = int(info.mtime)
    return info
