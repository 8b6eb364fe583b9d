"""A snapshot's layers as one tar stream, and back: a program of its own, so that the server's loop never waits for it.

    python -I -S snapshot_tar.py pack [--zstd] LAYER...     layers, topmost first, to standard output
    python -I -S snapshot_tar.py unpack [--zstd] LAYER...   from standard input into empty folders

The *raw* folders travel, as overlay keeps them: ownership, modes, times, links, `user.*` attributes, file capabilities,
whiteouts (character device 0:0). Read through a mounted overlay, attributes that a slot planted would come back
un-escaped. Attributes of other kinds do not travel. Holes of sparse files don't either: those files have the
form "GNU sparse 1.0". Names are relative to a folder of the archive once they would be long: whole paths of 20,000
nested folders take 400 MB.

What is unpacked was written by programs in a slot, and sent by a client: so a name never leaves its layer, no symbolic
link is followed, no other device is made, and nothing is taken that `pack` can't have written. Exit codes, each but the
first with one line on standard error: 0 done, 1 failed, 2 the archive is not a snapshot's.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import resource
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, cast

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from atropos.archives import IN_ZEROS, XATTR, WholeTar
from atropos.sandbox.programs.layer_folders import NOFOLLOW, LayerFolder, LayerFolders
from atropos.sandbox.programs.runner.opening import write_all

_XATTR_HEX = "ATROPOS.xattr."
"""Followed by the attribute's name in hexadecimal, where it holds what a header's keyword can't: `=`, line breaks,
other bytes."""
_UNDER = "ATROPOS.under"
"""The folder that a member's name starts from: which one of the archive's folders, counted from 0. Else: the
archive."""
_LINK_UNDER = "ATROPOS.link-under"
"""The same of a hard link's target."""
_SHORT_DEPTH = 32
"""Levels of folders that a name has at most."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
_CAPABILITY = "security.capability"
"""The kernel gives it as that of the slots' root, and takes it for theirs, wherever they are."""
_OVERLAY_ONLY = frozenset({"user.overlay.redirect", "user.overlay.metacopy"})
"""Overlay follows these to files of lower layers; it writes none where slots use it, and escapes what a slot writes."""
INVALID = 2
"""Exit code: the archive is not a snapshot's."""
_COPY = 1 << 20
_BUFFER = 1 << 16
"""The tar module copies this much a few times for each member."""
_MEMORY = 512 << 20
"""Address space of an unpacking program: a header may claim any size, and the tar module reads headers whole."""
_TRAILING = 64 << 20
"""Most that may follow an archive's end: writers fill up their last block, and compressed nothing is endless."""
_CPU_S = 600
"""CPU time of an unpacking program: an archive may jump between its deepest folders without end."""


class NotASnapshot(Exception):
    """The archive is not one that `pack` writes."""


# ------------------------------------------------------------------------------------------------------------- packing


