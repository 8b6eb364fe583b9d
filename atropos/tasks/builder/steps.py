"""Runs one step of a recipe in a slot. Only RUN needs a program of the slot."""

from __future__ import annotations

import asyncio
import hashlib
import lzma
import posixpath
import shlex
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atropos import wire
from atropos.archives import WholeTar
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult
from atropos.tasks.builder.accounts import owner_ids
from atropos.tasks.builder.archive import TarPiece, changed_mode, pack, unpack_steps
from atropos.tasks.builder.transfer import (
    PackedFiles,
    command_failure,
    followed,
    is_folder,
    is_missing,
    make_folder,
    unpack_archive,
    unpack_pieces,
    untar,
)
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format import tars
from atropos.tasks.format.context import Context
from atropos.tasks.format.recipe import CACHES, Copy, Download, Folder, Mount, Run, file_name

_FETCHED = "/tmp/fetched"
_KEPT = ".atropos-kept"
"""Ends the name of what a mount covers, for its time."""
_FETCH = f"""import os, shutil, urllib.request
with urllib.request.urlopen(os.environ["ADDRESS"]) as answer, open({_FETCHED!r}, "wb") as file:
    shutil.copyfileobj(answer, file)
"""


async def run(slot: Slot, step: Run, timeout_s: float) -> None:
    """A command.

    Raises:
        TaskBroken: it failed; with the last lines that it printed.
    """
    settings, what = step.settings, f"`{shlex.join(step.command):.200}`"
    user = settings.user
    if user is None:
        # A step without USER is root's; the slot's own default would be the user of the image that it stands on.
        user = "0" if slot.image is not None and slot.image.user else None
    # An earlier step may have removed it; Docker makes it anew.
    await make_folder(slot, settings.workdir)
    operation = wire.Exec(
        command=step.command, workdir=settings.workdir, env=dict(settings.env), user=user, timeout_s=timeout_s
    )
    done = await slot.run(operation)
    if isinstance(done, wire.OpError):
        raise TaskBroken(f"{what}: {done.message}")
    result = ExecResult.of(done)
    if result.exit_code != 0:
        raise command_failure(what, result, late="took longer than environment.build_timeout_sec")


async def begin_mount(slot: Slot, mount: Mount) -> tuple[str, ...]:
    """Set aside what is at a mount's target, and show its folder.

    Returns:
        The target and the folders above it that were not there: for `end_mount`.

    Raises:
        OSError, TaskBroken: the slot can't.
    """
    made_folders: list[str] = []
    path, mode = mount.target, mount.mode
    # Remembered, so that `end_mount` leaves no empty folders in the image.
    while path != "/" and await is_missing(slot, path):
        made_folders.append(path)
        path = posixpath.dirname(path)
    if mode is None:
        mode = 0o1777 if made_folders else await _mode_of(slot, path)
    if not made_folders:
        # Beside it: within one file system a rename moves no data.
        await _as_root(slot, 'mv "$P" "$P$KEPT"', mount)
    if mount.content is None:
        await make_folder(slot, posixpath.dirname(mount.target))
    if mount.cache and not await is_missing(slot, _cache_of(mount)):
        # Moved, not copied: a package manager's cache has gigabytes.
        await _as_root(slot, 'mv "$CACHE" "$P"', mount)
    elif mount.content is None:
        piece = TarPiece()
        piece.add_folder(posixpath.basename(mount.target), mount.owner, mode)
        await untar(slot, posixpath.dirname(mount.target), piece.close())
    return tuple(made_folders)


async def _mode_of(slot: Slot, folder: str) -> int:
    """A folder's mode, by the slot's own `stat`; that of a new tmpfs without one."""
    result = await slot.exec('stat -c %a "$P"', workdir="/", env={"P": folder}, user="0", timeout_s=60)
    return int(result.output, 8) if result.exit_code == 0 else 0o1777


async def end_mount(slot: Slot, mount: Mount, made: tuple[str, ...]) -> None:
    """Remove what a mount showed, or keep it as the stage's cache, and put back what was set aside.

    Folders that were made for it stay where they hold something.

    Raises:
        TaskBroken: the slot can't.
    """
    back = "".join(f"; rmdir {shlex.quote(path)} 2>/dev/null || exit 0" for path in made[1:])
    gone = f'mkdir -p -m 700 {CACHES} && rm -rf "$CACHE" && mv "$P" "$CACHE"' if mount.cache else 'rm -rf "$P"'
    await _as_root(slot, gone + (back if made else ' && mv "$P$KEPT" "$P"'), mount)


def _cache_of(mount: Mount) -> str:
    return f"{CACHES}/{hashlib.sha256(mount.cache.encode()).hexdigest()[:16]}"


async def _as_root(slot: Slot, script: str, mount: Mount) -> None:
    env = {"P": mount.target, "KEPT": _KEPT, "CACHE": _cache_of(mount)}
    result = await slot.exec(script, workdir="/", env=env, user="0", timeout_s=600)
    if result.exit_code != 0:
        raise command_failure(f"a mount at {mount.target}", result)


def _mode_above(step: Copy) -> int:
    """The mode of folders made for a copy: under BuildKit that of --chmod too, if in digits and not symbolic."""
    return step.mode if isinstance(step.mode, int) else 0o755


