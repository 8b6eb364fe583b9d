"""Copies artifacts from the agent's slot to a separate verifier's."""

from __future__ import annotations

import asyncio
import errno
import fnmatch
import posixpath
import re
import shlex
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

from atropos import wire
from atropos.archives import WholeTar
from atropos.slot_python import SLOT_PYTHON
from atropos.slots import Slot
from atropos.slots.slot.results import SlotFileError
from atropos.tasks.builder.archive import kept_members
from atropos.tasks.builder.transfer import exec_plain, unpack_archive
from atropos.tasks.errors import TaskBroken, VerifierFailed

_PROGRAMS = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/opt/", "/etc/")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Errors of this machine's disk, which no archive causes."""
_DEAD_LINKS = """
import os, sys
for folder, folders, files in os.walk(sys.argv[1]):
    for path in (os.path.join(folder, name) for name in (*folders, *files)):
        if os.path.islink(path) and not os.path.exists(path):
            os.unlink(path)
"""
_Links: TypeAlias = "dict[str, _Links]"
"""Names of links as a tree of their parts; an empty part, which no name has, marks where one ends."""


@dataclass(frozen=True)
class CarriedArtifact:
    """An artifact on its way: a file, or the archive of a folder.

    Attributes:
        content: a local file with it.
        mode: of the file; None: it is a folder.
        kinds: of the folder's members, as tar has them.
    """

    content: Path
    mode: int | None
    kinds: frozenset[bytes] = frozenset()

    @property
    def has_hard_links(self) -> bool:
        """Whether files of the folder are one under several names."""
        return tarfile.LNKTYPE in self.kinds


class TooLarge(VerifierFailed):
    """An artifact has more bytes than it may."""


async def carry_out(
    slot: Slot, path: str, to: Path, exclude: Sequence[str] = (), *, max_bytes: int
) -> CarriedArtifact | None:
    """Copy a file or folder, without what `exclude` names in it, to a local file; None when it isn't there.

    Raises:
        VerifierFailed: it can't be read; `TooLarge`: the file, or the folder's archive, has more bytes.
        OSError: this machine's disk is full or broken.
    """
    # One byte: it tells a file from a folder, and the file's mode.
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    if isinstance(seen, wire.FileResult):
        await _read(slot, path, partial(slot.read_file_to, path, to, max_bytes=max_bytes))
        return CarriedArtifact(to, seen.mode & 0o777)
    if isinstance(seen, wire.OpError) and seen.error in {"not_found", "not_directory"}:
        return None
    whole = to.with_name(f"{to.name}.whole")
    await _read(slot, path, partial(slot.download_to, path, whole, max_bytes=max_bytes))
    return CarriedArtifact(to, None, await asyncio.to_thread(_check, whole, to, path, exclude))


def _check(whole: Path, to: Path, path: str, exclude: Sequence[str]) -> frozenset[bytes]:
    """Write what may be carried of a folder's archive, in place of that; the kinds of its members."""
    with whole.open("rb") as archive, to.open("wb") as out:
        kinds = copy_safely(archive, out, path, exclude)
    whole.unlink()
    return kinds


async def _read(slot: Slot, path: str, read: Callable[[], Awaitable[None]]) -> None:
    """Read, if need be once the slot's programs, which may have killed what reads it, are ended."""
    try:
        try:
            await read()
        except SlotFileError as error:
            if error.errno == errno.EFBIG:
                raise
            # The work itself is done: a program that fights its reading must not make it unreadable.
            await slot.quiesce()
            await read()
    except SlotFileError as error:
        kind = TooLarge if error.errno == errno.EFBIG else VerifierFailed
        raise kind(f"the artifact {path} can't be carried over: {error}") from None


def copy_safely(archive: IO[bytes], out: IO[bytes], path: str, exclude: Sequence[str] = ()) -> frozenset[bytes]:
    """Copy an archive without what leads out of its folder: absolute names, `..`, paths through links.

    The archive comes from a slot that the agent owned: it may hold anything, a link to the expected answers among it.
    Links that stay are those within the folder, and to programs and libraries of the verifier's own machine.

    Args:
        archive: the folder.
        out: gets the copy.
        path: of the folder in the slot.
        exclude: patterns of what is left out, as tar's --exclude takes them.

    Returns:
        The kinds of what was copied, as tar has them.

    Raises:
        VerifierFailed: it is no tar archive.
        OSError: this machine's disk is full or broken.
    """
    links: _Links = {}
    kinds: set[bytes] = set()
    try:
        # what comes out of a slot is not compressed: some mebibytes that were would be terabytes
        with (
            tarfile.open(fileobj=archive, mode="r:", tarinfo=WholeTar) as source,
            tarfile.open(fileobj=out, mode="w") as target,
        ):
            # All links first: one may come after the members that lie behind it.
            every = {"/".join(_parts(member.name)) for member in source if member.issym()}
            for member, content in kept_members(source, _excluded(exclude)):
                name = _inside(member.name, links)
                # a sparse file of some bytes may claim to be a terabyte, and would be written out in full here
                plain = member.isreg() and not content.issparse()
                if name is None or not (plain or member.isdir() or member.issym() or member.islnk()):
                    continue
                if member.islnk():
                    link = _inside(member.linkname, links)
                    if link is None:
                        continue
                    member.linkname = link
                if member.issym():
                    if not _stays(name, member.linkname, path, every):
                        continue
                    _note(links, name)
                member.name, member.pax_headers = name, {}  # which would be written in place of what was checked here
                # Numbers of the agent's slot mean other users in the verifier's.
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                target.addfile(member, source.extractfile(content) if plain else None)
                kinds.add(member.type)
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise VerifierFailed(f"the artifact {path} is no tar archive: {error}") from None
    return frozenset(kinds)


