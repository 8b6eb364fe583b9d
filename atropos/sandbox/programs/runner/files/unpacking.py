"""Unpacking tar archives below a folder and nowhere else, in a child."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed, text
from atropos.sandbox.programs.runner.files.tar_headers import XATTR
from atropos.sandbox.programs.runner.opening import write_all
from atropos.sandbox.programs.runner.paths import make_folders, path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol, TypeVar

    from atropos.sandbox.programs.runner.work import Outcome

    Made = TypeVar("Made")

    class Readable(Protocol):
        """Where an archive comes from."""

        def read(self, size: int, /) -> bytes:
            """`size` bytes; fewer at the end alone."""
            ...


FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_EXTENDED = 1 << 20
"""Longest extended header, in bytes: a hundred times the kernel's longest path."""


def op_untar(call: int, path: str, data: bytes, owners: bool) -> None:
    """Unpack an archive and answer with the number of its members."""
    path = path_of(path)
    Work(call, lambda: unpack_from(path, io.BytesIO(data), owners=owners))


def unpack_from(path: str, source: Readable, *, owners: bool = False) -> Outcome:
    """Unpack an archive below a folder, which is made where it is missing.

    `owners`: members get theirs, and their extended attributes.
    """
    make_folders(path)
    places = Places(path)
    count = 0
    for member in members(source):
        if not owners:
            member.uid = member.gid = -1
            member.attributes = {}
        extract(source, member, places)
        count += 1
    return "done", {"count": count}, {}


class TarMember:
    """The header of one member: its name without a final slash, its type as in tar, and the rest of its kind."""

    __slots__ = ("attributes", "gid", "kind", "link", "mode", "mtime", "name", "size", "uid")

    def __init__(self, block: bytes, extended: dict[str, str]) -> None:
        # The checksum counts its own field as eight spaces (32 each).
        if block[148:156].strip(b"\0 ") == b"" or number(block[148:156]) != sum(block, 256) - sum(block[148:156]):
            raise OpFailed("bad_path", "not an uncompressed tar archive: a header's checksum is wrong")
        self.kind = block[156:157]
        name = string(block[:100])
        if block[257:263] == b"ustar\0" and block[345]:
            name = f"{string(block[345:500])}/{name}"
        name = extended.get("path", name)
        # Archives from before POSIX mark a folder by the slash alone.
        if self.kind in b"\0" and name.endswith("/"):
            self.kind = b"5"
        self.name = name.rstrip("/")
        self.link = extended.get("linkpath", string(block[157:257]))
        attributes = ((key.removeprefix(XATTR), key) for key in extended if key.startswith(XATTR))
        self.attributes = {name: extended[key].encode("utf-8", "surrogateescape") for name, key in attributes}
        self.mode = number(block[100:108]) & 0o7777
        try:
            whole_s = extended.get("mtime", "").partition(".")[0]
            self.mtime = int(whole_s) if whole_s else number(block[136:148])
            self.size = int(extended["size"]) if "size" in extended else number(block[124:136])
            self.uid = int(extended["uid"]) if "uid" in extended else number(block[108:116])
            self.gid = int(extended["gid"]) if "gid" in extended else number(block[116:124])
        except ValueError:
            self.size = -1
        if self.size < 0 or any(key.startswith("GNU.sparse.") for key in extended):
            raise OpFailed("bad_path", f"the archive holds a file of a form that is not supported: {text(self.name)}")


def members(source: Readable) -> Iterator[TarMember]:
    """The members of an archive (ustar, pax, GNU's long names); each one's content must be read before the next."""
    extended: dict[str, str] = {}
    first = True
    while True:
        block = source.read(512)
        # A block of zeros ends an archive; some writers leave it out.
        if block == bytes(512) or not (block or first):
            return
        if len(block) < 512:
            raise OpFailed("bad_path", "not an uncompressed tar archive: it is cut off")
        first = False
        member = TarMember(block, extended)
        if member.kind in b"xgLK":
            if member.size > MAX_EXTENDED:
                raise OpFailed("bad_path", "a name in the archive is too long")
            data = exactly(source, member.size + -member.size % 512)[: member.size]
            if member.kind == b"x":
                extended |= pax_records(data)
            # Global pax headers (git's commit id, for example) name no member's field that matters here.
            elif member.kind != b"g":
                extended["path" if member.kind == b"L" else "linkpath"] = string(data)
            continue
        if member.kind not in b"\x0001256":
            raise OpFailed("not_regular", f"the archive holds a device: {text(member.name)}")
        yield member
        extended = {}