def pack(layers: list[str], out: IO[bytes]) -> None:
    """Write the layers as a tar stream; layer N's names begin with `N/`."""
    with tarfile.open(
        fileobj=out, mode="w|", bufsize=_BUFFER, format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        packer = SnapshotPacker(tar, LayerFolders(layers))
        for layer in range(len(layers)):
            packer.pack(layer)


class SnapshotPacker:
    """Writes layers as members of an archive."""

    def __init__(self, tar: tarfile.TarFile, folders: LayerFolders) -> None:
        self._tar = tar
        self._folders = folders
        self._count = 0
        self._first: dict[int, tuple[LayerFolder, str]] = {}

    def pack(self, layer: int) -> None:
        """Write one layer, each folder before what is in it."""
        # Hard links never leave a layer: inode numbers of another one may be the same.
        self._first.clear()
        todo = [LayerFolder(layer)]
        while todo:
            folder = replace(todo.pop(), number=self._count)
            self._count += 1
            fd = self._folders.open(folder)
            info = self._describe(folder.above or folder, folder.name, os.fstat(fd), fd)
            info.type = tarfile.DIRTYPE
            self._add(info)
            below: list[LayerFolder] = []
            for name in sorted(os.listdir(fd)):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    below.append(folder.below(name, (status.st_dev, status.st_ino)))
                else:
                    self._pack_file(folder, name, status, fd)
            # A stack: reversed, so that folders come in the order of their names.
            todo.extend(reversed(below))

    def _add(self, info: tarfile.TarInfo, content: IO[bytes] | None = None) -> None:
        self._tar.addfile(info, content)
        _forget_members(self._tar)

    def _pack_file(self, folder: LayerFolder, name: str, status: os.stat_result, folder_fd: int) -> None:
        if stat.S_ISREG(status.st_mode):
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | NOFOLLOW, dir_fd=folder_fd)  # it may be a pipe by now
            with open(fd, "rb") as file:
                info = self._describe(folder, name, status, fd)
                # The first name carries the content, all others link to it, as tar has them.
                if status.st_nlink > 1 and status.st_ino in self._first:
                    info.type = tarfile.LNKTYPE
                    headers = dict(info.pax_headers)
                    info.linkname = _name(*self._first[status.st_ino], headers, _LINK_UNDER)
                    info.pax_headers = headers
                    self._add(info)
                else:
                    if status.st_nlink > 1:
                        self._first[status.st_ino] = (folder, name)
                    self._add(info, _content(info, file, status))
            return
        info = self._describe(folder, name, status, None)
        if stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder_fd)
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
        # overlayfs's whiteout: the name was removed from a lower layer.
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            info.type = tarfile.CHRTYPE
        else:
            return  # a socket: nobody can be listening on it any more
        self._add(info)

    def _describe(self, folder: LayerFolder, name: str, status: os.stat_result, fd: int | None) -> tarfile.TarInfo:
        seconds, part = divmod(status.st_mtime_ns, 10**9)
        headers: dict[str, str] = {"mtime": f"{seconds}.{part:09d}"}
        info = tarfile.TarInfo(_name(folder, name, headers, _UNDER))
        info.uid, info.gid, info.mode = status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)
        info.pax_headers = headers
        if fd is not None:  # links and pipes can't have these
            for each in os.listxattr(fd):
                # With userxattr overlay keeps its own marks here, too (opaque folders), so that they travel with the
                # rest.
                if each.startswith("user.") or each == _CAPABILITY:
                    key = XATTR + each if _PLAIN_NAME.match(each) else _XATTR_HEX + os.fsencode(each).hex()
                    headers[key] = os.getxattr(fd, each).decode("utf-8", "surrogateescape")
        return info


def _forget_members(tar: tarfile.TarFile) -> None:
    """Clear the tar module's list of members, which would grow with the archive."""
    members: list[tarfile.TarInfo] = getattr(tar, "members")  # noqa: B009 (typeshed doesn't know it)
    members.clear()


def _name(folder: LayerFolder, name: str, headers: dict[str, str], key: str) -> str:
    """A member's name; where it would have too many levels, `headers` gets the folder that it starts from as `key`."""
    start = folder
    while start.above is not None and start.depth % _SHORT_DEPTH:
        start = start.above
    # The name then starts from that folder, which has come before it.
    if start.depth:
        headers[key] = str(start.number)
        return "/".join((*folder.path_from(start.depth), name))
    return "/".join((str(folder.layer), *folder.path_from(0), *([name] if name else [])))


def _content(info: tarfile.TarInfo, file: IO[bytes], status: os.stat_result) -> IO[bytes]:
    """What follows a file's header, which gets the length of it."""
    # As many blocks as bytes: no hole, and no need to look for one.
    if status.st_blocks * 512 >= status.st_size:
        info.size = status.st_size
        return file
    parts = list(_data_of(file.fileno(), status.st_size))
    numbers = [len(parts), *itertools.chain.from_iterable(parts)]
    table = "".join(f"{number}\n" for number in numbers).encode()
    table += bytes(-len(table) % tarfile.BLOCKSIZE)
    info.size = len(table) + sum(size for _, size in parts)
    info.pax_headers = {
        **info.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(status.st_size),
        "GNU.sparse.name": info.name,
    }
    return cast("IO[bytes]", _Parts(table, file, parts))


