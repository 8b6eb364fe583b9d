"""Moves files into and out of slots as archives. Only a pattern of names needs a program of the slot."""

from __future__ import annotations

import asyncio
import copy
import errno
import fnmatch
import functools
import glob
import io
import itertools
import os
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from e2b_dockerfile_utils import PatternMatcher

from atropos import wire
from atropos.archives import XATTR, WholeTar
from atropos.errors import SandboxError
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult, SlotFileError, answered
from atropos.tasks.builder.archive import OVERHEAD_BYTES, LargeFile, TarPiece, changed_mode, kept_members, pack
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.context import walk
from atropos.tasks.format.recipe import PATH

MAX_STAGE_BYTES = 4 << 30
"""Most that one COPY takes from another stage or image, and the largest file of an archive that ADD unpacks."""
_MAX_LINKS = 40
_LINK_BYTES = 16_384
"""More than the archive of a link with the longest target has."""
_READ_BYTES = 1 << 20
LAST_LINES = 50
PLAIN_S = 60
"""Time limit of a command of our own, which takes milliseconds."""


@dataclass(frozen=True)
class PackedFiles:
    """What a COPY takes of one source in a stage or image.

    Attributes:
        name: the source's; with --parents its path, from where those begin.
        archive: a tar; a folder's members are named `./…`.
        folders: with --parents, those on that path, itself among them: name, mode, user and group.
    """

    name: str
    archive: IO[bytes]
    folders: tuple[tuple[str, int, int, int], ...] = ()


async def upload(slot: Slot, source: Path, where: str, *, program: str | None = None, mode: str | None = None) -> None:
    """Copy a folder's content, or a file, into a folder of the slot.

    Args:
        slot: where.
        source: what is copied.
        where: the folder.
        program: name of a file in it that everyone may run.
        mode: of what is in it, as `Copy`'s.

    Raises:
        SlotFileError: the slot can't take it.
        SandboxError: it can't be read here.
    """
    try:
        if source.is_dir():
            folder = source.resolve()
            # Its mode may have been lost on the way here: not all file systems and archives keep it.
            runs = (folder / program).resolve() if program is not None else None  # it may be a link
            await unpack_pieces(slot, where, pack(walk(folder), mode=mode, program=runs))
        else:
            await slot.write_file(f"{where}/{source.name}", await asyncio.to_thread(source.read_bytes), 0o755)
    except SlotFileError:
        raise
    except OSError as error:
        raise SandboxError(str(error)) from error


async def make_folder(slot: Slot, path: str, owner: tuple[int, int] = (0, 0), mode: int = 0o755) -> None:
    """A folder with its parents, where they are missing; what is there stays as it is.

    Raises:
        OSError: it can't be made.
    """
    missing: list[str] = []
    while path not in {"/", ""} and not await is_folder(slot, path):
        target = await followed(slot, path)
        if target != path and not await is_folder(slot, target):  # a link to what isn't there yet
            await make_folder(slot, target, owner, mode)
            continue
        missing.append(path)
        path = posixpath.dirname(path)
    if not missing:
        return
    # In one archive, from the outermost: a message instead of one for each folder, and no program of the slot.
    piece = TarPiece()
    for each in reversed(missing):
        piece.add_folder(posixpath.relpath(each, path), owner, mode)
    answered(await slot.run(wire.Untar(path=path, data=piece.close(), owners=True)), wire.Done, missing[0])


async def untar(slot: Slot, where: str, archive: bytes) -> None:
    """Unpack an archive: its members belong to whom it names.

    Raises:
        OSError: the slot can't take it.
    """
    answered(await slot.run(wire.Untar(path=where, data=archive, owners=True)), wire.Done, where)


async def unpack_pieces(
    slot: Slot, where: str, pieces: Iterator[bytes | LargeFile], owner: tuple[int, int] = (0, 0)
) -> None:
    """Unpack archives and files that are made one after the other into a folder.

    Args:
        slot: where.
        where: the folder.
        pieces: tar archives and large files.
        owner: of the large files, and of folders that are missing; an archive names its own.

    Raises:
        OSError, TaskBroken: the slot can't take one.
    """
    # Made one at a time, in a thread: they are read from disk, and only one is in memory.
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        await make_folder(slot, where, owner)
        if isinstance(piece, LargeFile):
            await slot.upload(piece.path, f"{where}/{piece.name}", mode=piece.mode)
            await change_owner(slot, f"{where}/{piece.name}", owner, piece.mode)
        else:
            await untar(slot, where, piece)


async def is_folder(slot: Slot, path: str) -> bool:
    """Whether there is a folder, or a link to one."""
    # By reading it, as that needs no `test` in the slot: an image may have no programs at all.
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    return isinstance(seen, wire.OpError) and seen.error == "is_directory"


async def is_missing(slot: Slot, path: str) -> bool:
    """Whether there is nothing of that name."""
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    return isinstance(seen, wire.OpError) and seen.error == "not_found"


