"""The folders of a snapshot's layers: named without whole paths, and opened however deep they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, eq=False)
class LayerFolder:
    """A folder of a layer. Linked upwards: whole paths of deep trees take memory that grows with the square of depth.

    Attributes:
        depth: levels below the layer's own folder.
        number: of the archive's folders, counted from 0; for packing.
        place: device and inode where it was found; for packing, since a slot's programs may move folders meanwhile.
    """

    layer: int
    name: str = ""
    above: LayerFolder | None = None
    depth: int = 0
    number: int = 0
    place: tuple[int, int] | None = None

    def below(self, name: str, place: tuple[int, int] | None = None) -> LayerFolder:
        """A folder in this one."""
        return LayerFolder(self.layer, name, self, self.depth + 1, place=place)

    def path_from(self, depth: int) -> list[str]:
        """The names that lead here from the folder above that has this depth."""
        names: list[str] = []
        at: LayerFolder | None = self
        while at is not None and at.depth > depth:
            names.append(at.name)
            at = at.above
        return names[::-1]


class LayerFolders:
    """Opens folders of layers, step by step from the one opened before: however deep, and through no link."""

    def __init__(self, layers: list[str]) -> None:
        self._tops = [os.open(layer, os.O_RDONLY | os.O_DIRECTORY | NOFOLLOW) for layer in layers]
        self._last: LayerFolder | None = None
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (*self._tops, *([] if self._last is None else [self._fd])):
            os.close(fd)

    def open(self, wanted: LayerFolder) -> int:
        """A descriptor that stays valid until the next call.

        Raises:
            OSError: it can't be opened, or was moved.
        """
        if self._last is wanted:
            return self._fd
        shared = 0
        if self._last is not None and self._last.layer == wanted.layer:
            shared = _shared_depth(self._last, wanted)
        # Fewer steps up than down from the top.
        if self._last is not None and self._last.depth - shared < shared:
            # Nearer from where we are. Of a folder that is moved meanwhile, `..` may lead out of the layer.
            fd, steps = os.dup(self._fd), [*[".."] * (self._last.depth - shared), *wanted.path_from(shared)]
        else:
            fd, steps = os.dup(self._tops[wanted.layer]), wanted.path_from(0)
        try:
            for step in steps:
                below = os.open(step, os.O_RDONLY | os.O_DIRECTORY | NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
            status = os.fstat(fd)
            # The names led elsewhere: a program of the slot has moved a folder on the way.
            if wanted.place not in {None, (status.st_dev, status.st_ino)}:
                raise OSError(f"a folder was moved while it was read: {wanted.name}")
        except OSError:
            os.close(fd)
            raise
        if self._last is not None:
            os.close(self._fd)
        self._last, self._fd = wanted, fd
        return fd


def _shared_depth(a: LayerFolder, b: LayerFolder) -> int:
    """Depth of the deepest folder that both are in; 0: the layer's own, or none."""
    while a is not b and a.above is not None and b.above is not None:
        deeper = max(a.depth, b.depth)
        a, b = (a.above if a.depth == deeper else a), (b.above if b.depth == deeper else b)
    return min(a.depth, b.depth)
