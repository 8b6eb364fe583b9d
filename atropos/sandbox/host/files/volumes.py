"""File systems of slots: the volume that holds what one lease writes, the overlay above it, and what lies below.

A volume is a tmpfs with a size and a number of inodes. The slot's root is an overlay: the volume's `up` over any frozen
volumes over a base. Detaching the mounts discards a slot, in constant time whatever was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from atropos.sandbox.host.files.skeleton import Base
from atropos.sandbox.host.files.sysfs import CGROUP, SYSTEM
from atropos.sandbox.linux import sockets, syscalls
from atropos.sandbox.linux.disks import OWN_INODES
from atropos.sandbox.programs.layer_folders import LayerFolder, LayerFolders
from atropos.trees import remove_tree
from atropos.wire import SlotLimits

_RUNTIME = ".atropos"
MOUNT_POINTS = ("proc", "dev", "sys", "etc", "usr", _RUNTIME, "tmp", "root", "workspace")
"""Folders that something is mounted on, or that every slot has. A snapshot may hold something else in their place."""
SYS = "unbound/sys"
"""What a slot gets at /sys. Its folder is left out of the mounts that bubblewrap finds: it reads the whole list for
each that it makes."""
GATE = "gate"
"""The folder through which a running slot gets a new root: see `restack`."""
NEXT = "next"
FREEZE_PAUSE_S = 1.0
"""Longest pause, in seconds, before the last try to freeze a volume; each one is twice the one before."""
_MEMORY_KEPT_MIB = 16
"""Memory of a slot that its volume may not fill: enough for a shell and programs that remove files."""
_INODE_BYTES = 1880
"""Kernel memory of an empty file in a tmpfs below an overlay: 200,000 were seen to take 359 MiB."""
_NOSUID_NODEV = syscalls.MS_NOSUID | syscalls.MS_NODEV
_READONLY = _NOSUID_NODEV | syscalls.MS_RDONLY


@dataclass(frozen=True)
class SharedFiles:
    """Read-only files of the server that all slots see.

    Attributes:
        runtime: the folder with the private Python.
        sys: what they have at /sys.
        sys_network: what those with a gateway have above it.
        system: what the kernel has there about CPUs and memory nodes.
        empty_file: covers /etc/ld.so.preload.
        empty_folder: covers it where it is a folder; and is the second lower one that an overlay without an upper one
            needs.
    """

    runtime: str
    sys: str
    sys_network: str
    system: str
    empty_file: str
    empty_folder: str


@dataclass
class Volume:
    """One lease's mounts: a tmpfs at `folder`, and everything else mounted inside it.

    With the data on disk the tmpfs holds the mount points alone.

    Attributes:
        changing: flags of overlays, by where they are, below which another slot's programs make and replace files.
    """

    folder: str
    disk: str | None = None
    mounts: list[str] = field(default_factory=list[str])
    changing: dict[str, int] = field(default_factory=dict[str, int])
    restacked: bool = False

    @property
    def data(self) -> str:
        """Where the slot's files are kept."""
        return self.disk or self.folder

    @property
    def upper(self) -> str:
        """What the slot wrote, as overlay keeps it."""
        return f"{self.data}/{'over' if self.restacked else 'up'}"

    @property
    def root(self) -> str:
        """The root file system that the slot starts on."""
        return f"{self.folder}/root"

    @property
    def next_root(self) -> str:
        """Where its next root is mounted: see `restack`."""
        return f"{self.folder}/{GATE}/{NEXT}"

    def stack(self, name: str, lower: Sequence[str], flags: int, upper: str | None = None) -> None:
        """Mount an overlay of folders, topmost first, at a folder here, which is made where it isn't there.

        What is written goes to `upper`; overlay's working folder is beside it, as `upper`-wk.

        The options show in the slot's mount table. So they name descriptors, and not where the server keeps its files;
        nor do ':' and ',' in a path mean anything.
        """
        target = f"{self.folder}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(target, 0o755)
        with contextlib.ExitStack() as opened:

            def known_as(path: str) -> str:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                return f"/proc/self/fd/{fd}"

            # userxattr: in a user namespace overlay may not write trusted.* attributes (Linux 5.11).
            options = f"lowerdir={':'.join(map(known_as, lower))},userxattr"
            if upper is not None:
                options += f",upperdir={known_as(upper)},workdir={known_as(f'{upper}-wk')}"
            syscalls.mount("overlay", target, "overlay", flags, options)
        self.mounts.append(target)

    def detach(self) -> list[int]:
        """Detach all mounts at once, in constant time.

        Returns:
            Descriptors that keep the files themselves. Closing the last one frees them, which takes the longer the more
            there are: see `Disposer`.

        Raises:
            OSError: it could not be detached.
        """
        held: list[int] = []
        try:
            if self.mounts:
                # one by one, so that those before one that fails are closed
                held.extend(os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*reversed(self.mounts), self.folder))
                # MNT_DETACH takes the whole tree of mounts; open descriptors keep the file systems for the disposer.
                syscalls.umount(self.folder)
                self.mounts = []
            os.rmdir(self.folder)
        except OSError:
            for fd in held:
                os.close(fd)
            raise
        return held

    def discard(self) -> None:
        """Undo what was made of a volume that can't be finished; needs no descriptor, as there may be none."""
        with contextlib.suppress(OSError):
            if self.mounts:
                syscalls.umount(self.folder)
            os.rmdir(self.folder)
        if self.disk is not None:
            remove_tree(self.disk)

    def forget_names(self) -> None:
        """Have overlays whose layers change look names up again.

        An overlay keeps what a name meant, or that there was none, as long as the kernel has room for it: its layers
        are not supposed to change. A remount drops all names that are not in use (`shrink_dcache_sb`).

        Raises:
            OSError: one can't be remounted, or is no longer there.
        """
        for target, flags in self.changing.items():
            syscalls.mount(None, target, None, syscalls.MS_REMOUNT | flags)

    def unmount_inner(self) -> None:
        """Unmount everything inside, so that only the data is left, as a layer needs.

        Raises:
            OSError: something could not be detached.
        """
        # The last one made comes off first, as it may lie on those before; the first is the tmpfs itself.
        while len(self.mounts) > 1:
            syscalls.umount(self.mounts[-1])
            self.mounts.pop()


