"""Removing folders that programs of a slot, or makers of images, have filled. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import os


def remove_tree(top: str) -> None:
    """Remove a folder of any depth: subfolders are first moved to the top, so that no path is too long."""
    number = itertools.count()
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
                        moved = f"{top}/.removing-{next(number)}"
                        os.rename(entry.name, moved, src_dir_fd=fd)
                        pending.append(moved)
                    else:
                        pending.append(f"{top}/{entry.name}")
        except OSError:
            pass
        finally:
            os.close(fd)
        if len(pending) == before:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            pending.pop()
