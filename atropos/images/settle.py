"""Completes a layer that was unpacked with what it takes from the layers below it. Standard library only.

A folder that the layer has something in, but doesn't describe, is as it is there; whiteouts hide what is there, and
nothing else; a hard link to a file there is one, as containerd has it: the file becomes this layer's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Generator, Sequence

from atropos.images import stack
from atropos.images.folders import Folders, WrongFolder
from atropos.images.unpack import BLOCK, NEEDS, Needs
from atropos.images.untrusted import ImageRefused

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Lower:
    """What the layers below show."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._opened = contextlib.ExitStack()
        self._folder: tuple[str | None, list[stack.Part]] = None, []
        """The folder that was found last: its path, and it in each layer that shows it."""

    def folder(self, path: str) -> list[stack.Part]:
        """A folder in each layer that shows it, topmost first."""
        # One is enough: what a layer needs is sorted as its tar is, folder by folder.
        if self._folder[0] != path:
            self._opened.close()
            self._folder = path, stack.find(self._layers, path, self._opened).parts
        return self._folder[1]

    def look(self, path: str) -> tuple[int, os.stat_result] | None:
        """What is there under a path: the descriptor of its parent, and what it is."""
        where, _, name = path.rpartition("/")
        return stack.look(self.folder(where), name)

    def close(self) -> None:
        """Close all that it has open."""
        self._opened.close()


