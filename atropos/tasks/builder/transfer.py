"""Moves files into and out of slots as archives. Only a pattern of names needs a program of the slot."""

from __future__ import annotations

import asyncio
import copy
import io
import posixpath
import tarfile
import tempfile
from dataclasses import dataclass
from typing import IO

from atropos import wire
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult, file_error
from atropos.tasks.builder.archive import changed_mode
from atropos.tasks.errors import TaskBroken

MAX_STAGE_BYTES = 4 << 30
"""Most that one COPY takes from another stage or image."""
MAX_LINKS = 40
LAST_LINES = 50


@dataclass(frozen=True)
class PackedFiles:
    """Files of a stage or image, each source as an archive."""

    sources: tuple[tuple[str, IO[bytes]], ...]
    """(name of the source, tar archive). A folder's members are named `./…`."""


async def make_folder(slot: Slot, path: str, owner: tuple[int, int] = (0, 0)) -> None:
    """A folder with its parents, where they are missing; what is there stays as it is.

    Raises:
        OSError: it can't be made.
    """
    missing: list[str] = []
    while path not in {"/", ""} and not await is_folder(slot, path):
        missing.append(path)
        path = posixpath.dirname(path)
    if not missing:
        return
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for each in reversed(missing):
            info = tarfile.TarInfo(posixpath.relpath(each, path))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            info.uid, info.gid = owner
            tar.addfile(info)
    await untar(slot, path, out.getvalue(), owners=True)


async def untar(slot: Slot, where: str, archive: bytes, *, owners: bool = False) -> None:
    """Unpack an archive: its members belong to root, or with `owners` to whom the archive names.

    Raises:
        OSError: the slot can't take it.
    """
    result = await slot.run(wire.Untar(path=where, data=archive, owners=owners))
    if isinstance(result, wire.OpError):
        raise file_error(result, where)


async def is_folder(slot: Slot, path: str) -> bool:
    """Whether there is a folder, or a link to one."""
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    return isinstance(seen, wire.OpError) and seen.error == "is_directory"


async def is_missing(slot: Slot, path: str) -> bool:
    """Whether there is nothing of that name."""
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    return isinstance(seen, wire.OpError) and seen.error == "not_found"


async def pack_files(slot: Slot, sources: tuple[str, ...]) -> PackedFiles:
    """What a COPY from this slot's stage or image takes.

    Raises:
        TaskBroken: there is no such file, or it is too large.
    """
    found: list[tuple[str, IO[bytes]]] = []
    for pattern in sources:
        found += [(posixpath.basename(path), await _archive(slot, path)) for path in await _named(slot, pattern)]
    return PackedFiles(tuple(found))


async def _named(slot: Slot, pattern: str) -> list[str]:
    pattern = f"/{pattern.strip('/')}"
    if not any(letter in pattern for letter in "*?["):
        return [pattern]
    script = 'IFS=; for f in $P; do if [ -e "$f" ] || [ -L "$f" ]; then printf "%s\\n" "$f"; fi; done'
    result = await slot.exec(script, workdir="/", env={"P": pattern}, user="0", timeout_s=60)
    names = result.output.splitlines()
    if result.exit_code != 0 or not names:
        raise TaskBroken(f"{pattern}: is not in the stage")
    return names


async def _archive(slot: Slot, path: str) -> IO[bytes]:
    """A file or folder as an archive, in pieces that the wire takes; a link is followed."""
    for _ in range(MAX_LINKS):
        archive = await _one_archive(slot, path)
        with tarfile.open(fileobj=archive) as tar:
            first = tar.next()
        archive.seek(0)
        if first is None or not first.issym():
            return archive
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), first.linkname))
    raise TaskBroken(f"{path}: too many links")


async def _one_archive(slot: Slot, path: str) -> IO[bytes]:
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (its reader closes it)
    size = 0
    while True:
        part = await slot.run(wire.Tar(path=path, offset=size))
        if isinstance(part, wire.OpError):
            file.close()
            why = "is not in the stage" if part.error == "not_found" else part.message
            raise TaskBroken(f"{path}: {why}")
        assert isinstance(part, wire.FileResult)
        await asyncio.to_thread(file.write, part.data)
        size += len(part.data)
        if size > MAX_STAGE_BYTES:
            file.close()
            raise TaskBroken(f"{path}: more than {MAX_STAGE_BYTES >> 30} GiB")
        if part.size <= size:
            file.seek(0)
            return file


async def unpack_archive(
    slot: Slot,
    where: str,
    archive: IO[bytes],
    *,
    name: str | None = None,
    mode: int | str | None = None,
    owner: tuple[int, int] | None = None,
) -> None:
    """Unpack an archive, in pieces; what is too large for one by itself.

    Args:
        slot: where.
        where: the folder.
        archive: read from where it stands.
        name: of its one member; None: their own.
        mode: as `Copy`'s.
        owner: None: the archive's.

    Raises:
        OSError: the slot can't take it.
    """
    with tarfile.open(fileobj=archive) as source:
        piece = TarPiece()
        for member in source:
            if member.isreg() or member.isdir() or member.issym() or member.islnk():
                if member.name == "." and name is None:
                    continue
                info = replace_member(member, name, mode, owner)
                if member.isreg() and member.size + 20_480 > wire.MAX_FILE_BYTES:
                    content = source.extractfile(member)
                    assert content is not None
                    path = f"{where}/{info.name}"
                    await slot.write_file(path, await asyncio.to_thread(content.read), info.mode)
                    await change_owner(slot, path, (info.uid, info.gid))
                    continue
                data = source.extractfile(member) if member.isreg() else None
                if piece.size + info.size + 20_480 > wire.MAX_FILE_BYTES:
                    await untar(slot, where, piece.close(), owners=True)
                    piece = TarPiece()
                piece.add(info, data)
        await untar(slot, where, piece.close(), owners=True)


async def change_owner(slot: Slot, path: str, owner: tuple[int, int]) -> None:
    """Give a file that was sent by itself its owner.

    Raises:
        TaskBroken: the slot can't.
    """
    if owner != (0, 0):
        done = await slot.exec(f'chown {owner[0]}:{owner[1]} "$P"', env={"P": path}, workdir="/", user="0")
        if done.exit_code != 0:
            raise command_failure(f"chown of {path}", done)


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

    def close(self) -> bytes:
        """The whole archive."""
        self._tar.close()
        return self._out.getvalue()


def replace_member(
    member: tarfile.TarInfo, name: str | None, mode: int | str | None, owner: tuple[int, int] | None
) -> tarfile.TarInfo:
    """A member under another name, owner (None: its own) and mode."""
    info = copy.copy(member)
    info.uid, info.gid = owner or (member.uid, member.gid)
    info.uname = info.gname = ""
    info.name = name or member.name
    if not member.issym():
        info.mode = changed_mode(member.mode, mode, folder=member.isdir())
    info.pax_headers = {}
    return info


def command_failure(what: str, result: ExecResult, *, late: str = "took too long") -> TaskBroken:
    """A command's failure, with its last lines."""
    why = late if result.timed_out else f"ended with {result.exit_code}"
    limit = f" (limit: {result.limit})" if result.limit and not result.timed_out else ""
    lines = "\n".join(result.output.strip().splitlines()[-LAST_LINES:])
    return TaskBroken(f"{what} {why}{limit}: {lines}")
