"""Unpacks the layers of an image into one folder. A program of its own, without site-packages.

    unpack.py FOLDER MAX_BYTES MAX_MEMBERS IDS WORKDIR LAYER DIFF_ID [LAYER DIFF_ID …]

Layers come from strangers. A member is opened below its parent's descriptor and no link is ever followed, so nothing
reaches outside FOLDER; names that try are refused. Whiteouts are applied as deletions (OCI image layout, "Layer
Filesystem Changeset"). Device nodes are left out. Owners are those of the running user namespace, of which slots have the
ids 0 to IDS-1; with IDS 1 everything belongs to root. The last line on stdout is JSON: bytes and members. For exit codes see
`untrusted.program`.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import os
import stat
import sys
import tarfile
import zlib
from typing import IO, cast

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from atropos.archives import WholeTar
from atropos.images.untrusted import ImageRefused, program, uncompressed

CHUNK = 1 << 20
BLOCK = 4096
NS = 1_000_000_000
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
XATTR = "SCHILY.xattr."
CAPABILITY = "security.capability"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Digesting:
    """Reads a tar, at most `limit` bytes of it, and keeps the SHA-256 of what was read.

    What writers of layers leave out at its end is filled up with zeros: the last block, and all of a layer with no members.
    """

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self.size = 0
        self._filled = False
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """As a file's."""
        data = self._stream.read(size)
        self.size += len(data)
        if self.size > self._limit:
            raise ImageRefused("a layer that is larger than its bound")
        self._digest.update(data)
        if not data and not self._filled:
            self._filled = True
            return bytes(-self.size % tarfile.BLOCKSIZE or (0 if self.size else tarfile.BLOCKSIZE))
        return data

    def finish(self) -> str:
        """Read to the end; the digest of everything."""
        while self.read(CHUNK):
            pass
        return self._digest.hexdigest()


