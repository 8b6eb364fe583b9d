"""Lays layers together into one, their files as hard links. A program of its own, without site-packages.

    flatten PLACE LAYER…

PLACE gets `files/`; the layers are those of one stack, topmost first and down to the lowest. The last line on stdout is
JSON: bytes of the folders. For exit codes see `untrusted.program`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Sequence

from atropos.images.settle import copy_attributes
from atropos.images.stack import is_opaque, is_whiteout
from atropos.images.unpack import BLOCK
from atropos.images.untrusted import program
from atropos.trees import remove_tree


def flatten(target: str, layers: Sequence[str]) -> int:
    """Lay layers into a new folder; bytes of its folders. No folder in it is ever a link."""
    size = 0
    # From the lowest up, so that what is above replaces what is there.
    for layer in reversed(layers):
        for where, folders, files, fd in os.fwalk(layer):
            at = f"{target}{where.removeprefix(layer)}"
            # What lower layers put there is hidden by an opaque folder, and by a folder in place of a file.
            if is_opaque(f"/proc/self/fd/{fd}") or not _is_folder(at):
                _remove(at)
                os.mkdir(at, 0o700)
                size += BLOCK
            # os.fwalk lists links to folders among the folders.
            for name in (*files, *(each for each in folders if _is_link(fd, each))):
                _remove(f"{at}/{name}")
                # Nothing lies below the result, so a whiteout has nothing to hide in it.
                if not is_whiteout(os.lstat(name, dir_fd=fd)):
                    os.link(name, f"{at}/{name}", src_dir_fd=fd, follow_symlinks=False)
        for where, _, _, fd in os.fwalk(layer):  # once nothing changes their times any more
            into = os.open(f"{target}{where.removeprefix(layer)}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            copy_attributes(fd, into)
            os.close(into)
    return size


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_link(folder: int, name: str) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)


def _remove(path: str) -> None:
    if _is_folder(path):
        remove_tree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def main() -> int:
    """The program."""
    place, *layers = sys.argv[1:]
    return program(lambda: {"bytes": flatten(f"{place}/files", layers)})