class Disposer:
    """Frees detached volumes in the background: a million files take a second of kernel time.

    One thread of low priority; who gives it more waits for it.
    """

    BOUND = 32

    def __init__(self, freed: Callable[[str | None], None]) -> None:
        """`freed` is called with each folder that was removed."""
        self._freed = freed
        self._thread = ThreadPoolExecutor(1, "dispose", initializer=_lower_priority)
        self._pending: set[asyncio.Future[None]] = set()

    @property
    def pending(self) -> int:
        """Volumes that are not freed yet."""
        return len(self._pending)

    async def submit(self, descriptors: list[int], folder: str | None = None) -> None:
        """Queue a volume to be freed; then waits, but only where the queue is full."""
        if not descriptors and folder is None:
            return
        job = asyncio.get_running_loop().run_in_executor(self._thread, _free, descriptors, folder)
        self._pending.add(job)
        job.add_done_callback(self._pending.discard)
        # Only then is a cell free: its files are gone.
        job.add_done_callback(lambda _: self._freed(folder))
        while len(self._pending) > self.BOUND:
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)

    async def aclose(self) -> None:
        """Wait until all is freed."""
        if self._pending:
            await asyncio.wait(self._pending)
        self._thread.shutdown()


def _lower_priority() -> None:
    # Linux sets the niceness of single threads (setpriority(2), "C library/kernel differences").
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(10, niceness))  # lowering the niceness would be refused


def _free(descriptors: list[int], folder: str | None) -> None:
    for fd in descriptors:
        os.close(fd)
    if folder is not None:
        remove_tree(folder)


