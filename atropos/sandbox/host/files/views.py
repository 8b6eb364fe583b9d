"""What a view shows of another slot: its folders, as they are, under a root that the slot's programs never wrote.

While programs of the slot run, each folder is an overlay of the same layers that the slot's root has, with an upper
folder of the view's own on top: later changes show through, and nothing that the view writes is seen by the slot. A
slot without programs changes no more: then its folders become a layer of the view's root, made of hard links, so that
renames and links between a folder and the rest of the root work as they do in the slot.

A link in such a folder resolves in the view's root, where tests and expected answers will lie: `view_links` has the
rules. Where no link is needed, the mount follows none. Elsewhere the slot's programs can make another link at any time:
so the view then gets a copy of the topmost layer, made of hard links. What is written into its files shows through;
files made or renamed later don't.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from atropos.errors import NotSupported
from atropos.images import stack
from atropos.sandbox.host.files import view_layers, view_links
from atropos.sandbox.host.files.volumes import GATE, NEXT, Volume
from atropos.sandbox.linux import syscalls
from atropos.trees import remove_tree
from atropos.wire import VIEW_HOME, ViewFolders, ViewInfo

MAX_FOLDERS = 64
"""Top-level folders shown in addition to the requested ones."""
MAX_COPIED = 50_000
"""Most files and folders of a copy; above it no link is followed, since a copy takes kernel memory."""
SYSTEM = frozenset(
    [
        *("bin", "boot", "dev", "etc", "home", "lost+found", "media", "opt", "proc", "root", "run", "sbin", "sys"),
        *("tmp", "usr", "var", "tests", "logs", "solution", "node_modules"),
    ]
)
"""Top-level folders that a view never shows unless requested, like all whose names start with `lib` or `.`.

Node's modules, and hidden folders as `/.git` and `/.cargo`, act on tools that run in any folder below, `/tests` too.
"""
PROGRAM_MARKS = ("pyvenv.cfg", "conda-meta")
"""What a folder of programs has in it, if it isn't called `node_modules`."""
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV


