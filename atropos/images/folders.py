"""Folders below one, opened from it down without following a link. Standard library only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from atropos.images.untrusted import ImageRefused

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class WrongFolder(ImageRefused):
    """A path leads to no folder: there `is_missing` one, or it leads through a link or a file."""

    def __init__(self, path: str, *, is_missing: bool) -> None:
        super().__init__(f"{path}: {'no such folder in the image' if is_missing else 'leads through a link or a file'}")
        self.is_missing = is_missing


class Folders:
    """Opens folders by their paths, and keeps those that were needed last.

    Args:
        top: descriptor of the topmost one, whose path is empty.
        make: called with parent, name and path to make a missing folder.
    """

    # Members of a tar come folder by folder, so that a few are enough; each costs a descriptor.
    MOST_OPEN = 64

    def __init__(self, top: int, make: Callable[[int, str, str], None]) -> None:
        self._top = top
        self._make = make
        self._open_folders: dict[str, int] = {}

    def open(self, path: str, *, make: bool = False) -> int:
        """A folder's descriptor, which belongs to this object; it stays open while the next one is opened.

        Raises:
            WrongFolder: there is none, or something else.
        """
        if not path:
            return self._top
        # Popped and put back at the end: a dict keeps the order in which keys were added, which makes this an LRU.
        fd = self._open_folders.pop(path, None)
        if fd is None:
            fd = self._opened(path, make=make)
        self._open_folders[path] = fd  # the one needed last is at the end
        if len(self._open_folders) > self.MOST_OPEN:
            os.close(self._open_folders.pop(next(iter(self._open_folders))))
        return fd

    def _opened(self, path: str, *, make: bool) -> int:
        above, parts = path, list[str]()
        # From the nearest folder that is open, not from the top: paths of `node_modules` are ten folders deep.
        while above and above not in self._open_folders:
            above, _, part = above.rpartition("/")
            parts.append(part)
        start = fd = self._open_folders[above] if above else self._top
        at = above
        for part in reversed(parts):
            at = f"{at}/{part}" if at else part
            try:
                below = self._step(fd, part, at, make=make)
            # Those between are closed at once; only the one that was asked for is kept.
            finally:
                if fd != start:
                    os.close(fd)
            fd = below
        return fd

    def _step(self, fd: int, name: str, path: str, *, make: bool) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=fd)
        except OSError as error:
            # With O_NOFOLLOW and O_DIRECTORY a link fails with ELOOP or ENOTDIR, by the kernel's version (open(2)).
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise WrongFolder(path, is_missing=False) from None
            if error.errno != errno.ENOENT:
                raise
        if not make:
            raise WrongFolder(path, is_missing=True)
        self._make(fd, name, path)
        return os.open(name, _FOLDER, dir_fd=fd)

    def close(self) -> None:
        """Close them all, the topmost one too."""
        for fd in (*self._open_folders.values(), self._top):
            os.close(fd)

    def forget(self, path: str) -> None:
        """A folder is about to be removed."""
        # Those below it, too. A descriptor of a removed folder would still work, and what is made there be lost.
        for each in [each for each in self._open_folders if f"{each}/".startswith(f"{path}/")]:
            os.close(self._open_folders.pop(each))