def create(
    folder: str,
    base: Base,
    limits: SlotLimits,
    shared: SharedFiles,
    disk: str | None = None,
    cgroups: Sequence[tuple[str, str]] = (),
    *,
    gateway: bool = False,
) -> Volume:
    """Mount the base and layers of a new slot.

    Args:
        folder: a new folder for the mount points.
        base: the lowest layer.
        limits: size and inodes.
        shared: what all slots see.
        disk: a new folder on disk for the slot's files, instead of the tmpfs.
        cgroups: the slot's own; see `SlotCgroup.mounts`.
        gateway: whether the slot's network has one.

    Raises:
        OSError: a mount failed; nothing is left mounted.
    """
    volume = blank(folder, limits, disk)
    try:
        volume.stack("root", [*base.layers, base.lower], _NOSUID_NODEV, volume.upper)
        for name, layers in base.host_folders.items():
            volume.stack(f"host-{name}", [shared.empty_folder, *layers], _READONLY)
        # An overlay of its own for each slot: locks and watches are made on its inodes, which no other slot has.
        volume.stack("runtime", [shared.empty_folder, shared.runtime], _READONLY)
        _mount_sys(volume, shared, cgroups, gateway=gateway)
        # A bound of its own: the kernel's one (kernel.pty.max) is shared by the whole host.
        ptys = max(8, min(limits.pids, 64))
        # ptmxmode: the default, 0, lets nobody open a terminal.
        options = f"newinstance,ptmxmode=0666,mode=620,max={ptys}"
        terminals = f"{folder}/pts"
        os.mkdir(terminals, 0o755)
        syscalls.mount("devpts", terminals, "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options)
        volume.mounts.append(terminals)
        _make_gate(volume)
    except OSError:
        volume.discard()
        raise
    return volume


def _mount_sys(volume: Volume, shared: SharedFiles, cgroups: Sequence[tuple[str, str]], *, gateway: bool) -> None:
    top = os.path.dirname(SYS)
    unbound = f"{volume.folder}/{top}"
    os.mkdir(unbound, 0o755)
    syscalls.mount(unbound, unbound, None, syscalls.MS_BIND)
    volume.mounts.append(unbound)
    # Left out of recursive binds: bubblewrap's `--bind` of the root would copy each of them.
    syscalls.mount(None, unbound, None, syscalls.MS_UNBINDABLE)
    volume.stack(SYS, [shared.sys_network if gateway else shared.empty_folder, shared.sys], _READONLY)
    volume.stack(f"{top}{SYSTEM}", [shared.empty_folder, shared.system], _READONLY)
    for source, place in cgroups:
        target = f"{unbound}{CGROUP}{place}"
        syscalls.mount(source, target, None, syscalls.MS_BIND)  # it ends with what it is mounted in
        syscalls.remount_read_only(target, syscalls.MS_NOEXEC)


def _make_gate(volume: Volume) -> None:
    """Make a shared mount: what the server mounts in it later also appears in the slot."""
    gate = f"{volume.folder}/{GATE}"
    os.makedirs(f"{gate}/{NEXT}", 0o755)
    syscalls.mount(gate, gate, None, syscalls.MS_BIND)
    volume.mounts.append(gate)
    syscalls.mount(None, gate, None, syscalls.MS_SHARED)


def restack(volume: Volume, base: Base, layers: Sequence[str], shared: SharedFiles) -> None:
    """Mount another root in the gate of a running slot's volume, before anything was written in it.

    The slot's namespace gets a copy of each of these mounts; `RootChanger` then makes it the root.

    Args:
        volume: the slot's.
        base: the lowest layer.
        layers: upper folders of frozen volumes, topmost first.
        shared: its empty file and folder are read-only mounts, which a mount of them inherits.

    Raises:
        OSError: a mount failed; the sandbox must be stopped.
    """
    volume.restacked = True
    top = volume.next_root
    volume.stack(f"{GATE}/{NEXT}", [*layers, *base.layers, base.lower], _NOSUID_NODEV, volume.upper)
    # Before anything is mounted: layers are a lease's own work, and may have a link in the place of a folder.
    restore_mount_points(top, base.host_folders)
    cover = preload_cover(top, shared)
    preload = f"{top}/etc/ld.so.preload"
    if not os.path.lexists(preload):
        # A file can only be mounted on a file.
        os.close(os.open(preload, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    hosts = [(f"{volume.folder}/host-{name}", f"{top}/{name}") for name in base.host_folders]
    for source, target in (*hosts, (f"{volume.folder}/runtime", f"{top}/{_RUNTIME}"), (cover, preload)):
        syscalls.mount(source, target, None, syscalls.MS_BIND)
        volume.mounts.append(target)


def blank(folder: str, limits: SlotLimits, disk: str | None) -> Volume:
    """A volume without a root, as a layer that is imported is unpacked in.

    Raises:
        OSError: a mount failed; nothing is left mounted.
    """
    os.mkdir(folder, 0o755)
    volume = Volume(folder, disk)
    size, inodes = bounds(limits)
    try:
        if disk is not None:
            # Mount points alone; the files are on disk, in a cell that has the bounds.
            size, inodes = "64k", 64
        options = f"size={size},nr_inodes={inodes},mode=755,uid=0,gid=0"
        syscalls.mount("atropos", folder, "tmpfs", _NOSUID_NODEV, options)
        volume.mounts.append(folder)
        make_folders(volume)
    except OSError:
        volume.discard()
        raise
    return volume


def make_folders(volume: Volume) -> None:
    """Make the folders of a volume's data where they are to be kept: in memory, or on disk.

    Raises:
        OSError: it failed.
    """
    if volume.disk is not None:
        os.mkdir(volume.disk, 0o755)
    for name, mode in (("up", 0o755), ("up-wk", 0o755), ("over", 0o755), ("over-wk", 0o755), ("shm", 0o1777)):
        path = f"{volume.data}/{name}"
        os.mkdir(path)
        os.chmod(path, mode)
        # Ids of this user namespace: the slot's root.
        os.chown(path, 0, 0)


def resize(volume: Volume, limits: SlotLimits) -> None:
    """Change how much fits into a volume in memory; cells have one size.

    Raises:
        OSError: more is in it already.
    """
    if volume.disk is None:
        size, inodes = bounds(limits)
        flags = syscalls.MS_REMOUNT | _NOSUID_NODEV
        syscalls.mount(None, volume.folder, None, flags, f"size={size},nr_inodes={inodes}")


def bounds(limits: SlotLimits) -> tuple[str, int]:
    """Size and inodes of a tmpfs volume: the configured ones, or less where both together exceed the slot's memory.

    Its pages can't be reclaimed, nor its inodes. A volume that took all of the memory would have every later command
    killed, `rm` as well. Where both don't fit, an eighth at least is left to inodes.
    """
    most = limits.memory_mib - _MEMORY_KEPT_MIB
    # A sixteenth stays for programs in large slots, where 16 MiB would be nothing.
    room = min(most, limits.memory_mib - limits.memory_mib // 16)
    size = min(limits.disk_mib, room)
    rest = max(most - size, most // 8)
    inodes = min(limits.inodes, (min(room, rest) << 20) // _INODE_BYTES)
    # What inodes leave: a full volume of both kinds still fits into the slot's memory.
    size = min(size, most - (inodes * _INODE_BYTES >> 20))
    return f"{size}m", inodes + OWN_INODES


def restore_mount_points(root: str, more: Iterable[str]) -> None:
    """Put a plain folder wherever one is mounted on, when a snapshot holds something else there.

    A symbolic link planted in such a place would send a mount, or the start of PID 1, to a path of its maker's choice.
    """
    for name in dict.fromkeys((*MOUNT_POINTS, *more)):
        path = f"{root}/{name}"
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                continue
            os.unlink(path)  # not a folder, so there is nothing below it
            os.mkdir(path, 0o755)
        os.chown(path, 0, 0)
        if name == "tmp":
            os.chmod(path, 0o1777)


def preload_cover(root: str, shared: SharedFiles) -> str:
    """What to mount over the slot's /etc/ld.so.preload: an empty file, or an empty folder where it is one."""
    path = f"{root}/etc/ld.so.preload"
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return shared.empty_file
    if stat.S_ISDIR(mode):
        return shared.empty_folder
    if not stat.S_ISREG(mode):
        os.unlink(path)
    return shared.empty_file


def remount_read_only(volume: Volume) -> None:
    """Make a volume in memory read-only; one on disk can't be.

    Raises:
        OSError: with EBUSY, a file in it is still open for writing.
    """
    # On disk the cell's mount is shared by a lease's layers and its own files.
    if volume.disk is None:
        syscalls.mount(None, volume.folder, None, syscalls.MS_REMOUNT | syscalls.MS_RDONLY | _NOSUID_NODEV)


async def freeze(volume: Volume) -> None:
    """Leave a volume's data alone, read-only, once files that only messages in sockets hold are closed.

    Raises:
        OSError: a writer was left.
    """
    await asyncio.to_thread(volume.unmount_inner)
    pause = 0.001
    while True:
        try:
            remount_read_only(volume)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if pause > FREEZE_PAUSE_S:
                raise OSError(
                    error.errno, "a file in it is still open for writing, and nothing is left to end"
                ) from None
        else:
            return
        sockets.collect_garbage()
        await asyncio.sleep(pause)
        pause *= 2


def used_bytes(volume: Volume) -> int:
    """Bytes that the volume's files take."""
    if volume.disk is not None:
        return _bytes_below(volume.disk)
    usage = os.statvfs(volume.data)
    # Counted by the tmpfs, so that it takes no walk, however many files there are.
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _bytes_below(top: str) -> int:
    """Bytes that files take, however deep they are: `os.walk` recurses."""
    used, waiting = 0, [LayerFolder(0)]
    with LayerFolders([top]) as folders:
        while waiting:
            folder = waiting.pop()
            with os.scandir(folders.open(folder)) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(folder.below(entry.name, (status.st_dev, status.st_ino)))
                    else:
                        used += status.st_blocks * 512
    return used


def exhausted(volume: Volume) -> Literal["disk", "inodes"] | None:
    """'disk' or 'inodes' when the volume has none left."""
    try:
        usage = os.statvfs(volume.data)
    except OSError:
        return None
    if usage.f_favail == 0:
        return "inodes"
    # ext4 reserves some blocks, so that writes fail before none is left
    spare = 0 if volume.disk is None else usage.f_blocks // 50
    return "disk" if usage.f_bavail <= spare else None