async def copy(slot: Slot, step: Copy, context: Context) -> None:
    """COPY from the build context.

    Raises:
        ConfigError: a file can't be packed.
        OSError: the slot can't take it.
        TaskBroken: there is no such owner.
    """
    if not step.files and not any(context.sources(source, step.exclude) for source in step.sources):
        return  # patterns without a match
    # With the slash it is a folder by its name, which is made if it is missing.
    into = not step.target.endswith("/") and await is_folder(slot, step.target)
    if not into:
        step = replace(step, target=await followed(slot, step.target))
    owner = await owner_ids(slot, step.owner)
    where, pieces = await asyncio.to_thread(unpack_steps, context, step, into_folder=into, owner=owner)
    await make_folder(slot, where, owner, _mode_above(step))
    await unpack_pieces(slot, where, pieces, owner)


async def unpack(slot: Slot, step: Copy, context: Context) -> None:
    """ADD of archives in the build context, which are read here: no program of the slot is needed.

    As Docker has it, --chown is for folders that are made: members keep their owners and modes.

    Raises:
        ConfigError: there is no such file.
        OSError: the slot can't take it.
        TaskBroken: there is no such owner, or it can't be read.
    """
    for source in step.sources:
        for path in context.sources(source, step.exclude):
            await _unpack_file(slot, step.target, context.followed(path), step.owner, source)


async def _unpack_file(slot: Slot, target: str, file: Path, owner: str | None, source: str) -> None:
    where = target.rstrip("/") or "/"
    await make_folder(slot, where, await owner_ids(slot, owner))
    try:
        with await asyncio.to_thread(tars.opened, file) as archive:
            await unpack_archive(slot, where, archive)
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        # A real error of this machine or the slot, and not the archive's.
        if isinstance(error, OSError) and error.errno is not None:  # archives of gzip and bz2 have none
            raise
        raise TaskBroken(f"ADD {source}: {error}") from None


async def copy_from_stage(slot: Slot, step: Copy, copied: Sequence[PackedFiles]) -> None:
    """Put what was taken from a stage where a COPY wants it.

    Raises:
        OSError: the slot can't take it.
        TaskBroken: there is no such owner.
    """
    owner = None if step.owner is None else await owner_ids(slot, step.owner)
    for packed in copied:
        archive = packed.archive
        with tarfile.open(fileobj=archive, mode="r:", tarinfo=WholeTar) as tar:
            first = tar.next()
            folder = first is not None and first.isdir()
        archive.seek(0)
        where, rename = step.target, packed.name
        if step.parents:
            await _make_parents(slot, step, packed, owner)
            above, rename = posixpath.split(packed.name)
            where += packed.name if folder else above
        elif not folder and not step.target.endswith("/") and not await is_folder(slot, step.target):
            where, rename = posixpath.split(await followed(slot, step.target))
        where = where.rstrip("/") or "/"
        await make_folder(slot, where, owner or (0, 0), _mode_above(step))
        # A folder's members have names of their own, below `./`.
        name = rename if not folder else None
        await unpack_archive(slot, where, archive, name=name, mode=step.mode, owner=owner, exclude=step.exclude)


async def _make_parents(slot: Slot, step: Copy, packed: PackedFiles, owner: tuple[int, int] | None) -> None:
    """The folders above a source, as its stage has them, where they are missing."""
    target = step.target.rstrip("/") or "/"
    await make_folder(slot, target, owner or (0, 0), _mode_above(step))
    piece = TarPiece()
    for name, mode, user, group in packed.folders:
        if not await is_folder(slot, posixpath.join(target, name)):
            piece.add_folder(name, owner or (user, group), changed_mode(mode, step.mode, folder=True))
    if piece.size:
        await untar(slot, target, piece.close())


async def fetch(slot: Slot, step: Download, timeout_s: float) -> bytes:
    """What is at an address, fetched in a slot of the pool's base by what egress allows.

    Raises:
        TaskBroken: it can't be fetched, or is another content than the checksum says.
    """
    result = await slot.exec(
        'exec python3 -I -c "$SCRIPT"',
        env={"SCRIPT": _FETCH, "ADDRESS": step.address},
        workdir="/",
        timeout_s=timeout_s,
    )
    if result.exit_code != 0:
        lines = result.output.strip().splitlines()
        raise command_failure(f"ADD {step.address}", replace(result, output=lines[-1] if lines else ""))
    # Checked here, not in the slot: the checksum also decides whether what was fetched before is the same.
    data = await slot.read_file(_FETCHED)
    actual = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if step.checksum is not None and actual != step.checksum:
        raise TaskBroken(f"ADD {step.address}: its checksum is {actual}, not {step.checksum}")
    return data


async def add_download(slot: Slot, step: Download, data: bytes) -> None:
    """Put what was fetched where ADD wants it.

    Raises:
        OSError: the slot can't take it.
        TaskBroken: there is no such owner, or it is a damaged archive.
    """
    if step.unpack:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "fetched")
            await asyncio.to_thread(file.write_bytes, data)
            if await asyncio.to_thread(tars.is_archive, file):
                await _unpack_file(slot, step.target, file, step.owner, step.address)
                return
    where, name = posixpath.split(step.target)
    if not name or await is_folder(slot, step.target):
        where, name = step.target.rstrip("/") or "/", file_name(step.address)
    owner = await owner_ids(slot, step.owner)
    await unpack_pieces(slot, where, pack([(name, data)], mode=step.mode, owner=owner), owner)


async def make_workdir(slot: Slot, step: Folder) -> None:
    """WORKDIR: a folder, made where it is missing."""
    await make_folder(slot, step.path, await owner_ids(slot, step.owner))