def pax_records(data: bytes) -> dict[str, str]:
    """`length key=value` lines, in which the length counts all of its line."""
    records: dict[str, str] = {}
    while data:
        length, _, rest = data.partition(b" ")
        size = int(length) if length.isdigit() else 0
        key, equals, value = rest[: size - len(length) - 2].partition(b"=")
        if not equals or size > len(data):
            raise OpFailed("bad_path", "not an uncompressed tar archive: an extended header is broken")
        records[string(key)] = value.decode("utf-8", "surrogateescape")
        data = data[size:]
    return records


def string(field: bytes) -> str:
    """A text field, which ends at its first NUL."""
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def number(field: bytes) -> int:
    """A number field: octal digits, or (GNU) base 256 behind a first byte of 128."""
    if field[0] == 128:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise OpFailed("bad_path", "not an uncompressed tar archive: a number is none") from None


def exactly(source: Readable, size: int) -> bytes:
    """The next `size` bytes of an archive."""
    data = source.read(size)
    if len(data) < size:
        raise OpFailed("bad_path", "not an uncompressed tar archive: it is cut off")
    return data


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
        """(descriptor of the folder that `name` is in, valid until the next call; last part).

        Folders are made as needed.
        """
        parts = os.path.normpath(name).split("/")
        # normpath has brought every `..` that leads out to the front.
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
                # It was made just now: a link there would be another program's doing.
                below = self.open_below(fd, part, os.O_NOFOLLOW)
            os.close(fd)
            fd = below
        if self.fd >= 0:
            os.close(self.fd)
        self.last, self.fd = parts[:-1], fd
        return fd, parts[-1]


def extract(source: Readable, member: TarMember, places: Places) -> None:
    """One member of an archive. What is in its place and no folder is replaced, never written to."""
    folder, name = places.of(member.name)
    if member.kind == b"5":
        try:
            os.mkdir(name, 0o755, dir_fd=folder)
        except FileExistsError:
            pass
        # Its mode is set at once: `pack` writes folders before their contents, and root may write to any.
        finish_member(places.open_below(folder, name), member)
    elif member.kind == b"2":
        replacing(folder, name, lambda: os.symlink(member.link, name, dir_fd=folder))
        os.chown(name, member.uid, member.gid, dir_fd=folder, follow_symlinks=False)
    elif member.kind == b"6":
        replacing(folder, name, lambda: os.mkfifo(name, 0o600, dir_fd=folder))
        os.chown(name, member.uid, member.gid, dir_fd=folder, follow_symlinks=False)
        os.chmod(name, member.mode, dir_fd=folder)
    elif member.kind == b"1":
        # `places` closes its descriptor at the next name.
        folder = os.dup(folder)
        at, target = places.of(member.link)
        replacing(folder, name, lambda: os.link(target, name, src_dir_fd=at, dst_dir_fd=folder, follow_symlinks=False))
        os.close(folder)
    else:
        fd = replacing(folder, name, lambda: os.open(name, NEW_FILE, 0o600, dir_fd=folder))
        remaining = member.size
        while remaining:
            data = exactly(source, min(remaining, 1 << 20))
            remaining -= len(data)
            write_all(fd, data)
        exactly(source, -member.size % 512)
        finish_member(fd, member)


def replacing(folder: int, name: str, make: Callable[[], Made]) -> Made:
    """Replace what has the name by what `make` makes."""
    try:
        return make()
    except FileExistsError:
        os.unlink(name, dir_fd=folder)
        return make()


def finish_member(fd: int, member: TarMember) -> None:
    """Set a member's owner, mode, attributes and time."""
    os.fchown(fd, member.uid, member.gid)
    os.fchmod(fd, member.mode)
    for name, value in member.attributes.items():
        try:
            os.setxattr(fd, name, value)
        except OSError:  # a file system without such attributes, or one that no slot may set
            pass
    os.utime(fd, (member.mtime, member.mtime))
    os.close(fd)
