"""A task's files as tar archives for a slot, cut to what the wire takes."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from atropos import wire
from atropos.errors import ConfigError
from atropos.tasks.format.context import Context, walk
from atropos.tasks.format.recipe import Copy

OVERHEAD_BYTES = 2 * tarfile.RECORDSIZE
"""More than the headers of a member and the end of an archive take."""


@dataclass(frozen=True)
class LargeFile:
    """A file that is sent by itself: no message of the wire holds it."""

    name: str
    path: Path
    mode: int


def unpack_steps(
    context: Context, copy: Copy, *, into_folder: bool = False, owner: tuple[int, int] = (0, 0)
) -> tuple[str, Iterator[bytes | LargeFile]]:
    """A COPY from the context: the folder in the slot, and the tar archives and large files that go into it. Blocking.

    As Docker has it: a folder's content is copied, not the folder; a file goes into a target that is a folder, else it
    gets that name.

    Args:
        context: where the sources are.
        copy: what goes where.
        into_folder: the target is a folder already.
        owner: of what is copied.

    Raises:
        ConfigError: a file is neither file, folder nor link.
    """
    where, members = _members(context, copy, into_folder=into_folder)
    return where.rstrip("/") or "/", pack(members, mode=copy.mode, owner=owner)


def _members(context: Context, copy: Copy, *, into_folder: bool) -> tuple[str, list[tuple[str, Path | bytes]]]:
    if copy.parents:
        return copy.target, [*_with_parents(context, copy), *((path, text.encode()) for path, text in copy.files)]
    where, name = copy.target, None
    paths = [path for source in copy.sources for path in context.sources(source, copy.exclude)]
    top = [(path.name, path if copy.keep_folder_name else context.followed(path)) for path in paths]
    # Only then can the target be a file's new name.
    single = len(top) + len(copy.files) == 1 and not (top and top[0][1].is_dir())
    if single and not into_folder and not copy.target.endswith("/"):
        where, _, name = copy.target.rpartition("/")
    members: list[tuple[str, Path | bytes]] = [(name or path, text.encode()) for path, text in copy.files]
    for base, path in top:
        if path.is_symlink() or not path.is_dir():
            members.append((name or base, path))
        elif copy.keep_folder_name:
            inner = [(f"{base}/{below}", p) for below, p in context.below(path, copy.exclude)]
            members += [(base, path), *inner]
        else:
            members += context.below(path, copy.exclude)
    return where, members


def _with_parents(context: Context, copy: Copy) -> list[tuple[str, Path]]:
    """What --parents copies: each source by its path in the context, or its part behind `/./`, with its parents."""
    members: dict[str, Path] = {}
    for source in copy.sources:
        start, cut, _ = source.partition("/./")
        depth = len(PurePosixPath(start).parts) if cut else 0
        for path in context.sources(source, copy.exclude, deep=True):
            parts = path.relative_to(context.folder).parts[depth:]
            for count in range(1, len(parts)):
                # The folders above come first, with the context's modes, and each of them once.
                members["/".join(parts[:count])] = path.parents[len(parts) - count - 1]
            if parts:
                members["/".join(parts)] = path
            if path.is_dir() and not path.is_symlink():
                members |= {"/".join((*parts, below)): p for below, p in context.below(path, copy.exclude)}
    return list(members.items())


def check_copy(context: Context, copy: Copy) -> None:
    """Refuse a COPY of what isn't there, or what no slot can be given.

    Raises:
        ConfigError: names it.
    """
    for name, source in _members(context, copy, into_folder=False)[1]:
        _entry(name, source, copy.mode)


def check_folder(folder: Path) -> None:
    """Refuse a folder with something in it that no slot can be given.

    Raises:
        ConfigError: names it.
    """
    for name, path in walk(folder):
        _entry(name, path, None)


def digest_of(context: Context, copy: Copy) -> str:
    """SHA-256 of all that a COPY takes from the context: names, kinds, modes and contents, and no times.

    Raises:
        ConfigError: as `unpack_steps`.
    """
    digest = hashlib.sha256()
    for name, source in _members(context, copy, into_folder=False)[1]:
        entry = _entry(name, source, copy.mode)
        described = f"{name}\0{entry.type!r}\0{entry.mode:o}\0{entry.linkname}\0{entry.size}\0"
        # NULs between the parts, as a name may hold whatever else would part them.
        digest.update(described.encode("utf-8", "surrogateescape"))
        if isinstance(source, bytes):
            digest.update(source)
        elif entry.isreg():
            with source.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def pack(
    members: Iterable[tuple[str, Path | bytes]],
    *,
    mode: int | str | None = None,
    program: Path | None = None,
    limit: int = wire.MAX_FILE_BYTES,
    owner: tuple[int, int] = (0, 0),
) -> Iterator[bytes | LargeFile]:
    """The members as tar archives of at most `limit` bytes.

    What is too large for one comes by itself. Modes lose a group's write permission, unless others have it too, so that
    a checkout under another umask makes the same workspace. `program` is a file that everyone may run.

    Raises:
        ConfigError: a member is neither file, folder nor link.
    """
    piece = TarPiece()
    for name, source in members:
        entry = _entry(name, source, mode)
        # By number, as names of this machine mean nothing in the slot.
        entry.uid, entry.gid = owner
        if source == program:
            entry.mode |= 0o111
        # Alone: an archive goes in one message, and is in memory as a whole.
        if isinstance(source, Path) and entry.size + OVERHEAD_BYTES > limit:
            yield LargeFile(name, source, entry.mode)
            continue
        if piece.size and piece.size + entry.size + OVERHEAD_BYTES > limit:
            yield piece.close()
            piece = TarPiece()
        data = source if isinstance(source, bytes) else source.read_bytes() if entry.isreg() else b""
        piece.add(entry, io.BytesIO(data))
    if piece.size:
        yield piece.close()


def kept_members(
    archive: tarfile.TarFile, left_out: Callable[[str], bool]
) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarInfo]]:
    """(member, the one that holds its content) of all that is not left out.

    The first hard link to a file that is left out takes the file's place, and further ones link to it.
    """
    gone: dict[str, tarfile.TarInfo] = {}
    in_place: dict[str, str] = {}
    for member in archive:
        name, content, target = posixpath.normpath(member.name), member, posixpath.normpath(member.linkname)
        if left_out(name):
            # Remembered, since a hard link that is not left out may need its content.
            gone[name] = member
            continue
        if member.islnk() and target in in_place:
            member.linkname = in_place[target]
        elif member.islnk() and target in gone and gone[target].isreg():
            content, in_place[target] = gone[target], member.name
            member.type, member.linkname, member.size = content.type, "", content.size
        yield member, content


class TarPiece:
    """A tar archive in memory, added to member by member."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._out, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    @property
    def size(self) -> int:
        """Its bytes so far."""
        return self._out.tell()

    def add(self, info: tarfile.TarInfo, data: IO[bytes] | None) -> None:
        """Add a member; `data`: a file's content."""
        self._tar.addfile(info, data)

    def add_folder(self, name: str, owner: tuple[int, int], mode: int = 0o755) -> None:
        """Add a folder."""
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.mtime = tarfile.DIRTYPE, mode, int(time.time())
        info.uid, info.gid = owner
        self.add(info, None)

    def close(self) -> bytes:
        """The whole archive."""
        self._tar.close()
        return self._out.getvalue()


