"""Which links of a slot a view of it may follow.

A link that the slot's programs made is taken away unless it leads, when the view opens, to something in the folders
shown, or to a file or folder of the view's root where no test writes: what does not exist yet, or lies where things are
put for a moment, may be the test's own expected answer a moment later.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

from atropos.sandbox.host.files.view_layers import MAX_DEPTH, below
from atropos.sandbox.host.files.volumes import Volume
from atropos.sandbox.linux import syscalls
from atropos.sandbox.programs.layer_folders import LayerFolder, LayerFolders

MAX_REMOVED = 10_000
"""Most links that are taken away, with the folders above them. A slot with more: none is followed in its view, which
keeps half of its inodes."""
NO_TARGETS = (
    "/tests",
    "/logs",
    "/solution",
    "/proc",
    "/dev",
    "/sys",
    "/.atropos",
    "/tmp",
    "/var/tmp",
    "/run",
    "/var/run",
)
"""Where no link of a slot may lead in its view, unless the place is in a folder shown."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Links:
    """The links of a slot in folders of a view's next root.

    Args:
        volume: the view's.
        folders: those shown.
    """

    def __init__(self, volume: Volume, folders: Sequence[str]) -> None:
        self._volume = volume
        self._folders = folders
        self._tops: list[tuple[str, int]] = []
        self.followed: set[str] = set()
        """Folders with some that are followed, once the others are removed."""

    def add(self, folder: str, top: int) -> None:
        """Add those of a folder, as a layer has it that no program of the slot changes any more."""
        self._tops.append((folder, top))

    def unfit(self) -> set[str]:
        """Remove the links that may not be followed, once all folders are in the root; and folders with too many."""
        too_many: set[str] = set()
        # Each whiteout, and each folder copied up above it, takes an inode of the view's volume.
        room = min(MAX_REMOVED, os.statvfs(self._volume.data).f_favail // 2)
        root = os.open(self._volume.next_root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder, top in self._tops:
                for place, name, is_link in walk(top):
                    path = "/".join((folder, *place.path_from(0), name))
                    if is_link and self._may_follow(root, path):
                        self.followed.add(folder)
                        continue
                    # The folders above are copied up with the whiteout: at most as many as it is deep.
                    room -= place.depth + 1
                    # A folder too deep to look into may have links of any kind.
                    if room < 0 or not is_link:
                        too_many.add(folder)
                        break
                    _remove(root, path)
        finally:
            os.close(root)
        return too_many

    def _may_follow(self, root: int, path: str) -> bool:
        try:
            fd = syscalls.open_in_root(root, path)
        except OSError:  # it leads to nothing, to itself, or the path is too long
            return False
        try:
            mode = os.fstat(fd).st_mode
            top, end = (os.readlink(f"/proc/self/fd/{each}") for each in (root, fd))
        finally:
            os.close(fd)
        # The kernel's own name of where it ends, after every link on the way.
        end = end.removeprefix(top) or "/"
        if any(_is_in(end, folder) for folder in self._folders):
            return True
        if any(_is_in(end, each) for each in NO_TARGETS):
            return False
        # tests may write into a top-level folder or a home, but not where programs and data of the image lie
        in_home = end.startswith("/home/")
        return stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and end.count("/") > 1 + in_home)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def walk(top: int) -> Iterator[tuple[LayerFolder, str, bool]]:
    """Links below a folder (True), and folders nested deeper than `MAX_DEPTH` (False): where, and the name."""
    waiting = [LayerFolder(0)]
    with LayerFolders([f"/proc/self/fd/{top}/."]) as folders:
        while waiting:
            folder = waiting.pop()
            try:
                fd = folders.open(folder)
            except OSError:  # gone meanwhile, moved, or no folder any more
                continue
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        yield folder, entry.name, True
                    elif entry.is_dir(follow_symlinks=False):
                        if folder.depth >= MAX_DEPTH:
                            yield folder, entry.name, False
                        else:
                            with contextlib.suppress(FileNotFoundError):
                                waiting.append(below(folder, entry))


def _remove(root: int, path: str) -> None:
    """Remove a link, through no other one; what isn't there, or is no link by now, stays."""
    *folders, name = path.strip("/").split("/")
    at = os.dup(root)
    try:
        for part in folders:
            step = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = step
        # Another folder shown may have hidden it, or a removal above may have taken it along.
        if stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode):
            os.unlink(name, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):  # another layer hides it, or a folder above it is gone
        pass
    finally:
        os.close(at)