async def pack_files(slot: Slot, sources: tuple[str, ...], *, parents: bool = False) -> list[PackedFiles]:
    """What a COPY from this slot's stage or image takes; `parents`: as `Copy`'s.

    Raises:
        TaskBroken: there is no such file, or it is too large.
    """
    packed: list[PackedFiles] = []
    for source in sources:
        start, cut, _ = source.partition("/./")
        for path in await _named(slot, posixpath.normpath(source) if parents else source):
            archive = await _archive(slot, await followed(slot, path))
            name, folders = posixpath.basename(path), ()
            if parents:
                name, folders = await _from_above(slot, path, len(PurePosixPath(start).parts) if cut else 0)
            packed.append(PackedFiles(name, archive, folders))
    return packed


async def _from_above(slot: Slot, path: str, depth: int) -> tuple[str, tuple[tuple[str, int, int, int], ...]]:
    """A path from a folder on that is `depth` below the root, and the folders on it: they are root's without `stat`."""
    parts = path.strip("/").split("/")
    names = ["/".join(parts[depth:count]) for count in range(depth + 1, len(parts) + 1)]
    look = 'stat -c "%a %u %g" "$f" 2> /dev/null || echo 755 0 0'
    script = f'cd "$0"; for f in "$@"; do if [ -d "$f" ]; then {look}; fi; done'
    where = "/".join(("", *parts[:depth])) or "/"
    result = await slot.exec(["/bin/sh", "-c", script, where, *names], workdir="/", user="0", timeout_s=60)
    rows = [line.split() for line in result.output.splitlines()] if result.exit_code == 0 else []
    seen = zip(names, rows, strict=False)  # the last one may be a file
    return "/".join(parts[depth:]), tuple((name, int(row[0], 8), int(row[1]), int(row[2])) for name, row in seen)


async def _named(slot: Slot, pattern: str) -> list[str]:
    """The paths that a pattern means: as with Docker, `*` matches a leading dot and `[^…]` what is not named."""
    pattern = f"/{pattern.strip('/')}"
    parts = pattern.replace("[^", "[!").split("/")
    if parts == [glob.escape(part) for part in parts]:
        return [pattern]
    # The slot's shell lists all names where a part is a pattern, in which the parts are looked for here.
    listed = itertools.product(*((part,) if part == glob.escape(part) else ("*", ".*") for part in parts))
    # `$P` without quotes: the shell is to expand it. -L as -e is false for links that lead nowhere.
    script = 'IFS="\n"; for f in $P; do if [ -e "$f" ] || [ -L "$f" ]; then printf "%s\\n" "$f"; fi; done'
    every = "\n".join("/".join(each) for each in listed)
    result = await slot.exec(script, workdir="/", env={"P": every}, user="0", timeout_s=60)
    if result.exit_code != 0 or result.truncated:
        raise command_failure(f"listing the names of {pattern}", result)
    # `.*` also gives `.` and `..`.
    plain = (name for name in result.output.splitlines() if posixpath.normpath(name) == name)
    return sorted(name for name in plain if all(map(fnmatch.fnmatchcase, name.split("/"), parts)))


async def followed(slot: Slot, path: str) -> str:
    """Where a path leads that is a link: as Docker has it, what the link names is copied, or written.

    Raises:
        TaskBroken: over too many links.
    """
    # As many as the kernel follows (path_resolution(7)).
    for _ in range(_MAX_LINKS):
        seen = None if path.endswith("/") else await slot.run(wire.Tar(path=path, max_bytes=_LINK_BYTES))
        if not isinstance(seen, wire.FileResult):
            return path
        with tarfile.open(fileobj=io.BytesIO(seen.data), mode="r:", tarinfo=WholeTar) as tar:
            first = tar.next()
        if first is None or not first.issym():
            return path
        # As it is: what `..` behind another link means, the slot's kernel knows.
        path = posixpath.join(posixpath.dirname(path), first.linkname).rstrip("/") or "/"
    raise TaskBroken(f"{path}: too many links")


