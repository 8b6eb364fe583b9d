"""Changes the root of a running slot, and mounts in it: a server thread enters its mount namespace and returns."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from atropos.sandbox.linux import syscalls


@dataclass(frozen=True)
class Bind:
    """A file, folder or device node of the server's to mount in a slot, read-only.

    Attributes:
        no_exec: no program of it can be started.
        below: where in a folder something else is mounted, which comes along.
    """

    source: str
    target: str
    device: bool = False
    no_exec: bool = False
    below: tuple[str, ...] = ()


class RootChanger:
    """One thread, whose root and working directory are its own: the kernel lets no other change its mount namespace."""

    def __init__(self) -> None:
        # Opened before any change: it is the only way back, as the slot's own /proc shows other processes.
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = ThreadPoolExecutor(1, "roots", initializer=_prepare_thread)

    async def change(self, slot: int, new_root: str) -> None:
        """Make the folder `new_root`, as a slot sees it, the root of the slot.

        Args:
            slot: pidfd of its PID 1, the only process in it.
            new_root: where the new root is mounted.

        Raises:
            OSError: it could not be done; the slot must be stopped.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._change, slot, new_root)

    def _change(self, slot: int, new_root: str) -> None:
        # setns(2) to a mount namespace takes a thread that shares its root and working directory with no other.
        syscalls.setns(slot, syscalls.CLONE_NEWNS)
        try:
            _pivot(new_root)
        finally:
            syscalls.setns(self._home, syscalls.CLONE_NEWNS)

    async def bind(self, slot: int, binds: Sequence[Bind], links: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Mount files and device nodes in a slot, in this order.

        Args:
            slot: pidfd of its PID 1, the only process in it.
            binds: what to mount.
            links: symbolic links in /dev to make, as (target, path).

        Returns:
            The files and folders in the slot's root that were made to mount on.

        Raises:
            OSError: it could not be done; the slot must be stopped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._bind, slot, binds, links)

    def _bind(self, slot: int, binds: Sequence[Bind], links: Sequence[tuple[str, str]]) -> list[str]:
        with contextlib.ExitStack() as opened:
            # Taken here, where the sources are, and attached there: the slot's namespace has no path to them.
            trees = [syscalls.detached_mount(bind.source) for bind in binds]
            for tree in trees:
                opened.callback(os.close, tree)
            syscalls.setns(slot, syscalls.CLONE_NEWNS)
            try:
                return _bind_all(binds, trees, links)
            finally:
                syscalls.setns(self._home, syscalls.CLONE_NEWNS)

    async def share(self, root: str, source: str, slot: int, path: str, *, read_only: bool) -> None:
        """Mount a folder or file of one slot in another, or in the same one.

        Args:
            root: of the one that has it, as the server sees it, without what is mounted in the slot alone.
            source: where it is there.
            slot: pidfd of the other one's PID 1.
            path: where it is mounted; made where it is missing.
            read_only: whether it can't be written there.

        Raises:
            OSError: it could not be done.
        """
        slot = os.dup(slot)  # the slot's end closes its own
        work = partial(self._share, root, source, slot, path, read_only=read_only)
        shared = asyncio.get_running_loop().run_in_executor(self._thread, work)
        shared.add_done_callback(lambda _: os.close(slot))
        # The thread can't be interrupted; it needs the descriptor until it has ended.
        await asyncio.shield(shared)

    def _share(self, root: str, source: str, slot: int, path: str, *, read_only: bool) -> None:
        with contextlib.ExitStack() as opened:

            def kept(fd: int) -> int:
                opened.callback(os.close, fd)
                return fd

            # From the server's mount of that root, not through the slot: its programs could put a mount in between.
            top = kept(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            source_fd = kept(syscalls.open_in_root(top, source))
            tree = kept(syscalls.detached_mount(f"/proc/self/fd/{source_fd}"))
            syscalls.setns(slot, syscalls.CLONE_NEWNS)
            try:
                folder = stat.S_ISDIR(os.fstat(tree).st_mode)
                _make_mount_point(path, folder=folder)
                if os.path.isdir(path) != folder:  # the kernel would say EINVAL
                    number = errno.ENOTDIR if folder else errno.EISDIR
                    raise OSError(number, os.strerror(number))
                syscalls.attach_mount(tree, path)
                syscalls.make_private(path)  # else what is mounted below it is seen wherever the folder is
                if read_only:
                    syscalls.remount_read_only(path, os.statvfs(path).f_flag & os.ST_NOEXEC)
            finally:
                syscalls.setns(self._home, syscalls.CLONE_NEWNS)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
        os.close(self._home)


def _prepare_thread() -> None:
    """Give the thread a root of its own, and make its files belong to the slots' root: theirs hold no other owner."""
    # Threads of a process share root and working directory (CLONE_FS), with which setns refuses (EINVAL).
    syscalls.unshare(syscalls.CLONE_FS)
    syscalls.own_files_as_root()


def _pivot(new_root: str) -> None:
    """In the slot's mount namespace, make `new_root` the root.

    The kernel moves the root and working directory of PID 1 along.
    """
    # Read before the change: afterwards no path leads to the old root.
    before = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(new_root)
        current = os.stat(".")
        for name in ("proc", "dev", "sys"):
            # Moved, not mounted anew: a new proc would need a PID namespace to be entered, and lacks the read-only
            # mounts.
            syscalls.mount(f"/{name}", name, None, syscalls.MS_MOVE)
        # The old root is then mounted on top of the new one, at the same place (pivot_root(2)), and detached from
        # there.
        syscalls.pivot_root(".", ".")
        os.fchdir(before)
        syscalls.umount(".")
    finally:
        os.close(before)
    os.chdir("/")
    for path in ("/", "/proc/1/root/", "/proc/1/cwd/"):
        status = os.stat(path)
        # The kernel moves only processes whose root was the old one: a PID 1 left behind would serve the wrong files.
        if (status.st_dev, status.st_ino) != (current.st_dev, current.st_ino):
            raise OSError(f"{path} is not the new root")


def _bind_all(binds: Sequence[Bind], trees: Sequence[int], links: Sequence[tuple[str, str]]) -> list[str]:
    """In the slot's mount namespace, where no path leads out of its root."""
    paths: list[str] = []
    # For the moment of the mounts alone; no program of the lease runs yet.
    writable = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount(None, "/dev", None, writable)
    for bind, tree in zip(binds, trees, strict=True):
        paths += _make_mount_point(bind.target, folder=stat.S_ISDIR(os.fstat(tree).st_mode))
        syscalls.attach_mount(tree, bind.target)
        for path in (bind.target, *(f"{bind.target}/{name}" for name in bind.below)):
            # A remount in a user namespace must repeat what is locked, or it is refused with EPERM
            # (mount_namespaces(7)).
            flags = os.statvfs(path).f_flag & os.ST_NOEXEC
            if bind.no_exec:
                flags |= syscalls.MS_NOEXEC
            if bind.device:  # data for a device is no write to this mount; its node stays as it is
                flags |= syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID
                syscalls.mount(None, path, None, flags)
            else:
                syscalls.remount_read_only(path, flags)
    for target, path in links:
        _make_mount_point(os.path.dirname(path), folder=True)
        if not os.path.lexists(path):
            os.symlink(target, path)
    syscalls.remount_read_only("/dev")
    return paths


def _make_mount_point(path: str, *, folder: bool) -> list[str]:
    """Make what something is to be mounted on; the paths of what was missing, the outermost first."""
    if os.path.exists(path):
        return []
    paths = _make_mount_point(os.path.dirname(path), folder=True)
    if os.path.islink(path):  # a link to nothing
        os.unlink(path)
    if folder:
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    return [*paths, os.path.realpath(path)]