@dataclass(frozen=True)
class View:
    """Folders of a slot for a view to show.

    Attributes:
        layers: the folders that the slot's root is stacked of, topmost first.
        written: how many of them, from the top, leases wrote; the others are images'.
        below: the folders that the view's own root is stacked of.
        order: what it is to show.
        is_quiet: whether no program runs in the slot; none begins any more, since the lease's calls run in the view.
        empty: an empty folder.
        copies: a folder on the topmost layer's file system, for copies of it.
        followed: folders with links of the slot's that are followed, once it is mounted.
    """

    layers: tuple[str, ...]
    written: int
    below: tuple[str, ...]
    order: ViewFolders
    is_quiet: Callable[[], bool]
    empty: str
    copies: str
    followed: set[str] = field(default_factory=set[str])

    @cached_property
    def quiet(self) -> bool:
        """Whether no program ran in the slot when the view was made."""
        return self.is_quiet()

    def info(self) -> ViewInfo:
        """What it shows."""
        shown = self.shown
        inside = [path for path in self.programs if any(path.startswith(f"{folder}/") for folder in shown)]
        return ViewInfo(folders=shown, programs=tuple(inside), links=bool(self.followed))

    @cached_property
    def programs(self) -> tuple[str, ...]:
        """Those folders of programs that the view's root has."""
        return tuple(path for path in self.order.programs if self._has_programs(path))

    def _has_programs(self, path: str) -> bool:
        with contextlib.ExitStack() as opened:
            parts = stack.find(self.below, path, opened).parts
            return bool(parts) and (
                os.path.basename(path) == "node_modules"
                or any(os.path.lexists(f"/proc/self/fd/{part.fd}/{mark}") for part in parts for mark in PROGRAM_MARKS)
            )

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The folders to show, none of them in another one.

        Raises:
            NotSupported: a folder can't be in the view's root.
        """
        named = {os.path.normpath(f"/{folder.lstrip('/')}") for folder in self.order.folders}
        for folder in sorted(named):
            if folder == "/" or folder.split("/")[1] in {"proc", "dev", "sys", ".atropos"}:
                raise NotSupported(f"view: {folder} can't be shown on another root")
            if self._find(self.below, folder)[1]:
                raise NotSupported(f"view: {folder} has no place in its root: there is a file or a link")
        chosen: list[str] = []
        # Named ones first: the bound may leave out others, never what was asked for.
        for folder in (*sorted(named), *self._optional(), *self._top_level()):
            if not any(f"{folder}/".startswith(f"{each}/") for each in chosen) and len(chosen) < MAX_FOLDERS:
                chosen.append(folder)
        return tuple(chosen)

    def _optional(self) -> Iterator[str]:
        for folder in self.order.optional:
            if self._may_show(folder) and not self._find(self.below, folder)[1]:
                yield folder

    def _top_level(self) -> Iterator[str]:
        """Top-level folders that the slot and the view's root both have, and no usual system."""
        for folder in sorted({f"/{name}" for layer in self.below for name in os.listdir(layer)}):
            if self._may_show(folder) and self._find(self.below, folder)[0]:
                yield folder

    def _may_show(self, folder: str) -> bool:
        """Whether the slot has a top-level folder that is neither of the system nor one of programs."""
        return _is_own(folder) and folder not in self.programs and self._find(self.layers, folder)[0]

    @staticmethod
    def _find(layers: Sequence[str], folder: str) -> tuple[bool, bool]:
        """Whether layers have a folder, and whether they have something else in its place."""
        with contextlib.ExitStack() as opened:
            place = stack.find(layers, folder, opened)
            return bool(place.parts), place.blocked

    # ------------------------------------------------------------------------------------------ as a layer of the root

    def layer(self) -> str | None:
        """A layer for the view's root with the folders in it; None: they are to be mounted.

        Raises:
            NotSupported: a folder can't be in the view's root.
        """
        folders = self.shown
        # Only where exactly one layer differs from the view's root: hard links of several can't be merged in one.
        if not (self.quiet or self.order.as_layer) or self.written > 1 or self.layers[1:] != self.below:
            return None

        def fill(top: str, most: int) -> int:
            count = 0
            for folder in folders:
                with contextlib.ExitStack() as opened:
                    count += self._add(top, folder, most - count, opened)
            return count

        return self._copy(fill)

    def _add(self, top: str, folder: str, most: int, opened: contextlib.ExitStack) -> int:
        """Put a folder into a layer; how many names it has."""
        theirs, ours = (stack.find(layers, folder, opened) for layers in (self.layers, self.below))
        if theirs.parts and theirs.parts[0].layer > 0:
            return 0  # the root has all of it already
        at = top
        for name in folder.strip("/").split("/"):
            at = f"{at}/{name}"
            # Two folders shown may lie in one: the second finds what the first has made.
            with contextlib.suppress(FileExistsError):
                os.mkdir(at, 0o755)
                os.chown(at, 0, 0)
                parts = stack.find(self.below, at.removeprefix(top), opened).parts
                if parts:
                    view_layers.copy_attributes(parts[0].fd, at)
        if len(theirs.parts) < 2 and ours.parts:
            # Else what the image has there would show again, though the slot removed or replaced it.
            stack.make_opaque(at)
        if not theirs.parts:
            return 0
        copy = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, copy)
        return view_layers.copy_folders(theirs.parts[0].fd, copy, most, self._left_out(folder))

    def _left_out(self, folder: str) -> frozenset[str]:
        """Paths below a folder that stay as the view's root has them."""
        return frozenset(path.removeprefix(f"{folder}/") for path in self.programs if path.startswith(f"{folder}/"))

    def _copy(self, fill: Callable[[str, int], int]) -> str | None:
        """A new folder of hard links; `fill` gets the most names, and returns how many there are.

        None: there is no room for it, half of what the slot's own programs have left.
        """
        with contextlib.ExitStack() as undo:
            try:
                # On the slot's own volume: hard links can't cross file systems, and the slot pays for the inodes.
                path = tempfile.mkdtemp(prefix="seen", dir=self.copies)
                undo.callback(remove_tree, path)
                # Half: programs of the slot that still run must be able to make files.
                most = min(MAX_COPIED, os.statvfs(self.copies).f_favail // 2)
                if fill(path, most) > most:
                    return None
            except OSError as error:
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    return None
                raise
            undo.pop_all()
            return path

    # -------------------------------------------------------------------------------------------------------- as mounts

    def mount(self, volume: Volume, layer: str | None) -> None:
        """Mount the folders in the next root of a view, or check those that `layer` has put there.

        Raises:
            OSError: a mount failed.
        """
        folders = self.shown
        links = view_links.Links(volume, folders)
        with contextlib.ExitStack() as opened:
            for number, folder in enumerate(folders):
                if layer is None:
                    self._mount_one(volume, number, folder, links, opened)
                elif os.path.isdir(f"{layer}{folder}"):
                    top = os.open(f"{layer}{folder}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                    opened.callback(os.close, top)
                    links.add(folder, top)
            for folder in links.unfit():  # a mount has reached the sandbox already, where a remount does not
                self._mount_one(volume, len(folders) + folders.index(folder), folder, None, opened)
            self.followed.update(links.followed)
        if self.order.home is not None:
            self._mount_home(volume, self.order.home)

    def _mount_one(
        self, volume: Volume, number: int, folder: str, links: view_links.Links | None, opened: contextlib.ExitStack
    ) -> None:
        view_layers.make_mount_point(volume.next_root, folder)
        upper = self._new_upper(volume, f"view{number}")
        parts = stack.find(self.layers, folder, opened).parts
        if parts:
            view_layers.copy_attributes(parts[0].fd, upper)
        layers, left_out = [part.fd for part in parts], self._left_out(folder)
        # One link is enough to know; a walk through all of them would take as long as the agent likes.
        needed = bool(left_out) or any(next(view_links.walk(part.fd), None) is not None for part in parts)
        follows = links is not None and bool(parts) and needed
        # Layer 0 is the slot's upper folder: its running programs can make a link there at any moment.
        if follows and parts[0].layer == 0 and (left_out or not self.quiet):
            copy = self._copied(parts[0].fd, left_out, opened)
            follows = copy is not None
            layers[0] = parts[0].fd if copy is None else copy
        # A copy has left them out already.
        if not follows and parts:
            for path in left_out:
                view_layers.hide(parts[0].fd, upper, path)
        flags = _FLAGS | (0 if follows else syscalls.MS_NOSYMFOLLOW)
        # An overlay needs a lower folder even where the slot has none of that name.
        lower = [f"/proc/self/fd/{fd}" for fd in layers] or [self.empty]
        volume.stack(f"{GATE}/{NEXT}{folder}", lower, flags, upper)
        # A copy shows no file that is made or renamed later.
        if not self.quiet and parts and layers[0] == parts[0].fd:
            volume.changing[f"{volume.next_root}{folder}"] = flags
        if follows and links is not None:
            for fd in layers[: sum(part.layer < self.written for part in parts)]:
                links.add(folder, fd)

    def _copied(self, source: int, left_out: frozenset[str], opened: contextlib.ExitStack) -> int | None:
        """A copy of a folder of the topmost layer, if there is room."""

        def fill(top: str, most: int) -> int:
            copy.append(os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            opened.callback(os.close, copy[0])
            return view_layers.copy_folders(source, copy[0], most, left_out)

        copy: list[int] = []
        return None if self._copy(fill) is None else copy[0]

    def _mount_home(self, volume: Volume, home: str) -> None:
        view_layers.make_mount_point(volume.next_root, VIEW_HOME)
        upper = self._new_upper(volume, "home")
        with contextlib.ExitStack() as opened:
            parts = stack.find(self.below, home, opened).parts
            if parts:
                view_layers.copy_attributes(parts[0].fd, upper)
            lower = [f"/proc/self/fd/{part.fd}" for part in parts] or [self.empty]
            volume.stack(f"{GATE}/{NEXT}{VIEW_HOME}", lower, _FLAGS, upper)

    @staticmethod
    def _new_upper(volume: Volume, name: str) -> str:
        upper = f"{volume.data}/{name}"
        # overlayfs wants its working folder beside the upper one, on the same file system.
        for path in (upper, f"{upper}-wk"):
            os.mkdir(path, 0o755)
        os.chown(upper, 0, 0)
        return upper


def _is_own(folder: str) -> bool:
    """Whether a top-level folder is none that usual systems have."""
    name = folder.strip("/")
    return "/" not in name and name not in SYSTEM and not name.startswith(("lib", "."))