def _data_of(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each part of a file that is no hole."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        at = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        yield start, at - start


class _Parts(io.RawIOBase):
    """A sparse file in an archive: the table of its parts, then the parts."""

    def __init__(self, table: bytes, file: IO[bytes], parts: list[tuple[int, int]]) -> None:
        self._table = table
        self._file = file
        self._parts = parts

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes of what is next."""
        if self._table:
            piece, self._table = self._table[:size], self._table[size:]
            return piece + self._data(size - len(piece))
        return self._data(size)

    def _data(self, size: int) -> bytes:
        got = b""
        while size > len(got) and self._parts:
            start, length = self._parts[0]
            piece = os.pread(self._file.fileno(), min(length, size - len(got)), start)
            if not piece:
                break
            got += piece
            self._parts[0] = (start + len(piece), length - len(piece))
            if len(piece) == length:
                del self._parts[0]
        return got


# ----------------------------------------------------------------------------------------------------------- unpacking


class _Member(WholeTar):
    ends = (IN_ZEROS,)
    damaged = NotASnapshot


class Unpacker:
    """Unpacks an archive into empty folders, and never writes outside them."""

    def __init__(self, layers: list[str]) -> None:
        self._folders = LayerFolders(layers)
        self._targets = LayerFolders(layers)
        self._tops = [LayerFolder(layer) for layer in range(len(layers))]
        self._below: dict[tuple[LayerFolder, str], LayerFolder] = {}
        self._layer_folders: list[LayerFolder] = []
        self._headers: list[tarfile.TarInfo] = []

    def unpack(self, source: IO[bytes]) -> None:
        """Read the archive to its end, and what follows it.

        Raises:
            NotASnapshot: a name, kind or length that no snapshot has.
        """
        with tarfile.open(
            fileobj=source,
            mode="r|",
            bufsize=_BUFFER,
            encoding="utf-8",
            errors="surrogateescape",
            tarinfo=_Member,
        ) as tar:
            while (info := tar.next()) is not None:
                _forget_members(tar)
                folder, name = self._place(info.name, info.pax_headers.get(_UNDER))
                # GNU's base 256 can say a negative number, which the calls below would take as "unchanged".
                if info.size < 0 or info.mode < 0 or info.uid < 0 or info.gid < 0:
                    raise NotASnapshot(f"a number below zero: {info.name[:200]!r}")
                self._make(tar, info, folder, name)
        # Folders last: making things in them changes their times, and a mode may forbid it.
        for folder, info in zip(reversed(self._layer_folders), reversed(self._headers), strict=True):
            _finish(self._folders.open(folder), info)
        allowed = _TRAILING
        while data := source.read(_COPY):
            allowed -= len(data)
            if allowed < 0:
                raise NotASnapshot("bytes without end after the archive")

    def _place(self, path: str, under: str | None) -> tuple[LayerFolder, str]:
        """A member's folder, and its name there: empty for the layer's own folder."""
        parts = path.split("/")
        number = parts.pop(0) if under is None else under
        starts = self._tops if under is None else self._layer_folders
        known = number.isdecimal() and int(number) < len(starts)
        # isdecimal: int() would also take a sign, spaces and underscores.
        if not known or any(part in {"", ".", ".."} for part in parts):
            raise NotASnapshot(f"a name that is not a layer's: {path[:200]!r}")
        folder = starts[int(number)]
        for part in parts[:-1]:
            # Only folders that this archive has made are entered, so that no link is ever on the way.
            below = self._below.get((folder, part))
            if below is None:
                raise NotASnapshot(f"a name that leads through no folder of the archive: {path[:200]!r}")
            folder = below
        return folder, parts[-1] if parts else ""

    def _make(self, tar: tarfile.TarFile, info: tarfile.TarInfo, folder: LayerFolder, name: str) -> None:
        if info.isdir():
            self._make_folder(info, folder, name)
            return
        if not name:
            raise NotASnapshot("a layer that is not a folder")
        folder_fd = self._folders.open(folder)
        if info.isreg():
            # O_EXCL: a name that comes twice fails, instead of writing into a hard link of another file.
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o600, dir_fd=folder_fd)
            try:
                _fill(fd, tar, info)
                _finish(fd, info)
            finally:
                os.close(fd)
        elif info.islnk():
            there, target = self._place(info.linkname, info.pax_headers.get(_LINK_UNDER))
            if there.layer != folder.layer or not target:
                raise NotASnapshot("a link that leaves its layer")
            # A second cursor: the first one's descriptor, of the folder of the new name, has to stay valid.
            target_fd = self._targets.open(there)
            if not stat.S_ISREG(os.stat(target, dir_fd=target_fd, follow_symlinks=False).st_mode):
                raise NotASnapshot(f"a hard link to what is not a file: {info.name[:200]!r}")
            os.link(target, name, src_dir_fd=target_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        else:
            self._special(info, folder_fd, name)

    def _make_folder(self, info: tarfile.TarInfo, folder: LayerFolder, name: str) -> None:
        if name:
            os.mkdir(name, 0o700, dir_fd=self._folders.open(folder))
            self._below[folder, name] = folder = folder.below(name)
        elif folder in self._layer_folders:
            raise NotASnapshot("a layer that comes twice")
        self._layer_folders.append(folder)
        self._headers.append(info)

    def _special(self, info: tarfile.TarInfo, folder: int, name: str) -> None:
        if info.issym():
            os.symlink(info.linkname, name, dir_fd=folder)
        elif info.isfifo():
            os.mkfifo(name, 0o600, dir_fd=folder)
        elif info.ischr() and info.devmajor == info.devminor == 0:
            os.mknod(name, 0o600 | stat.S_IFCHR, 0, dir_fd=folder)
        else:
            raise NotASnapshot(f"neither file, folder, link nor whiteout: {info.name[:200]!r}")
        os.chown(name, info.uid, info.gid, dir_fd=folder, follow_symlinks=False)
        if not info.issym():
            os.chmod(name, info.mode & 0o7777, dir_fd=folder)
        with contextlib.suppress(OSError):
            os.utime(name, ns=_times(info), dir_fd=folder, follow_symlinks=False)


def _fill(fd: int, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
    """Write a file's content; of a sparse one the parts that are no holes."""
    opened = cast("io.BufferedReader", tar.extractfile(info))
    source = opened.raw  # the buffer around it asks a stream whether it can seek, which streams can't answer
    sparse: list[tuple[int, int]] | None = getattr(info, "sparse", None)
    end = 0
    for start, size in [(0, info.size)] if sparse is None else sparse:
        if not size:
            continue  # GNU tar's older form fills its table with these
        # Ascending and without overlap: else an archive of a few bytes could have the same part written for ever.
        if start < end or size < 0 or start + size > info.size:
            raise NotASnapshot(f"a sparse file whose parts don't fit: {info.name[:200]!r}")
        end = start + size
        source.seek(start, os.SEEK_SET)
        os.lseek(fd, start, os.SEEK_SET)
        remaining = size
        while remaining and (data := source.read(min(_COPY, remaining))):
            write_all(fd, data)
            remaining -= len(data)
    os.ftruncate(fd, info.size)


def _finish(fd: int, info: tarfile.TarInfo) -> None:
    os.fchown(fd, info.uid, info.gid)
    os.fchmod(fd, info.mode & 0o7777)  # after the owner: a change of owner clears setuid
    for key, value in info.pax_headers.items():
        if (name := _attribute(key)) is not None:
            try:
                os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise NotASnapshot(f"an attribute that is none: {os.fsdecode(name)[:200]!r}") from None
                raise
    os.utime(fd, ns=_times(info))


def _attribute(key: str) -> bytes | None:
    """The extended attribute of a header's keyword; None: it isn't one."""
    if key.startswith(_XATTR_HEX):
        name = bytes.fromhex(key[len(_XATTR_HEX) :])
    elif key.startswith(XATTR):
        name = os.fsencode(key[len(XATTR) :])
    else:
        return None
    known = name.startswith(b"user.") or os.fsdecode(name) == _CAPABILITY
    if not known or os.fsdecode(name) in _OVERLAY_ONLY:
        raise NotASnapshot(f"an attribute that no snapshot has: {os.fsdecode(name)[:200]!r}")
    return name


def _times(info: tarfile.TarInfo) -> tuple[int, int]:
    whole, _, part = str(info.pax_headers.get("mtime", info.mtime)).partition(".")
    when = int(whole) * 10**9 + int((part + "0" * 9)[:9])
    return when, when


# ---------------------------------------------------------------------------------------------------------------- main


def main(arguments: list[str]) -> int:
    """Run one direction; returns the exit code."""
    mode, *layers = arguments
    with contextlib.suppress(OSError):
        os.nice(10)
    try:
        if mode == "unpack":
            # Reached, the allocation fails here and is answered; the kernel's killer would choose its own victim.
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        if "--zstd" in layers:
            layers.remove("--zstd")
            return _through_zstd(mode, layers)
        if mode == "pack":
            pack(layers, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            Unpacker(layers).unpack(sys.stdin.buffer)
    except MemoryError:
        print(f"{mode}: a header that takes more than {_MEMORY >> 20} MiB of memory", file=sys.stderr)
        return INVALID
    except OSError as error:
        print(f"{mode}: {error}", file=sys.stderr)
        return 1
    except (tarfile.TarError, NotASnapshot, ValueError, ArithmeticError, RecursionError) as error:
        print(f"{mode}: {error}", file=sys.stderr)
        return INVALID
    return 0


def _through_zstd(mode: str, layers: list[str]) -> int:
    """Run one direction through a zstd process."""
    if mode == "pack":
        with subprocess.Popen(["zstd", "-q", "-1", "-c"], stdin=subprocess.PIPE) as zstd:
            pack(layers, cast("IO[bytes]", zstd.stdin))
    else:
        with subprocess.Popen(["zstd", "-q", "-d", "-c"], stdin=sys.stdin.buffer, stdout=subprocess.PIPE) as zstd:
            Unpacker(layers).unpack(cast("IO[bytes]", zstd.stdout))
    if zstd.returncode:
        print(f"{mode}: zstd ended with {zstd.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.umask(0)
    sys.exit(main(sys.argv[1:]))