def _excluded(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a pattern matches a name or a parent of it, from any of its parts: in one pass, at any depth."""
    expressions: list[str] = []
    for pattern in (pattern.removeprefix("./").rstrip("/") for pattern in patterns):
        rest = pattern.lstrip("*")  # a star matches all that is before, slashes too
        expressions.append(f"{'' if rest != pattern else '(?:^|/)'}{fnmatch.translate(rest)[:-2]}(?:/|\\Z)")
    every = re.compile("|".join(expressions))
    return lambda name: bool(expressions) and every.search(name) is not None


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in {"", "."}]


def _stays(name: str, target: str, folder: str, links: set[str]) -> bool:
    """Whether a link stays in its folder or leads to programs, if the links that it passes do: no `..` after one."""
    at = posixpath.dirname(name)
    if target.startswith("/"):
        below = posixpath.normpath(target)
        # As a venv's `python`: it leads to the verifier's own programs, which the agent never wrote.
        if below.startswith(_PROGRAMS) and ".." not in target.split("/"):
            return True
        if not target.startswith(f"{folder.rstrip('/')}/"):
            return False
        at, target = "", target.removeprefix(f"{folder.rstrip('/')}/")
    passed = False
    for part in _parts(target):
        if part == "..":
            # After a link, `..` is the parent of where that leads (path_resolution(7)), not of its name.
            if not at or passed:
                return False
            at = posixpath.dirname(at)
        else:
            at = posixpath.join(at, part)
        passed = passed or at in links
    return True


def _note(links: _Links, name: str) -> None:
    """Add a link."""
    for part in name.split("/"):
        links = links.setdefault(part, {})
    links[""] = {}


def _passes(links: _Links, parts: Sequence[str]) -> bool:
    """Whether these parts name a link, or something on the way through one: a look-up for each part, at any depth."""
    for part in parts:
        if part not in links:
            return False
        links = links[part]
        if "" in links:
            return True
    return False


def _inside(name: str, links: _Links) -> str | None:
    """A member's plain name; None for the folder itself and for what leads out of it."""
    parts = _parts(name)
    if not parts or ".." in parts or name.startswith("/") or _passes(links, parts):
        return None
    return "/".join(parts)


async def carry_in(slot: Slot, path: str, carried: CarriedArtifact | None) -> None:
    """Put an artifact in the place of what is there."""
    quoted = shlex.quote(path)
    # Links may be the agent's (a view shows its folders, another artifact may hold this one), and lead into the
    # machine.
    parts = _parts(path)
    ways = " ".join(shlex.quote("/" + "/".join(parts[:count])) for count in range(2, len(parts) + 1))
    unlink = f'for f in {ways}; do [ ! -L "$f" ] || rm -f -- "$f" || exit; done'
    # A folder is emptied rather than removed: it may be the one that commands start in. Few images have a
    # `find -delete`.
    every = "* .[!.]* ..?*"
    each = f'for f in {every}; do rm -rf -- "$f" || exit; done'  # where these are too many for one command
    empty = f"cd -- {quoted} && {{ rm -rf -- {every} 2>/dev/null || {each}; }}"
    if carried is not None and carried.mode is None:
        script = f"[ -e {quoted} ] || exec mkdir -p -- {quoted}; [ -L {quoted} ] || {{ {empty}; }}"
    else:
        script = f"if [ ! -d {quoted} ]; then rm -f -- {quoted}; elif [ ! -L {quoted} ]; then {empty}; fi"
    cleared = await exec_plain(slot, f"{unlink}; {script}")
    if cleared.exit_code != 0:
        raise TaskBroken(f"the verifier's slot can't take {path}: {cleared.output[-300:].strip()}")
    if carried is None:
        return
    try:
        if carried.mode is not None:
            await slot.upload(carried.content, path, mode=carried.mode)
        # An empty folder has been made already.
        elif carried.kinds:
            with carried.content.open("rb") as archive:
                await unpack_archive(slot, path, archive)
            if tarfile.SYMTYPE in carried.kinds:
                # Dangling links in an agent's folder would be written through by whoever creates that name.
                await _remove_dead_links(slot, path)
    except SlotFileError as error:
        raise VerifierFailed(f"the artifact {path} can't be put into the verifier's slot: {error}") from None


async def _remove_dead_links(slot: Slot, path: str) -> None:
    """Remove links to what does not exist yet: it may be what the tests will write."""
    done = await exec_plain(slot, (*SLOT_PYTHON, "-c", _DEAD_LINKS, path))
    if done.exit_code != 0:
        raise VerifierFailed(f"the links in the artifact {path} can't be looked at: {done.output[-300:].strip()}")
