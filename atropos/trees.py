"""Removing folders that programs of a slot, or makers of images, have filled. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator


def remove_tree(top: str) -> None:
    """Remove a folder of any depth: subfolders are first moved to the top, so that no path is too long.

    What this process can't remove stays, and nothing beside it.
    """
    moved = f"{top}/.removing-{os.urandom(8).hex()}-"  # a name that can't be taken
    number = itertools.count()
    tried: set[str] = set()
    pending = [top]
    while pending:
        folder = pending[-1]
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            pending.pop()
            continue
        before = len(pending)
        try:
            if folder != top:
                os.fchmod(fd, 0o700)
            for name in _clear(fd):
                if folder != top:
                    path = f"{moved}{next(number)}"
                    with contextlib.suppress(OSError):
                        os.rename(name, path, src_dir_fd=fd)
                        pending.append(path)
                elif name not in tried:  # otherwise it could not be removed
                    tried.add(name)
                    pending.append(f"{top}/{name}")
        except OSError:
            pass
        finally:
            os.close(fd)
        if len(pending) == before:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            pending.pop()


def _clear(folder: int) -> Iterator[str]:
    """Remove the files of a folder, and yield the names of its subfolders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=folder)
