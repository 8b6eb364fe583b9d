"""A snapshot's layers as one tar stream, and back: a program of its own, so that the server's loop never waits for it.

    python -I -S snapshot_tar.py pack [--zstd] LAYER...     layers, topmost first, to standard output
    python -I -S snapshot_tar.py unpack [--zstd] LAYER...   from standard input into empty folders

The *raw* folders travel, as overlay keeps them: ownership, modes, times, links, `user.*` attributes, whiteouts (character
device 0:0). Read through a mounted overlay, attributes that a slot planted would come back un-escaped. Attributes of other
kinds (security.capability) do not travel. Holes of sparse files don't either: those files have the form "GNU sparse 1.0".

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
from typing import IO, Any

_XATTR = "SCHILY.xattr."
_XATTR_HEX = "ATROPOS.xattr."
"""Followed by the attribute's name in hexadecimal, where it holds what a header's keyword can't: `=`, line breaks, other bytes."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
_OVERLAY_ONLY = frozenset({"user.overlay.redirect", "user.overlay.metacopy"})
"""Overlay follows these to files of lower layers; it writes none where slots use it, and escapes what a slot writes."""
INVALID = 2
"""Exit code: the archive is not a snapshot's."""
_COPY = 1 << 20
_MEMORY = 512 << 20
"""Address space of an unpacking program: a header may claim any size, and the tar module reads headers whole."""
_TRAILING = 64 << 20
"""Most that may follow an archive's end: writers fill up their last block, and compressed nothing is endless."""
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
Parts = tuple[str, ...]


class NotASnapshot(Exception):
    """The archive holds what a snapshot doesn't hold."""


class Folders:
    """Opens folders of layers by their parts, by way of real folders alone: however deep, and through no link."""

    def __init__(self, layers: list[str]) -> None:
        self._tops = [os.open(layer, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW) for layer in layers]
        self._last: tuple[int, Parts] | None = None
        self._fd = -1

    def __len__(self) -> int:
        return len(self._tops)

    def open(self, index: int, parts: Parts) -> int:
        """A descriptor that stays valid until the next call."""
        wanted = (index, parts)
        if self._last == wanted:
            return self._fd
        fd, steps = os.dup(self._tops[index]), parts
        if self._last is not None and self._last[0] == index:
            last = self._last[1]
            shared = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(last, parts, strict=False))
            )
            if len(last) - shared < shared:  # nearer from where we are; `..` is safe, since nothing here ever moves
                os.close(fd)
                fd, steps = os.dup(self._fd), (*[".."] * (len(last) - shared), *parts[shared:])
        try:
            for part in steps:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
        except OSError:
            os.close(fd)
            raise
        if self._last is not None:
            os.close(self._fd)
        self._last, self._fd = wanted, fd
        return fd


# ------------------------------------------------------------------------------------------------------------- packing