async def _archive(slot: Slot, path: str) -> IO[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "archive.tar"
        try:
            await slot.download_to(path, file, max_bytes=MAX_STAGE_BYTES)
        except SlotFileError as error:
            why = "is not in the stage" if error.errno == errno.ENOENT else error.strerror
            raise TaskBroken(f"{path}: {why}") from None
        return file.open("rb")  # the reader closes it


async def unpack_archive(
    slot: Slot,
    where: str,
    archive: IO[bytes],
    *,
    name: str | None = None,
    mode: int | str | None = None,
    owner: tuple[int, int] | None = None,
    exclude: Sequence[str] = (),
) -> None:
    """Unpack an archive, in pieces; what is too large for one by itself.

    Args:
        slot: where.
        where: the folder.
        archive: read from where it stands.
        name: of its one member; None: their own.
        mode: as `Copy`'s.
        owner: None: the archive's.
        exclude: patterns of members that are left out.

    Raises:
        OSError: the slot can't take it.
        TaskBroken: a file in it is too large.
    """
    pieces = _pieces_of(archive, name, mode, owner, exclude)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        if isinstance(piece, bytes):
            await untar(slot, where, piece)
        else:
            await _send_alone(slot, where, *piece)


def _pieces_of(
    archive: IO[bytes],
    name: str | None,
    mode: int | str | None,
    owner: tuple[int, int] | None,
    exclude: Sequence[str],
) -> Iterator[bytes | tuple[tarfile.TarInfo, IO[bytes]]]:
    """Archives that a message holds, and files (with their content) that none does.

    Blocking: it may be packed tightly.
    """
    excluded = PatternMatcher(list(exclude))
    with tarfile.open(fileobj=archive, tarinfo=WholeTar) as source:
        piece = TarPiece()
        for member, content in kept_members(source, excluded.matches):
            # Devices and FIFOs: no slot may have the ones, and nobody builds with the others.
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            # The folder itself, which exists and keeps its owner and mode.
            if member.name == "." and name is None:
                continue
            if member.size > MAX_STAGE_BYTES:  # a few kilobytes may claim such a size, and would be expanded here
                raise TaskBroken(f"{member.name}: has {member.size} bytes; at most {MAX_STAGE_BYTES}")
            info = _replaced(member, name, mode, owner)
            data = source.extractfile(content) if member.isreg() else None
            if data is not None and member.size + OVERHEAD_BYTES > wire.MAX_FILE_BYTES:
                # The caller reads it before it asks for the next: the archive is read in order.
                yield info, data
                continue
            if piece.size + info.size + OVERHEAD_BYTES > wire.MAX_FILE_BYTES:
                yield piece.close()
                piece = TarPiece()
            piece.add(info, data)
        assert source.fileobj is not None
        while source.fileobj.read(_READ_BYTES):  # what was compressed has its checksum at the end
            pass
        yield piece.close()


async def _send_alone(slot: Slot, where: str, info: tarfile.TarInfo, content: IO[bytes]) -> None:
    """Unpack a member that no message holds: by way of this machine's disk, not of its memory."""
    path = f"{where}/{info.name}"
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, posixpath.basename(path))
        with copied.open("wb") as file:
            await asyncio.to_thread(shutil.copyfileobj, content, file)
        copied.chmod(info.mode)
        os.utime(copied, (info.mtime, info.mtime))
        await slot.upload(folder, posixpath.dirname(path))
    await change_owner(slot, path, (info.uid, info.gid), info.mode)


async def change_owner(slot: Slot, path: str, owner: tuple[int, int], mode: int) -> None:
    """Give a file that was sent by itself its owner, and its mode again: another owner's loses set-user-id bits.

    Raises:
        TaskBroken: the slot can't.
    """
    if owner != (0, 0):
        script = f'chown {owner[0]}:{owner[1]} "$P" && chmod {mode:o} "$P"'
        done = await slot.exec(script, env={"P": path}, workdir="/", user="0")
        if done.exit_code != 0:
            raise command_failure(f"chown of {path}", done)


def _replaced(
    member: tarfile.TarInfo, name: str | None, mode: int | str | None, owner: tuple[int, int] | None
) -> tarfile.TarInfo:
    """A member under another name, owner (None: its own) and mode."""
    info = copy.copy(member)
    info.uid, info.gid = owner or (member.uid, member.gid)
    # As a rule names come before numbers when a tar is unpacked, and they may mean others here.
    info.uname = info.gname = ""
    info.name = name or member.name
    if not member.issym():
        info.mode = changed_mode(member.mode, mode, folder=member.isdir())
    info.pax_headers = {key: value for key, value in member.pax_headers.items() if key.startswith(XATTR)}
    return info


async def exec_plain(
    slot: Slot, command: str | Sequence[str], *, user: str | None = None, timeout_s: float | None = None, **env: str
) -> ExecResult:
    """Run a command of our own: in `/`, with no variables but PATH and these.

    It runs once more where it takes too long: a host that stalled is to blame neither on an agent nor on a task. So it
    must be one that may be broken off and repeated.

    Args:
        slot: where.
        command: for the shell, or its words.
        user: None: the slot's own.
        timeout_s: None: `PLAIN_S`.
        env: variables.
    """
    run = functools.partial(
        slot.exec,
        command,
        workdir="/",
        env={"PATH": PATH, **env},
        clean_env=True,
        user=user,
        timeout_s=timeout_s or PLAIN_S,
    )
    done = await run()
    return await run() if done.timed_out else done


def command_failure(what: str, result: ExecResult, *, late: str = "took too long") -> TaskBroken:
    """A command's failure, with its last lines."""
    why = late if result.timed_out else f"ended with {result.exit_code}"
    limit = f" (limit: {result.limit})" if result.limit and not result.timed_out else ""
    lines = "\n".join(result.output.strip().splitlines()[-LAST_LINES:])
    return TaskBroken(f"{what} {why}{limit}: {lines}")