class ImageTree:
    """The folder that layers are unpacked into, one after the other."""

    def __init__(self, folder: str, max_bytes: int, max_members: int, ids: int) -> None:
        self._root = os.open(folder, _FOLDER)
        self._max_bytes, self._max_members, self._ids = max_bytes, max_members, ids
        self._room = f"the {max_bytes >> 20} MiB that the image store has room for (image_store.quota_mib)"
        self._parent: tuple[str, int] = ("", os.dup(self._root))
        self._added: set[str] = set()
        """What the layer being unpacked holds, the folders above each included."""
        self._times: list[tuple[str, int]] = []
        self.bytes = 0
        self.members = 0
        self.end = 0
        """Where the content of the layer's last file ends in its tar."""

    def apply(self, stream: IO[bytes]) -> None:
        """Unpack one layer, an uncompressed tar."""
        self._added.clear()
        self._times.clear()
        self.end = 0
        with tarfile.open(
            fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape", tarinfo=WholeTar
        ) as tar:
            while (member := tar.next()) is not None:
                self._member(tar, member)
                vars(tar)["members"].clear()  # a million of them are gigabytes
        for path, at in self._times:
            self._set_time(path, at)

    def make_folder(self, path: str) -> None:
        """Make a folder that no layer may have, as Docker makes a container's WORKDIR; not through a link.

        Raises:
            ImageRefused: there is a file in its place, where no command could start.
        """
        parts = _checked(path).split("/")
        try:
            self._open("/".join(parts), create=True)
        except ImageRefused:
            for count in range(1, len(parts) + 1):
                where, name = "/".join(parts[: count - 1]), parts[count - 1]
                mode = os.stat(name, dir_fd=self._open(where, create=True), follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    return
                if not stat.S_ISDIR(mode):
                    raise ImageRefused(f"its WORKDIR {path} leads through a file, {'/'.join(parts[:count])}") from None

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.members += 1
        if self.members > self._max_members:
            raise ImageRefused(f"more than {self._max_members} files and folders")
        path = _checked(member.name)
        if not path:
            self._adopt(self._root, member)
            return
        where, _, name = path.rpartition("/")
        if name.startswith(WHITEOUT):
            self._whiteout(where, name)
            return
        if member.ischr() or member.isblk():
            return
        parent = self._open(where, create=True)
        self._remove(parent, path, name, unless_folder=member.isdir())
        fd = self._made(tar, parent, path, name, member)
        while path and path not in self._added:
            self._added.add(path)
            path = path.rpartition("/")[0]
        if fd is not None:
            self._adopt(fd, member)
            os.close(fd)

    def _made(self, tar: tarfile.TarFile, parent: int, path: str, name: str, member: tarfile.TarInfo) -> int | None:
        """Make what a member is; the descriptor of what has an owner and attributes of its own, and can be opened."""
        if member.isdir():
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
            self._times.append((path, _mtime_ns(member)))
            self._count(BLOCK)
            return os.open(name, _FOLDER, dir_fd=parent)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            self._own_link(parent, name, member)
            return None
        if member.islnk():
            self._link(parent, name, member)
            return None
        if member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        if member.isreg():
            return self._file(tar, parent, name, member)
        raise ImageRefused(f"{path}: an entry of unknown type {member.type!r}")

    def _file(self, tar: tarfile.TarFile, parent: int, name: str, member: tarfile.TarInfo) -> int:
        if member.size > self._max_bytes:
            raise ImageRefused(f"{member.name}: a file of {member.size} bytes, more than {self._room}")
        source = tar.extractfile(member)
        assert source is not None
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        size = 0
        while chunk := source.read(CHUNK):
            if chunk.count(0) == len(chunk):
                os.lseek(fd, len(chunk), os.SEEK_CUR)  # a hole stays one
            else:
                self._count(len(chunk))
                _write(fd, chunk)
            size += len(chunk)
        os.ftruncate(fd, size)
        self._count(BLOCK)
        if not member.issparse():
            self.end = member.offset_data + size
        return fd

    def _link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        target = _checked(member.linkname)
        where, _, last = target.rpartition("/")
        source = self._open(where)
        try:
            os.link(last, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise ImageRefused(f"{member.name}: a hard link to {member.linkname}: {error.strerror}") from None
        finally:
            os.close(source)

    def _whiteout(self, where: str, name: str) -> None:
        """Remove what lower layers had; what this layer itself added stays."""
        try:
            parent = self._open(where)
        except ImageRefused:
            return
        try:
            hidden = name.removeprefix(WHITEOUT)
            if name == OPAQUE:
                for each in os.listdir(parent):
                    self._hide(parent, f"{where}/{each}" if where else each, each)
            elif hidden not in {"", ".", ".."}:
                self._hide(parent, f"{where}/{hidden}" if where else hidden, hidden)
        finally:
            os.close(parent)

    def _hide(self, parent: int, path: str, name: str) -> None:
        """Remove what lower layers have at `path`, and below it if this layer added something there."""
        if path not in self._added:
            self._remove(parent, path, name)
        elif stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            fd = os.open(name, _FOLDER, dir_fd=parent)
            try:
                for each in os.listdir(fd):
                    self._hide(fd, f"{path}/{each}", each)
            finally:
                os.close(fd)

    def _remove(self, parent: int, path: str, name: str, *, unless_folder: bool = False) -> None:
        try:
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if unless_folder and stat.S_ISDIR(mode):
            return
        self._forget_parent(path)
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=parent)
            return
        for _, folders, files, fd in os.fwalk(name, topdown=False, dir_fd=parent):
            for each in files:
                os.unlink(each, dir_fd=fd)
            for each in folders:
                try:
                    os.rmdir(each, dir_fd=fd)
                except NotADirectoryError:
                    os.unlink(each, dir_fd=fd)  # a link to a folder
        os.rmdir(name, dir_fd=parent)

    # ---------------------------------------------------------------------------------------------------- descriptors

    def _open(self, path: str, *, create: bool = False) -> int:
        """A folder's descriptor, opened from the root down without following a link.

        With `create`, missing folders are made, and the descriptor belongs to this object; else it is the caller's.
        """
        if create and self._parent[0] == path:
            return self._parent[1]
        fd = os.dup(self._root)
        for part in filter(None, path.split("/")):
            try:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                        os.chown(part, 0, 0, dir_fd=fd, follow_symlinks=False)
                below = os.open(part, _FOLDER, dir_fd=fd)
            except OSError as error:
                os.close(fd)
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    raise ImageRefused(f"{path}: leads through a link or a file") from None
                if error.errno == errno.ENOENT:
                    raise ImageRefused(f"{path}: no such folder in the image") from None
                raise
            os.close(fd)
            fd = below
        if create:
            os.close(self._parent[1])
            self._parent = (path, fd)
        return fd

    def _forget_parent(self, path: str) -> None:
        if f"{self._parent[0]}/".startswith(f"{path}/"):
            os.close(self._parent[1])
            self._parent = ("", os.dup(self._root))

    def _adopt(self, fd: int, member: tarfile.TarInfo) -> None:
        """Owner, mode, times and the attributes that mean something in a slot."""
        os.fchown(fd, *self._owner(member))
        os.fchmod(fd, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            name = key.removeprefix(XATTR)
            kept = name == CAPABILITY or (name.startswith("user.") and not name.startswith("user.overlay."))
            if key.startswith(XATTR) and kept:
                with contextlib.suppress(OSError):  # a file system without such attributes
                    os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
        if not member.isdir():
            os.utime(fd, ns=(_mtime_ns(member), _mtime_ns(member)))

    def _own_link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        user, group = self._owner(member)
        os.chown(name, user, group, dir_fd=parent, follow_symlinks=False)
        at = _mtime_ns(member)
        os.utime(name, ns=(at, at), dir_fd=parent, follow_symlinks=False)
        self._count(BLOCK)

    def _owner(self, member: tarfile.TarInfo) -> tuple[int, int]:
        if self._ids == 1:
            return 0, 0
        if not (0 <= member.uid < self._ids and 0 <= member.gid < self._ids):
            raise ImageRefused(
                f"{member.name}: owner {member.uid}:{member.gid} is not among the {self._ids} ids of a slot"
            )
        return member.uid, member.gid

    def _set_time(self, path: str, at: int) -> None:
        with contextlib.suppress(ImageRefused):
            fd = self._open(path)
            os.utime(fd, ns=(at, at))
            os.close(fd)

    def _count(self, size: int) -> None:
        self.bytes += -(-size // BLOCK) * BLOCK
        if self.bytes > self._max_bytes:
            raise ImageRefused(f"it unpacks to more than {self._room}")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _checked(name: str) -> str:
    """A member's path, plain, from the image's root; ko and kaniko write names that begin there.

    Raises:
        ImageRefused: it climbs, or is no name.
    """
    if "\0" in name or ".." in name.split("/"):
        raise ImageRefused(f"{name!r:.200}: a path that leaves the image")
    return "/".join(part for part in name.split("/") if part not in {"", "."})


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """When a member was changed: an extended header says it to the nanosecond, of which a float loses some."""
    seconds, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if not (seconds + fraction).isdecimal():
        return int(min(max(member.mtime, 0), 1 << 33)) * NS
    return min(int(seconds or "0"), 1 << 33) * NS + int(fraction[:9].ljust(9, "0"))


def unpack(
    folder: str, max_bytes: int, max_members: int, ids: int, workdir: str, layers: list[tuple[str, str]]
) -> ImageTree:
    """Unpack `layers` (file and SHA-256 of the uncompressed tar, lowest first) into an empty folder, and make the WORKDIR.

    Raises:
        ImageRefused: what an image must not hold, or not what its configuration says.
    """
    tree = ImageTree(folder, max_bytes, max_members, ids)
    for path, wanted in layers:
        with uncompressed(path) as raw:
            stream = Digesting(raw, 2 * max_bytes + max_members * 1024)
            try:
                tree.apply(cast("IO[bytes]", stream))
                found = stream.finish()
                if stream.size < tree.end:
                    raise EOFError("unexpected end of data")
            except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
                raise ImageRefused(f"layer {wanted[:12]} is no tar: {error}") from None
        if wanted != found:
            raise ImageRefused(f"layer {wanted[:12]} is not the one that the image names ({found[:12]})")
    tree.make_folder(workdir)
    return tree


def main() -> int:
    """The program."""
    folder, max_bytes, max_members, ids, workdir, *rest = sys.argv[1:]
    layers = list(zip(rest[::2], rest[1::2], strict=True))

    def work() -> dict[str, int]:
        tree = unpack(folder, int(max_bytes), int(max_members), int(ids), workdir, layers)
        return {"bytes": tree.bytes, "members": tree.members}

    return program(work)


if __name__ == "__main__":
    sys.exit(main())