def pack(layers: list[str], out: IO[bytes]) -> None:
    """Write the layers as a tar stream; layer N's names begin with `N/`."""
    folders = Folders(layers)
    with tarfile.open(
        fileobj=out, mode="w|", bufsize=_COPY, format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for index in range(len(layers)):
            _pack_layer(tar, folders, index)


def _pack_layer(tar: tarfile.TarFile, folders: Folders, index: int) -> None:
    first: dict[int, str] = {}
    todo: list[Parts] = [()]
    while todo:
        parts = todo.pop()
        fd = folders.open(index, parts)
        info = _describe(index, parts, os.fstat(fd), fd)
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
        below: list[Parts] = []
        for name in sorted(os.listdir(fd)):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                below.append((*parts, name))
            else:
                _pack_file(tar, index, (*parts, name), found, fd, first)
        todo.extend(reversed(below))


def _pack_file(
    tar: tarfile.TarFile, index: int, parts: Parts, found: os.stat_result, folder: int, first: dict[int, str]
) -> None:
    name = parts[-1]
    if stat.S_ISREG(found.st_mode):
        fd = os.open(name, os.O_RDONLY | _NOFOLLOW, dir_fd=folder)
        with open(fd, "rb") as file:
            info = _describe(index, parts, found, fd)
            if found.st_nlink > 1 and found.st_ino in first:
                info.type, info.linkname = tarfile.LNKTYPE, first[found.st_ino]
                tar.addfile(info)
            else:
                first[found.st_ino] = info.name
                _add_content(tar, info, file, found)
        return
    info = _describe(index, parts, found, None)
    if stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
    elif stat.S_ISFIFO(found.st_mode):
        info.type = tarfile.FIFOTYPE
    elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
        info.type = tarfile.CHRTYPE
    else:
        return  # a socket: nobody can be listening on it any more
    tar.addfile(info)


def _add_content(tar: tarfile.TarFile, info: tarfile.TarInfo, file: IO[bytes], found: os.stat_result) -> None:
    if found.st_blocks * 512 >= found.st_size:
        info.size = found.st_size
        tar.addfile(info, file)
        return
    parts = list(_data_of(file.fileno(), found.st_size))
    numbers = [len(parts), *itertools.chain.from_iterable(parts)]
    table = "".join(f"{number}\n" for number in numbers).encode()
    table += bytes(-len(table) % tarfile.BLOCKSIZE)
    info.size = len(table) + sum(size for _, size in parts)
    info.pax_headers = {
        **info.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(found.st_size),
        "GNU.sparse.name": info.name,
    }
    tar.addfile(info, _Parts(table, file, parts))


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
    """A sparse file as it stands in an archive: the table of its parts, then each of them."""

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
            start, left = self._parts[0]
            piece = os.pread(self._file.fileno(), min(left, size - len(got)), start)
            if not piece:
                break
            got += piece
            self._parts[0] = (start + len(piece), left - len(piece))
            if len(piece) == left:
                del self._parts[0]
        return got


def _describe(index: int, parts: Parts, found: os.stat_result, fd: int | None) -> tarfile.TarInfo:
    info = tarfile.TarInfo("/".join((str(index), *parts)))
    info.uid, info.gid, info.mode = found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)
    seconds, part = divmod(found.st_mtime_ns, 10**9)
    info.pax_headers = {"mtime": f"{seconds}.{part:09d}"}
    for name in os.listxattr(fd) if fd is not None else ():  # links and pipes can't have user attributes
        if name.startswith("user."):
            value = os.getxattr(fd or 0, name)
            key = _XATTR + name if _PLAIN_NAME.match(name) else _XATTR_HEX + os.fsencode(name).hex()
            info.pax_headers[key] = value.decode("utf-8", "surrogateescape")
    return info


# ----------------------------------------------------------------------------------------------------------- unpacking


