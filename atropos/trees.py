"""Removing folders that programs of a slot, or makers of images, have filled. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import os


def remove_tree(top: str) -> None:
    """Remove a folder of any depth: subfolders are first moved to the top, so that no path is too long.

    What this process may not remove stays.
    """
    moved = f"{top}/.removing-{os.urandom(8).hex()}-"  # a name that nobody can have taken already
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
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=fd)
                    elif folder != top:
                        path = f"{moved}{next(number)}"
                        os.rename(entry.name, path, src_dir_fd=fd)
                        pending.append(path)
                    elif entry.name not in tried:  # else it could not be removed
                        tried.add(entry.name)
                        pending.append(f"{top}/{entry.name}")
        except OSError:
            pass
        finally:
            os.close(fd)
        if len(pending) == before:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            pending.pop()
