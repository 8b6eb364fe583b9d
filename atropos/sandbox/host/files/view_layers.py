"""Folders in a slot's layers, which its programs may change at any time: copied and hidden, following no link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from atropos.errors import NotSupported
from atropos.images import stack
from atropos.sandbox.programs.layer_folders import LayerFolder, LayerFolders

MAX_DEPTH = 200
"""Folders nested deeper are hidden."""


def below(folder: LayerFolder, entry: os.DirEntry[str]) -> LayerFolder:
    """A folder that was found in another one."""
    # Device and inode are compared once the folder is opened: by then the slot may have put another in its place.
    status = entry.stat(follow_symlinks=False)
    return folder.below(entry.name, (status.st_dev, status.st_ino))


def copy_folders(source: int, copy: int, most: int, left_out: frozenset[str] = frozenset()) -> int:
    """Copy a folder and its subfolders, with files as hard links. Returns how many; above `most`, the copy is partial.

    The slot's programs may replace any part of the source meanwhile, but nothing in the copy.
    """
    count, waiting = 0, [(LayerFolder(0), LayerFolder(0))]
    # Paths are only put together in folders that have one to leave out.
    above = {os.path.dirname(path) for path in left_out}
    with LayerFolders([f"/proc/self/fd/{source}/."]) as theirs, LayerFolders([f"/proc/self/fd/{copy}/."]) as ours:
        while waiting and count <= most:
            # A list and no recursion: the depth is the slot's to choose.
            original, copied = waiting.pop()
            try:
                fd = theirs.open(original)
            except OSError:  # gone meanwhile, moved, or no folder any more
                continue
            into = ours.open(copied)
            here = "/".join(original.path_from(0)) if above else ""
            with os.scandir(fd) as entries:
                for entry in entries:
                    if here in above and f"{here}/{entry.name}".lstrip("/") in left_out:
                        continue
                    count += 1
                    if count > most:
                        break
                    if not entry.is_dir(follow_symlinks=False):
                        _copy_file(fd, into, entry.name)
                    elif original.depth < MAX_DEPTH:
                        with contextlib.suppress(FileExistsError, FileNotFoundError):  # seen twice, or gone
                            # Closed until its own attributes are copied, once it is full.
                            os.mkdir(entry.name, 0o700, dir_fd=into)
                            waiting.append((below(original, entry), copied.below(entry.name)))
            copy_attributes(fd, into, whole=True)
    return count


def _copy_file(source: int, target: int, name: str) -> None:
    try:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        # gone, or now a folder


def copy_attributes(source: int, target: str | int, *, whole: bool = False) -> None:
    """Give a folder the owner and mode of another one; `whole`: its attributes and times as well."""
    status = os.stat(source)
    # The owner first: chown clears set-user-id and set-group-id bits, which chmod then sets (chown(2)).
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    if whole:
        with contextlib.suppress(OSError):
            for name in os.listxattr(source):
                os.setxattr(target, name, os.getxattr(source, name))
        # Last, since every change above sets the times.
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def hide(top: int, upper: str, path: str) -> None:
    """Cover a path with a whiteout, so that the view has nothing there; folders above it are as in `top`."""
    *folders, name = path.split("/")
    fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(folders, 1):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=fd)
                with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                    at = stack.find([f"/proc/self/fd/{top}"], "/".join(folders[:depth]), opened).parts
                    if at:
                        copy_attributes(at[0].fd, f"/proc/self/fd/{fd}/{part}")
            # Name by name, each opened without following a link: a whole path may lead anywhere.
            step = os.open(part, stack.FOLDER, dir_fd=fd)
            os.close(fd)
            fd = step
        stack.make_whiteout(name, fd)
    finally:
        os.close(fd)


def make_mount_point(root: str, folder: str) -> None:
    """Make a folder to mount on in a view's root.

    Raises:
        NotSupported: it would lie behind a link or a file.
    """
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folder.strip("/").split("/"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
                os.chown(part, 0, 0, dir_fd=at, follow_symlinks=False)  # the server's own user is none of the slot's
            step = os.open(part, stack.FOLDER, dir_fd=at)
            os.close(at)
            at = step
    except OSError as error:
        raise NotSupported(f"view: {folder} has no place in its root ({error.strerror})") from error
    finally:
        os.close(at)
