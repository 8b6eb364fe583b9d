"""What a view shows of another slot: its folders, as they are, under a root that the slot's programs never wrote.

Each folder is an overlay of the same layers that the slot's root has, with an upper folder of the view's own on
top: the slot's later changes show through, and nothing that the view writes is seen by the slot.

A link in such a folder resolves in the view's root, where tests and expected answers lie. So where no link is needed, the
mount follows none. Elsewhere, a link that the slot's programs made is hidden when it could lead to a place that only the
view has. They can make another link at any time: so the view then gets a copy of the topmost layer, made of hard links.
What is written into its files shows through; files made or renamed later don't.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atropos.errors import NotSupported
from atropos.sandbox.host.files.volumes import GATE, NEXT, Volume
from atropos.sandbox.linux import syscalls
from atropos.sandbox.programs.layer_folders import Folders, LayerFolder
from atropos.trees import remove_tree

MAX_FOLDERS = 64
"""Top-level folders shown in addition to the requested ones."""
MAX_DEPTH = 200
"""Folders nested deeper are hidden."""
MAX_HIDDEN = 10_000
"""Most names that are made to hide links. A slot with more: none is followed in its view, which keeps half of its inodes."""
MAX_COPIED = 50_000
"""Most files and folders of the copied layer; above it no link is followed, since a copy takes kernel memory."""
SYSTEM = frozenset(
    [
        *("bin", "boot", "dev", "etc", "home", "lost+found", "media", "opt", "proc", "root", "run", "sbin", "sys"),
        *("tmp", "usr", "var", "tests", "logs", "solution", "node_modules"),
    ]
)
"""Top-level folders that a view never shows unless requested, like all whose names start with `lib` or `.`.

Node's modules, and hidden folders as `/.git` and `/.cargo`, act on tools that run in any folder below, `/tests` too.
"""
HIDDEN = ("/tests", "/logs", "/solution", "/proc", "/dev", "/sys", "/.atropos")
"""Where no link of a slot may lead in its view."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class View:
    """Folders of a slot for a view to mount.

    Attributes:
        layers: the folders that the slot's root is stacked of, topmost first.
        written: how many of them, from the top, leases wrote; the others are images'.
        folders: absolute paths that are shown in addition to top-level folders that are not in `SYSTEM`.
        empty: an empty folder.
        copies: a folder on the topmost layer's file system, for copies of it.
    """

    layers: tuple[str, ...]
    written: int
    folders: tuple[str, ...]
    empty: str
    copies: str

    def mount(self, volume: Volume) -> None:
        """Mount the folders in the next root of a view.

        Raises:
            NotSupported: a folder can't be in the view's root.
            OSError: a mount failed.
        """
        named = {os.path.normpath(f"/{folder.lstrip('/')}") for folder in self.folders}
        wanted = sorted(named)
        wanted += [folder for folder in self._extra_folders() if folder not in named]
        for number, folder in enumerate(wanted):
            if folder == "/" or folder.split("/")[1] in {"proc", "dev", "sys", ".atropos"}:
                raise NotSupported(f"view: {folder} can't be shown on another root")
            try:
                _make_mount_point(volume.next_root, folder)
            except NotSupported:
                if folder in named:
                    raise
                continue  # a program put a folder where the root has a file or a link
            self._mount_one(volume, folder, f"{volume.data}/view{number}")

    def _extra_folders(self) -> list[str]:
        """The slot's top-level folders that are not in `SYSTEM`."""
        names = sorted({name for layer in self.layers for name in os.listdir(layer)})
        chosen = [f"/{name}" for name in names if name not in SYSTEM and not name.startswith(("lib", "."))]
        found: list[str] = []
        for folder in chosen:
            with contextlib.ExitStack() as opened:
                if len(found) < MAX_FOLDERS and _open_in_layers(self.layers, folder, opened):
                    found.append(folder)
        return found

    def _mount_one(self, volume: Volume, folder: str, upper: str) -> None:
        for path in (upper, f"{upper}-wk"):
            os.mkdir(path, 0o755)
        os.chown(upper, 0, 0)
        with contextlib.ExitStack() as opened:
            parts = _open_in_layers(self.layers, folder, opened)
            if parts:
                _copy_attributes(parts[0].fd, upper)
            layers, follows = self._vetted(parts, folder, upper, opened)
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (0 if follows else syscalls.MS_NOSYMFOLLOW)
            lower = [f"/proc/self/fd/{fd}" for fd in layers] or [self.empty]
            volume.stack(f"{GATE}/{NEXT}{folder}", lower, flags, upper)

    def _vetted(
        self, parts: Sequence[_Part], folder: str, upper: str, opened: contextlib.ExitStack
    ) -> tuple[list[int], bool]:
        """The layers of a folder as a view may see them, topmost first, and whether links in them may be followed."""
        follows = False
        layers = [part.fd for part in parts]
        room = min(MAX_HIDDEN, os.statvfs(upper).f_favail // 2)
        for number, part in enumerate(parts):
            if part.layer >= self.written:  # an image's own links
                follows = follows or next(_walk(part.fd), None) is not None
                continue
            for place, name, target in _walk(part.fd):
                path = "/".join((*place.path_from(0), name))
                if target is not None and not _may_reach_hidden(f"{folder}/{path}", target):
                    follows = True
                    continue
                room -= place.depth + 1
                if room < 0:
                    return layers, False
                if not any(_shadows(above.fd, path) for above in parts[:number]):
                    # it is hidden already where a program moves it, and it is seen twice
                    with contextlib.suppress(FileExistsError, NotADirectoryError):
                        _hide(part.fd, upper, path)
        if follows and parts[0].layer == 0:
            copy = _copied(layers[0], self.copies, folder, opened)
            return (layers, False) if copy is None else ([copy, *layers[1:]], True)
        return layers, follows


class _Part(NamedTuple):
    """A folder in one layer: the layer's number from the top, and a descriptor."""

    layer: int
    fd: int


def _open_in_layers(layers: Sequence[str], folder: str, opened: contextlib.ExitStack) -> list[_Part]:
    """A folder in each layer that has it, topmost first; empty: the slot has no such folder.

    No link is followed: the slot's programs may replace any part while this runs.
    """
    found: list[_Part] = []
    for number, layer in enumerate(layers):
        at = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, at)
        covers = False
        for part in folder.strip("/").split("/"):
            try:
                at = os.open(part, _FOLDER, dir_fd=at)
            except FileNotFoundError:
                break
            except NotADirectoryError:  # a file, a link or a whiteout: nothing below shows
                return found
            opened.callback(os.close, at)
            covers = covers or _opaque(at)
        else:
            found.append(_Part(number, at))
        if covers:
            break
    return found