_PLACES = {"u": 6, "g": 3, "o": 0}
"""Of whose bits are where in a mode."""


def changed_mode(mode: int, change: int | str | None, *, folder: bool) -> int:
    """A mode after `chmod`, whose symbolic form has `[ugoa]*[-+=]([ugo]+|[rwxXst]*)` as its parts."""
    if change is None or isinstance(change, int):
        return mode if change is None else change
    for part in change.split(","):
        who = re.match("[ugoa]*", part)
        assert who is not None
        places = [place for place in "ugo" if not who[0] or "a" in who[0] or place in who[0]]
        for operator, letters in re.findall("([-+=])([ugo]+|[rwxXst]*)", part):
            bits, copied = 0, 0
            for place, shift in _PLACES.items():
                copied |= mode >> shift & 7 if place in letters else 0
            for place in places:
                shift = _PLACES[place]
                runs = "x" in letters or ("X" in letters and (folder or mode & 0o111))
                plain = 4 * ("r" in letters) + 2 * ("w" in letters) + bool(runs)
                bits |= (plain | copied) << shift
                bits |= {"u": 0o4000, "g": 0o2000, "o": 0}[place] if "s" in letters else 0
                # First cleared, then set below.
                if operator == "=":
                    mode &= ~(7 << shift)
            bits |= 0o1000 if "t" in letters and places != ["o"] else 0
            mode = mode & ~bits if operator == "-" else mode | bits
    return mode


def _entry(name: str, source: Path | bytes, mode: int | str | None) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    if isinstance(source, bytes):
        entry.mode, entry.size = changed_mode(0o644, mode, folder=False), len(source)
        entry.mtime = int(time.time())
        return entry
    seen = source.lstat()
    entry.mtime = int(seen.st_mtime)
    own = stat.S_IMODE(seen.st_mode)
    if stat.S_ISLNK(seen.st_mode) or not own & stat.S_IWOTH:
        # git keeps no group-write bit: it is the umask's of whoever made the checkout. Of links the kernel ignores
        # modes.
        own &= 0o7755
    entry.mode = changed_mode(own, mode, folder=stat.S_ISDIR(seen.st_mode))
    if stat.S_ISLNK(seen.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(source)
    elif stat.S_ISDIR(seen.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISREG(seen.st_mode):
        entry.size = seen.st_size
    else:
        raise ConfigError(f"{source}: is neither a file, a folder nor a link; a slot can't be given it")
    return entry