class Settling:
    """The layer, while it is completed."""

    def __init__(self, folder: str, needs: Needs, lower: Lower, max_bytes: int) -> None:
        self._needs, self._lower, self._max_bytes = needs, lower, max_bytes
        self._folders = Folders(os.open(folder, _READ | os.O_DIRECTORY), self._make_folder)
        self._brought: set[str] = set()
        """Files of lower layers that this layer has by now."""
        self.bytes = 0

    def close(self) -> None:
        """Close all that it has open."""
        self._folders.close()
        self._lower.close()

    def run(self) -> None:
        """Do what the layer needs."""
        for path in self._needs.folders:
            self._describe(path)
        for path in self._needs.links:
            self._link(path)
        for path in self._needs.opaque:
            self._make_opaque(path)
        for path in self._needs.hidden:
            self._hide(path)

    def _describe(self, path: str) -> None:
        if path:
            # A layer leads through no link or file of a lower one (decision 21).
            entry = self._lower.look(path)
            if entry is not None and not stat.S_ISDIR(entry[1].st_mode):
                raise WrongFolder(path, is_missing=False)
        if parts := self._lower.folder(path):
            copy_attributes(parts[0].fd, self._folders.open(path))

    def _make_folder(self, parent: int, name: str, path: str) -> None:
        """Make a folder that lower layers have."""
        # To make an entry changes its folder's mtime, which the tar, or a lower layer, has set.
        with _unchanged(parent):
            os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, _READ | os.O_DIRECTORY, dir_fd=parent)
        copy_attributes(self._lower.folder(path)[0].fd, fd)
        os.close(fd)
        self._count(BLOCK)

    def _covered(self, path: str) -> bool:
        """Whether the layer itself hides all of a folder that a path leads into."""
        parts = path.split("/")[:-1]
        above = {"/".join(parts[:count]) for count in range(len(parts) + 1)}
        return bool(above & self._needs.opaque.keys()) or bool(above & self._needs.hidden.keys())

    def _hide(self, path: str) -> None:
        """Hide what lower layers have at a path, if they show anything there: else the whiteout would be visible."""
        # Overlay lists a whiteout in a folder that no lower layer has: such folders are not merged, but shown as they
        # are.
        if self._lower.look(path) is None or self._covered(path):
            return
        where, _, name = path.rpartition("/")
        with contextlib.suppress(WrongFolder):  # the layer has something else there, which hides it, too
            folder = self._folders.open(where, make=True)
            with _unchanged(folder):
                stack.make_whiteout(name, folder)
            self._count(BLOCK)

    def _make_opaque(self, path: str) -> None:
        if path:
            if self._lower.folder(path) and not self._covered(path):
                with contextlib.suppress(WrongFolder):
                    stack.make_opaque(self._folders.open(path, make=True))
            return
        # Overlay ignores the attribute on the root of a layer, so that each entry is hidden by itself.
        top = self._folders.open("")  # which can't be opaque itself
        for name in sorted(
            {name for part in self._lower.folder("") for name in os.listdir(f"/proc/self/fd/{part.fd}")}
        ):
            if self._lower.look(name) is None:
                continue
            try:
                stack.make_opaque(self._folders.open(name))
            except WrongFolder as error:
                if error.is_missing:
                    stack.make_whiteout(name, top)

    def _link(self, path: str) -> None:
        target = self._needs.links[path]
        where, _, name = path.rpartition("/")
        below, _, last = target.rpartition("/")
        parent = self._folders.open(where)
        # A second link to the same lower file: to the copy, so that both are one file in the container, too.
        if target in self._brought:
            os.unlink(name, dir_fd=parent)
            os.link(last, name, src_dir_fd=self._folders.open(below), dst_dir_fd=parent, follow_symlinks=False)
            return
        entry = self._lower.look(target)
        if entry is None or stat.S_ISDIR(entry[1].st_mode):
            why = os.strerror(errno.ENOENT if entry is None else errno.EISDIR)
            raise ImageRefused(f"{path}: a hard link to {target}: {why}")
        self._copy(entry[0], last, entry[1], parent, name)
        if not self._covered(target) and target not in self._needs.hidden:
            # The copied file takes the place of the lower one, or a write by one name would not be seen by the other.
            with contextlib.suppress(WrongFolder, FileExistsError):  # this layer has something else in its place
                folder = self._folders.open(below, make=True)
                with _unchanged(folder):
                    os.link(name, last, src_dir_fd=parent, dst_dir_fd=folder, follow_symlinks=False)
                self._brought.add(target)

    def _copy(self, source: int, last: str, seen: os.stat_result, parent: int, name: str) -> None:
        """Copy what a lower layer has over the empty file that stands for it."""
        with _unchanged(parent):
            if stat.S_ISLNK(seen.st_mode):
                os.unlink(name, dir_fd=parent)
                os.symlink(os.readlink(last, dir_fd=source), name, dir_fd=parent)
                os.chown(name, seen.st_uid, seen.st_gid, dir_fd=parent, follow_symlinks=False)
                return
        if not stat.S_ISREG(seen.st_mode):
            raise ImageRefused(f"{last}: a hard link to what is neither a file nor a link")
        # Before the copy: it is what would fill the disk.
        self._count(seen.st_size)
        original = os.open(last, _READ, dir_fd=source)
        copy = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        # Within the kernel (Linux 2.6.33 and later write to files); a file of gigabytes takes no memory here.
        while os.sendfile(copy, original, None, 1 << 24):
            pass
        copy_attributes(original, copy)
        os.close(original)
        os.close(copy)

    def _count(self, size: int) -> None:
        self.bytes += -(-size // BLOCK) * BLOCK
        if self.bytes > self._max_bytes:
            raise ImageRefused(
                f"it unpacks to more than the {self._max_bytes >> 20} MiB that the image store has room for"
            )


@contextlib.contextmanager
def _unchanged(folder: int) -> Generator[None]:
    """Within, a folder is changed; its time stays."""
    status = os.stat(folder)
    yield
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_attributes(source: int, target: int) -> None:
    """Give a file or folder of a layer what one of another layer has: owner, mode, attributes and time."""
    status, where = os.stat(source), f"/proc/self/fd/{source}"
    # Before the mode and the attributes: chown(2) clears set-user-ID bits, and file capabilities with them.
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(where):
        # Overlay's own marks (userxattr) say what that layer hides, not what the file is.
        if not name.startswith("user.overlay."):
            os.setxattr(target, name, os.getxattr(where, name))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def settle(place: str, max_bytes: int, lower: Sequence[str]) -> dict[str, object]:
    """Complete a layer.

    Args:
        place: its folder, as `unpack` leaves it.
        max_bytes: most that it may take there beyond that.
        lower: the files of the layers below, topmost first.

    Returns:
        `bytes` that were added.
    """
    with open(f"{place}/{NEEDS}", encoding="ascii") as file:
        needs = Needs(**json.load(file))
    with contextlib.closing(Settling(f"{place}/files", needs, Lower(lower), max_bytes)) as settling:
        settling.run()
        return {"bytes": settling.bytes}