def _opaque(fd: int) -> bool:
    try:
        return os.getxattr(f"/proc/self/fd/{fd}", "user.overlay.opaque") == b"y"
    except OSError:
        return False


def _walk(top: int) -> Iterator[tuple[LayerFolder, str, str | None]]:
    """Links below a folder: where, name and target; folders nested deeper than `MAX_DEPTH`, with None."""
    waiting = [LayerFolder(0)]
    with _folders(top) as folders:
        while waiting:
            folder = waiting.pop()
            try:
                fd = folders.open(folder)
            except OSError:  # gone meanwhile, moved, or no folder any more
                continue
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        with contextlib.suppress(OSError):
                            yield folder, entry.name, os.readlink(entry.name, dir_fd=fd)
                    elif entry.is_dir(follow_symlinks=False):
                        if folder.depth >= MAX_DEPTH:
                            yield folder, entry.name, None
                        else:
                            with contextlib.suppress(FileNotFoundError):
                                waiting.append(_below(folder, entry))


def _folders(top: int) -> Folders:
    return Folders([f"/proc/self/fd/{top}/."])


def _below(folder: LayerFolder, entry: os.DirEntry[str]) -> LayerFolder:
    found = entry.stat(follow_symlinks=False)
    return folder.below(entry.name, (found.st_dev, found.st_ino))


def _open_below(root: int, path: str) -> int:
    at = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    for part in filter(None, path.split("/")):
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def _may_reach_hidden(path: str, target: str) -> bool:
    """Whether a link at an absolute path could lead into `HIDDEN`, alone or together with another link."""
    at = "/" if target.startswith("/") else os.path.dirname(path)
    parts = [part for part in target.split("/") if part not in {"", "."}]
    while parts and parts[0] == "..":  # exact: the link's own folder is reached through no link
        at, parts = os.path.dirname(at), parts[1:]
    if ".." in parts:  # from there it may go anywhere
        return True
    end = "/" + "/".join(filter(None, [at.strip("/"), *parts]))
    return end == "/" or any(end == each or end.startswith(f"{each}/") for each in HIDDEN)


