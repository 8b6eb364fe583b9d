"""What a stack of layers shows, as overlay would: found in the layers themselves, through no link.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = "user.overlay.opaque"


class Part(NamedTuple):
    """A folder in one layer: the layer's number from the top, and a descriptor."""

    layer: int
    fd: int


@dataclass(frozen=True)
class Found:
    """A folder in each layer that has it, topmost first; empty: there is none, or (`blocked`) something else."""

    parts: list[Part]
    blocked: bool = False


def find(layers: Sequence[str], folder: str, opened: contextlib.ExitStack) -> Found:
    """Find a folder in layers, topmost first."""
    parts: list[Part] = []
    for number, layer in enumerate(layers):
        at = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, at)
        covers = False
        for part in filter(None, folder.split("/")):
            try:
                at = os.open(part, FOLDER, dir_fd=at)
            # Lower layers may have it; `covers` may still end the search, where a folder above it is opaque.
            except FileNotFoundError:
                break
            except NotADirectoryError:  # a file, a link or a whiteout: nothing below shows
                # Lower layers don't count any more. What is above has it as a folder, if `parts` has any, and then that
                # is shown.
                return Found(parts, not parts and not _is_whiteout(at, part))
            opened.callback(os.close, at)
            # By /proc, as an O_PATH descriptor refuses fgetxattr (open(2)).
            covers = covers or is_opaque(f"/proc/self/fd/{at}")
        else:
            parts.append(Part(number, at))
        if covers:
            break
    return Found(parts)


def look(folders: Sequence[Part], name: str) -> tuple[int, os.stat_result] | None:
    """What a folder that was found has under a name: the descriptor of the part that shows it, and what it is."""
    for part in folders:
        with contextlib.suppress(FileNotFoundError):
            seen = os.lstat(name, dir_fd=part.fd)
            return None if is_whiteout(seen) else (part.fd, seen)
    return None


def is_whiteout(seen: os.stat_result) -> bool:
    """Whether something in a layer hides what lower layers have under its name."""
    # A character device with number 0/0: overlay's form (Documentation/filesystems/overlayfs.rst). Since Linux 5.8 it
    # needs no capability.
    return stat.S_ISCHR(seen.st_mode) and seen.st_rdev == 0


def make_whiteout(name: str, folder: int) -> None:
    """Hide what lower layers have under a name in a folder of a layer."""
    os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)


def is_opaque(folder: str) -> bool:
    """Whether a folder of a layer hides what lower layers have in it."""
    try:
        # `user.` rather than `trusted.`: servers mount overlay with `userxattr`, as trusted attributes need
        # CAP_SYS_ADMIN in the first user namespace.
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def make_opaque(folder: str | int) -> None:
    """Have a folder of a layer hide what lower layers have in it."""
    os.setxattr(folder, _OPAQUE, b"y")


def _is_whiteout(fd: int, name: str) -> bool:
    try:
        return is_whiteout(os.lstat(name, dir_fd=fd))
    except OSError:
        return True
