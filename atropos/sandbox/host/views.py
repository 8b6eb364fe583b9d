"""What a view shows of another slot: its folders, as they are, under a root that the slot's programs never wrote.

Each folder is an overlay of the same layers that the slot itself stands on, with an upper folder of the view's own on
top: the slot's later changes show through, and nothing that the view writes is seen by the slot.

A link in such a folder resolves in the view's root, where tests and expected answers lie. So where no link is needed, the
mount follows none. Where there are some, those of the topmost layer (all that the slot's programs wrote) that lead, or
could lead, to a place that only the view has are hidden.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atropos.errors import NotSupported
from atropos.sandbox.host.volumes import Volume
from atropos.sandbox.linux import syscalls

MAX_FOLDERS = 64
"""Top-level folders shown besides those that were named."""
MAX_DEPTH = 200
"""Folders nested deeper are hidden."""
SYSTEM = frozenset(
    [
        "bin",
        "boot",
        "dev",
        "etc",
        "home",
        "lost+found",
        "media",
        "opt",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "var",
        "tests",
        "logs",
        "solution",
        ".atropos",
    ]
)
"""Top-level folders that a view has of its own; so are all whose names start with `lib`."""
HIDDEN = ("/tests", "/logs", "/solution", "/proc", "/dev", "/sys", "/.atropos")
"""Where no link of a slot may lead in its view."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class View:
    """Folders of a slot for a view to mount.

    Attributes:
        layers: the folders that the slot's root is stacked of, topmost first.
        folders: absolute paths that are shown besides the top-level folders that no system has.
        empty: an empty folder.
    """

    layers: tuple[str, ...]
    folders: tuple[str, ...]
    empty: str

    def mount(self, volume: Volume) -> None:
        """Mount the folders in the root that waits in a view's gate.

        Raises:
            NotSupported: the view's root has no such place.
            OSError: a mount failed.
        """
        named = {os.path.normpath(f"/{folder.lstrip('/')}") for folder in self.folders}
        wanted = sorted(named)
        wanted += [folder for folder in self._others() if not any(each == folder for each in named)]
        for number, folder in enumerate(wanted):
            if folder == "/" or folder.split("/")[1] in {"proc", "dev", "sys", ".atropos"}:
                raise NotSupported(f"view: {folder} can't be shown on another root")
            self._mount_one(volume, folder, f"{volume.data}/view{number}")

    def _others(self) -> list[str]:
        """The slot's top-level folders that are no system's."""
        names = sorted({name for layer in self.layers for name in os.listdir(layer)})
        chosen = [f"/{name}" for name in names if name not in SYSTEM and not name.startswith("lib")]
        found: list[str] = []
        for folder in chosen:
            with contextlib.ExitStack() as opened:
                if len(found) < MAX_FOLDERS and _opened(self.layers, folder, opened):
                    found.append(folder)
        return found

    def _mount_one(self, volume: Volume, folder: str, upper: str) -> None:
        work = f"{upper}-wk"
        for path in (upper, work):
            os.mkdir(path, 0o755)
        with contextlib.ExitStack() as opened:
            layers = _opened(self.layers, folder, opened)
            followed, hidden = _links(layers, folder)
            if layers:
                _like(layers[0], upper)
            for path in hidden:
                _hide(layers[0], upper, path)
            _make_place(volume.next_root, folder)
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (0 if followed else syscalls.MS_NOSYMFOLLOW)
            lower = [f"/proc/self/fd/{fd}" for fd in layers] or [self.empty]
            volume.stack(os.path.relpath(volume.next_root, volume.folder) + folder, lower, flags, upper, work)


def _opened(layers: Sequence[str], folder: str, opened: contextlib.ExitStack) -> list[int]:
    """Where a folder lies in each layer, topmost first, as descriptors; empty: the slot has no folder there.

    No link is followed: the slot's programs may replace any part while this runs.
    """
    found: list[int] = []
    for layer in layers:
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
            found.append(at)
        if covers:
            break
    return found


def _opaque(fd: int) -> bool:
    try:
        return os.getxattr(f"/proc/self/fd/{fd}", "user.overlay.opaque") == b"y"
    except OSError:
        return False


def _links(layers: Sequence[int], folder: str) -> tuple[bool, list[str]]:
    """Whether links have to be followed in a folder, and what of the topmost layer must be hidden."""
    followed, hidden = False, list[str]()
    for number, layer in enumerate(layers):
        for path, target in _walk(layer):
            if number == 0 and (target is None or _leads_astray(f"{folder}/{path}", target)):
                hidden.append(path)
            elif target is not None:
                followed = True
                if number:
                    break
    return followed, hidden


def _walk(top: int) -> Iterator[tuple[str, str | None]]:
    """Links below a folder with their targets; a folder that is nested too deep, without one."""
    with contextlib.ExitStack() as opened:
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top)
        opened.callback(os.close, root)
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                fd = _open_below(root, folder)
            except OSError:  # gone meanwhile, or no folder any more
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        path = f"{folder}/{entry.name}".lstrip("/")
                        if entry.is_symlink():
                            with contextlib.suppress(OSError):
                                yield path, os.readlink(entry.name, dir_fd=fd)
                        elif entry.is_dir(follow_symlinks=False):
                            if path.count("/") >= MAX_DEPTH:
                                yield path, None
                            else:
                                waiting.append(path)
            finally:
                os.close(fd)


def _open_below(root: int, path: str) -> int:
    at = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    for part in filter(None, path.split("/")):
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def _leads_astray(path: str, target: str) -> bool:
    """Whether a link at an absolute path could lead to what only a view has, by itself or with another one's help."""
    at = "/" if target.startswith("/") else os.path.dirname(path)
    parts = [part for part in target.split("/") if part not in {"", "."}]
    while parts and parts[0] == "..":  # exact: the link's own folder is reached through no link
        at, parts = os.path.dirname(at), parts[1:]
    if ".." in parts:  # from there it may go anywhere
        return True
    end = "/" + "/".join(filter(None, [at.strip("/"), *parts]))
    return end == "/" or any(end == each or end.startswith(f"{each}/") for each in HIDDEN)


def _like(source: int, target: str) -> None:
    """Give a folder the owner and mode of another one."""
    found = os.stat(source)
    os.chown(target, found.st_uid, found.st_gid)
    os.chmod(target, stat.S_IMODE(found.st_mode))


def _hide(top: int, upper: str, path: str) -> None:
    """Cover a path of the topmost layer, so that nothing is there in the view."""
    folder, name = os.path.split(path)
    at, made = "", upper
    for part in filter(None, folder.split("/")):
        at, made = f"{at}/{part}".lstrip("/"), f"{made}/{part}"
        if not os.path.isdir(made):
            os.mkdir(made, 0o700)
            with contextlib.suppress(OSError):
                fd = _open_below(top, at)
                try:
                    _like(fd, made)
                finally:
                    os.close(fd)
    os.mknod(f"{made}/{name}", stat.S_IFCHR, 0)  # overlayfs's whiteout


def _make_place(root: str, folder: str) -> None:
    """Make a folder to mount on in a view's root.

    Raises:
        NotSupported: it would lie behind a link or a file.
    """
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folder.strip("/").split("/"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
    except OSError as error:
        raise NotSupported(f"view: {folder} has no place in its root ({error.strerror})") from error
    finally:
        os.close(at)