class Unpacker:
    """Makes what an archive holds, below folders that it never leaves.

    Args:
        layers: empty folders.
    """

    def __init__(self, layers: list[str]) -> None:
        self._folders = Folders(layers)
        self._later: list[tuple[int, Parts, tarfile.TarInfo]] = []
        self._seen: set[int] = set()

    def unpack(self, source: IO[bytes]) -> None:
        """Read the archive to its end, and what follows it.

        Raises:
            NotASnapshot: a name, kind or length that no snapshot has.
        """
        with tarfile.open(fileobj=source, mode="r|", bufsize=_COPY, encoding="utf-8", errors="surrogateescape") as tar:
            for info in tar:
                index, parts = self._place(info.name)
                if info.size < 0 or info.mode < 0 or info.uid < 0 or info.gid < 0:
                    raise NotASnapshot(f"a number below zero: {info.name[:200]!r}")
                self._make(tar, info, index, parts)
        # Folders last: making things in them changes their times, and a mode may forbid it.
        for index, parts, info in reversed(self._later):
            _finish(self._folders.open(index, parts), info)
        left = _TRAILING
        while data := source.read(_COPY):
            left -= len(data)
            if left < 0:
                raise NotASnapshot("bytes without end after the archive")

    def _place(self, name: str) -> tuple[int, tuple[str, ...]]:
        first, *parts = name.split("/")
        if not first.isdecimal() or int(first) >= len(self._folders) or any(p in {"", ".", ".."} for p in parts):
            raise NotASnapshot(f"a name that is not a layer's: {name[:200]!r}")
        return int(first), tuple(parts)

    def _make(self, tar: tarfile.TarFile, info: tarfile.TarInfo, index: int, parts: tuple[str, ...]) -> None:
        if info.isdir():
            if parts:
                os.mkdir(parts[-1], 0o700, dir_fd=self._folders.open(index, parts[:-1]))
            elif index in self._seen:
                raise NotASnapshot("a layer that comes twice")
            else:
                self._seen.add(index)
            self._later.append((index, parts, info))
            return
        if not parts:
            raise NotASnapshot("a layer that is not a folder")
        folder, name = self._folders.open(index, parts[:-1]), parts[-1]
        if info.isreg():
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600, dir_fd=folder)
            try:
                _fill(fd, tar, info)
                _finish(fd, info)
            finally:
                os.close(fd)
        elif info.islnk():
            there, target = self._place(info.linkname)
            if there != index or not target:
                raise NotASnapshot("a link that leaves its layer")
            # The folder of the target is opened second, so the first descriptor must outlive the cache.
            mine = os.dup(folder)
            try:
                source = self._folders.open(index, target[:-1])
                if not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                    raise NotASnapshot(f"a hard link to what is not a file: {info.name[:200]!r}")
                os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=mine, follow_symlinks=False)
            finally:
                os.close(mine)
        else:
            self._special(info, folder, name)

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
    opened: Any = tar.extractfile(info)
    source = opened.raw  # the buffer around it asks a stream whether it can seek, which streams can't answer
    sparse: list[tuple[int, int]] | None = getattr(info, "sparse", None)
    end = 0
    for start, size in [(0, info.size)] if sparse is None else sparse:
        if not size:
            continue  # GNU tar's older form fills its table with these
        if start < end or size < 0 or start + size > info.size:
            raise NotASnapshot(f"a sparse file whose parts don't fit: {info.name[:200]!r}")
        end = start + size
        source.seek(start)
        os.lseek(fd, start, os.SEEK_SET)
        left = size
        while left and (data := source.read(min(_COPY, left))):
            _write(fd, data)
            left -= len(data)
    os.ftruncate(fd, info.size)


def _finish(fd: int, info: tarfile.TarInfo) -> None:
    os.fchown(fd, info.uid, info.gid)
    os.fchmod(fd, info.mode & 0o7777)  # after the owner: a change of owner clears setuid
    for key, value in info.pax_headers.items():
        if (name := _attribute(key)) is not None:
            os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
    os.utime(fd, ns=_times(info))


def _attribute(key: str) -> bytes | None:
    """The extended attribute that a header's keyword stands for; None: it stands for none."""
    if key.startswith(_XATTR_HEX):
        name = bytes.fromhex(key[len(_XATTR_HEX) :])
    elif key.startswith(_XATTR):
        name = os.fsencode(key[len(_XATTR) :])
    else:
        return None
    if not name.startswith(b"user.") or os.fsdecode(name) in _OVERLAY_ONLY:
        raise NotASnapshot(f"an attribute that no snapshot has: {os.fsdecode(name)[:200]!r}")
    return name


def _times(info: tarfile.TarInfo) -> tuple[int, int]:
    whole, _, part = str(info.pax_headers.get("mtime", info.mtime)).partition(".")
    when = int(whole) * 10**9 + int((part + "0" * 9)[:9])
    return when, when


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


# ---------------------------------------------------------------------------------------------------------------- main


def main(arguments: list[str]) -> int:
    """Run one direction; returns the exit code."""
    mode, *layers = arguments
    with contextlib.suppress(OSError):
        os.nice(5)
    try:
        if mode == "unpack":
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
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
    """The same with a zstd process between us and the stream."""
    if mode == "pack":
        with subprocess.Popen(["zstd", "-q", "-1", "-c"], stdin=subprocess.PIPE) as zstd:
            assert zstd.stdin is not None
            pack(layers, zstd.stdin)
            zstd.stdin.close()
    else:
        with subprocess.Popen(["zstd", "-q", "-d", "-c"], stdin=sys.stdin.buffer, stdout=subprocess.PIPE) as zstd:
            assert zstd.stdout is not None
            Unpacker(layers).unpack(zstd.stdout)
    if zstd.returncode:
        print(f"{mode}: zstd ended with {zstd.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.umask(0)
    sys.exit(main(sys.argv[1:]))
