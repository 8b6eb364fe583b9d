"""Unpacking tar archives below a folder and nowhere else, in a child."""

from __future__ import annotations

import posix as os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.archives import forget_names
from atropos.sandbox.programs.runner.failures import OpFailed, text
from atropos.sandbox.programs.runner.files import write_all
from atropos.sandbox.programs.runner.paths import make_folders, path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    import tarfile

    from atropos.sandbox.programs.runner.work import Outcome

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def op_untar(call: int, path: str, data: bytes, owners: bool) -> None:
    """Unpack an archive and answer with the number of its members."""
    path = path_of(path)
    Work(call, lambda: unpack(path, data, owners))


def unpack(path: str, data: bytes, owners: bool) -> Outcome:
    """Unpack an archive below a folder, which is made where it is missing; `owners`: members get theirs."""
    import io
    import tarfile

    forget_names()
    make_folders(path)
    count = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            places = Places(path)
            for info in archive:
                if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                    raise OpFailed("not_regular", f"the archive holds a device or a pipe: {text(info.name)}")
                if not owners:
                    info.uid = info.gid = -1
                extract(archive, info, places)
                count += 1
    except tarfile.TarError as error:
        raise OpFailed("bad_path", f"not an uncompressed tar archive: {error}") from None
    return "done", {"count": count}, {}


class Places:
    """Folders at and below one.

    A link in the way is followed only as long as it leads to a place below, by the kernel's own word of where a
    descriptor is: neither an archive nor a program that moves things meanwhile gets further.
    """

    def __init__(self, path: str) -> None:
        self.last: list[str] | None = None
        self.fd = -1
        self.top = os.open(path, FOLDER)
        self.where = os.readlink(f"/proc/self/fd/{self.top}").rstrip("/")
        self.check(self.top)

    def check(self, fd: int) -> None:
        """Raises `OpFailed` where a descriptor is not below."""
        where = os.readlink(f"/proc/self/fd/{fd}").rstrip("/")
        if is_special(os.fstat(fd).st_dev) or not (where == self.where or where.startswith(f"{self.where}/")):
            raise OpFailed("bad_path", f"the archive leads to a path outside its folder: {text(where or '/')}")

    def open_below(self, folder: int, name: str, extra: int = 0) -> int:
        """A descriptor of a folder in another."""
        fd = os.open(name, FOLDER | extra, dir_fd=folder)
        try:
            self.check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def of(self, name: str) -> tuple[int, str]:
        """(descriptor of the folder that `name` is in, valid until the next call; last part). Folders are made as needed."""
        import posixpath

        parts = posixpath.normpath(name).split("/")
        if parts[0] in ("", ".."):
            raise OpFailed("bad_path", f"the archive names a path outside its folder: {text(name)}")
        if parts[:-1] == self.last:
            return self.fd, parts[-1]
        fd = os.dup(self.top)
        for part in parts[:-1]:
            try:
                below = self.open_below(fd, part)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=fd)
                below = self.open_below(fd, part, os.O_NOFOLLOW)
            os.close(fd)
            fd = below
        if self.fd >= 0:
            os.close(self.fd)
        self.last, self.fd = parts[:-1], fd
        return fd, parts[-1]


def extract(archive: tarfile.TarFile, info: tarfile.TarInfo, places: Places) -> None:
    """One member of an archive. What is in its place and no folder is replaced, never written to."""
    folder, name = places.of(info.name)
    if info.isdir():
        try:
            os.mkdir(name, 0o755, dir_fd=folder)
        except FileExistsError:
            pass
        finish_member(places.open_below(folder, name), info)
        return
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    if info.issym():
        os.symlink(info.linkname, name, dir_fd=folder)
        os.chown(name, info.uid, info.gid, dir_fd=folder, follow_symlinks=False)
    elif info.islnk():
        folder = os.dup(folder)
        source, target = places.of(info.linkname)
        os.link(target, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        os.close(folder)
    else:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        source = archive.extractfile(info)
        while source is not None and (data := source.read(1 << 20)):
            write_all(fd, data, None)
        finish_member(fd, info)


def finish_member(fd: int, info: tarfile.TarInfo) -> None:
    """Set a member's owner, mode and time."""
    os.fchown(fd, info.uid, info.gid)
    os.fchmod(fd, info.mode & 0o7777)
    os.utime(fd, (info.mtime, info.mtime))
    os.close(fd)
