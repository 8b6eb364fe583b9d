"""A task's files as tar archives for a slot, cut to what the wire takes."""

from __future__ import annotations

import functools
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from atropos import wire
from atropos.errors import ConfigError
from atropos.tasks.dockerfile import Copy


def sources(context: Path, pattern: str) -> list[Path]:
    """The files or folders of the build context that a COPY source names."""
    if pattern in {".", "./"}:
        return [context]
    found = [context / pattern] if os.path.lexists(context / pattern) else sorted(context.glob(pattern))
    if not found:
        raise ConfigError(f"{context / pattern}: is missing, and a COPY needs it")
    return found


def unpack_steps(context: Path, copy: Copy) -> Iterator[tuple[str, bytes]]:
    """A COPY as (folder in the slot, tar archive) pairs, each small enough for the wire.

    As Docker has it: a folder's content is copied, not the folder; a file goes into a target that ends in `/`, else it
    gets that name. Owner and group become 0.

    Raises:
        ConfigError: a file is too large, or is neither file, folder nor link.
    """
    into, name = copy.target, None
    top = [path for source in copy.sources for path in sources(context, source)]
    if not copy.target.endswith("/") and len(top) == 1 and not top[0].is_dir():
        into, _, name = copy.target.rpartition("/")
    members: list[tuple[str, Path]] = []
    for path in top:
        if path.is_symlink() or not path.is_dir():
            members.append((name or path.name, path))
        elif copy.whole:
            members += [(path.name, path), *((f"{path.name}/{inner}", p) for inner, p in _walk(path))]
        else:
            members += _walk(path)
    for archive in pack(members, mode=copy.mode):
        yield into or "/", archive


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(folders + files):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if name in {"__pycache__", ".DS_Store"} or "__pycache__/" in relative:
                continue
            yield relative, path


def pack(members: Sequence[tuple[str, Path]], *, mode: int | None = None, limit: int = 0) -> Iterator[bytes]:
    """Uncompressed tar archives of (name, path), each at most `limit` bytes (default: what the wire takes).

    Modes lose group and other write permission, so that a checkout under another umask makes the same workspace.
    """
    limit = limit or wire.MAX_FILE_BYTES
    buffer, archive = io.BytesIO(), None
    for name, path in members:
        seen = path.lstat()
        size = seen.st_size if stat.S_ISREG(seen.st_mode) else 0
        if size + 20_480 > limit:
            raise ConfigError(f"{path}: {size} bytes are too much for one file; make it in setup.sh")
        if archive is not None and buffer.tell() + size + 20_480 > limit:
            archive.close()
            yield buffer.getvalue()
            buffer, archive = io.BytesIO(), None
        archive = archive or tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        entry = tarfile.TarInfo(name)
        entry.mtime = int(seen.st_mtime)
        entry.mode = mode if mode is not None and stat.S_ISREG(seen.st_mode) else stat.S_IMODE(seen.st_mode) & 0o755
        if stat.S_ISLNK(seen.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(entry)
        elif stat.S_ISDIR(seen.st_mode):
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry)
        elif stat.S_ISREG(seen.st_mode):
            data = path.read_bytes()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        else:
            raise ConfigError(f"{path}: is neither a file, a folder nor a link; a slot can't be given it")
    if archive is not None:
        archive.close()
        yield buffer.getvalue()


def packed_folder(folder: Path) -> tuple[bytes, ...]:
    """A folder's content as tar archives; packed again only when one of its files has changed."""
    stamps = [(name, path.lstat()) for name, path in _walk(folder)]
    return _packed(folder, tuple((name, seen.st_mtime_ns, seen.st_size, seen.st_mode) for name, seen in stamps))


@functools.lru_cache(maxsize=256)
def _packed(folder: Path, _stamps: tuple[tuple[str, int, int, int], ...]) -> tuple[bytes, ...]:
    return tuple(pack(list(_walk(folder))))