def _shadows(top: int, path: str) -> bool:
    """Whether a layer hides what lower layers have at a path."""
    folder, name = os.path.split(path)
    try:
        fd = _open_below(top, folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        os.lstat(name, dir_fd=fd)
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
    return True


def _copied(source: int, copies: str, folder: str, opened: contextlib.ExitStack) -> int | None:
    """A copy of a folder of the topmost layer, made of hard links, without links that may reach `HIDDEN`.

    The slot's programs may replace any part of the source meanwhile, but nothing in the copy: links are checked there.

    Returns:
        A descriptor; None: there is no room for it, half of what the slot's own programs have left.
    """
    most = min(MAX_COPIED, os.statvfs(copies).f_favail // 2)
    with contextlib.ExitStack() as undo:
        try:
            path = tempfile.mkdtemp(prefix="seen", dir=copies)
            undo.callback(remove_tree, path)
            copy = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, copy)
            if not _copy_folders(source, copy, folder, most):
                return None
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return None
            raise
        undo.pop_all()
        return copy


def _copy_folders(source: int, copy: int, folder: str, most: int) -> bool:
    """Copy a folder with its subfolders; False: they have more names than `most`."""
    count, waiting = 0, [(LayerFolder(0), LayerFolder(0))]
    with _folders(source) as theirs, _folders(copy) as ours:
        while waiting and count <= most:
            found, made = waiting.pop()
            try:
                fd = theirs.open(found)
            except OSError:  # gone meanwhile, moved, or no folder any more
                continue
            into = ours.open(made)
            path = "/".join((folder, *found.path_from(0)))
            with os.scandir(fd) as entries:
                for entry in entries:
                    count += 1
                    if count > most:
                        break
                    if not entry.is_dir(follow_symlinks=False):
                        _copy_file(fd, into, entry.name, f"{path}/{entry.name}")
                    elif found.depth < MAX_DEPTH:
                        with contextlib.suppress(FileExistsError, FileNotFoundError):  # seen twice, or gone
                            os.mkdir(entry.name, 0o700, dir_fd=into)
                            waiting.append((_below(found, entry), made.below(entry.name)))
            _copy_attributes(fd, into, whole=True)
    return count <= most


def _copy_file(source: int, target: int, name: str, path: str) -> None:
    try:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return  # gone meanwhile, or a folder by now
    if stat.S_ISLNK(os.lstat(name, dir_fd=target).st_mode) and _may_reach_hidden(
        path, os.readlink(name, dir_fd=target)
    ):
        os.unlink(name, dir_fd=target)
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)  # overlayfs's whiteout


def _copy_attributes(source: int, target: str | int, *, whole: bool = False) -> None:
    """Give a folder the owner and mode of another one; `whole`: its attributes and times as well."""
    found = os.stat(source)
    os.chown(target, found.st_uid, found.st_gid)
    os.chmod(target, stat.S_IMODE(found.st_mode))
    if whole:
        with contextlib.suppress(OSError):
            for name in os.listxattr(source):
                os.setxattr(target, name, os.getxattr(source, name))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _hide(top: int, upper: str, path: str) -> None:
    """Cover a path with a whiteout, so that the view has nothing there."""
    *folders, name = path.split("/")
    made = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(folders, 1):
            try:
                os.mkdir(part, 0o700, dir_fd=made)
            except FileExistsError:
                source = None
            else:
                source = "/".join(folders[:depth])
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=made)
            os.close(made)
            made = below
            if source is not None:
                with contextlib.suppress(OSError):
                    fd = _open_below(top, source)
                    try:
                        _copy_attributes(fd, made)
                    finally:
                        os.close(fd)
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=made)  # overlayfs's whiteout
    finally:
        os.close(made)


def _make_mount_point(root: str, folder: str) -> None:
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
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
    except OSError as error:
        raise NotSupported(f"view: {folder} has no place in its root ({error.strerror})") from error
    finally:
        os.close(at)
