"""File systems of slots: the volume that holds what one lease writes, the overlay above it, and what lies below.

A volume is a tmpfs with a size and a number of inodes. The slot's root is an overlay: the volume's `up` over any frozen
volumes over a base. Forgetting a slot is detaching its mounts: constant time, whatever was written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atropos.config import SlotLimits
from atropos.sandbox import syscalls

MOUNT_POINTS = ("proc", "dev", "etc", "usr", ".atropos", "tmp", "root", "workspace")
"""Folders that something is mounted on, or that every slot has. A snapshot may hold something else in their place."""
_OWN_INODES = 16
_NOSUID_NODEV = syscalls.MS_NOSUID | syscalls.MS_NODEV


@dataclass(frozen=True)
class Base:
    """What slots stand on: a lower folder, and folders of the host that are seen read-only."""

    lower: str
    host_folders: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class Volume:
    """One lease's mounts, below one folder of its own."""

    folder: str
    mounts: list[str] = field(default_factory=list[str])
    on_disk: bool = False

    @property
    def data(self) -> str:
        """The tmpfs itself (or the folder on disk)."""
        return f"{self.folder}/vol"

    @property
    def upper(self) -> str:
        """What the slot wrote, as overlay keeps it."""
        return f"{self.data}/up"

    @property
    def root(self) -> str:
        """The slot's root file system."""
        return f"{self.folder}/root"

    def attach(self, name: str, kind: str, flags: int, options: str) -> str:
        """Mount something at a new folder here."""
        target = f"{self.folder}/{name}"
        os.mkdir(target, 0o755)
        syscalls.mount(kind, target, kind, flags, options)
        self.mounts.append(target)
        return target

    def detach(self, *, keep: str | None = None) -> str:
        """Detach the mounts, all but `keep`; returns what went wrong, if anything."""
        problems: list[str] = []
        for target in reversed(self.mounts):
            if target != keep:
                try:
                    syscalls.umount(target)
                    os.rmdir(target)
                except OSError as error:
                    problems.append(str(error))
        self.mounts = [keep] if keep else []
        if keep is None:
            if self.on_disk:
                shutil.rmtree(self.data, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
        return "; ".join(problems)


def create(
    folder: str,
    base: Base,
    layers: Sequence[str],
    limits: SlotLimits,
    runtime: str,
    empty: str,
    disk: str | None = None,
) -> Volume:
    """Mount everything that a new slot stands on.

    Args:
        folder: a new folder for the mount points.
        base: the lowest layer.
        layers: upper folders of frozen volumes, topmost first.
        limits: size and inodes.
        runtime: the folder with the private Python.
        empty: an empty folder, the second lower one that an overlay without an upper one needs.
        disk: a folder on disk for the volume's data, instead of a tmpfs.

    Raises:
        OSError: a mount failed; nothing is left mounted.
    """
    os.mkdir(folder, 0o755)
    volume = Volume(folder, on_disk=disk is not None)
    try:
        _data(volume, limits, disk)
        lower = ":".join((*layers, base.lower))
        options = f"lowerdir={lower},upperdir={volume.upper},workdir={volume.data}/wk,userxattr"
        volume.attach("root", "overlay", _NOSUID_NODEV, options)
        if layers:
            restore_mount_points(volume.root)
        for name, source in base.host_folders.items():
            volume.attach(
                f"host-{name}", "overlay", _NOSUID_NODEV | syscalls.MS_RDONLY, f"lowerdir={empty}:{source},userxattr"
            )
        volume.attach("runtime", "overlay", _NOSUID_NODEV | syscalls.MS_RDONLY, f"lowerdir={empty}:{runtime},userxattr")
        ptys = max(8, min(limits.pids, 64))
        volume.attach(
            "pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, f"newinstance,ptmxmode=0666,mode=620,max={ptys}"
        )
    except OSError:
        volume.detach()
        raise
    return volume


def _data(volume: Volume, limits: SlotLimits, disk: str | None) -> None:
    if disk is None:
        options = f"size={limits.disk_mib}m,nr_inodes={limits.inodes + _OWN_INODES},mode=755,uid=0,gid=0"
        volume.attach("vol", "tmpfs", _NOSUID_NODEV, options)
    else:
        os.mkdir(disk, 0o755)
        os.symlink(disk, volume.data)
    for name, mode in (("up", 0o755), ("wk", 0o755), ("shm", 0o1777)):
        path = f"{volume.data}/{name}"
        os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, 0, 0)


def restore_mount_points(root: str) -> None:
    """Put a plain folder wherever one is mounted on, when a snapshot holds something else there.

    A symbolic link planted in such a place would send a mount, or the start of PID 1, to a path of its maker's choice.
    """
    for name in MOUNT_POINTS:
        path = f"{root}/{name}"
        if not _is(path, stat.S_ISDIR):
            _move_away(path)
            os.mkdir(path, 0o755)
            os.chown(path, 0, 0)
            if name == "tmp":
                os.chmod(path, 0o1777)
    path = f"{root}/etc/ld.so.preload"
    if not _is(path, stat.S_ISREG):
        _move_away(path)
        Path(path).touch(0o644)
        os.chown(path, 0, 0)


def _is(path: str, test: object) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    return bool(callable(test) and test(mode))


def _move_away(path: str) -> None:
    """Out of the way in constant time, whatever it is: a folder with a million files would take seconds to remove."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        os.rename(path, f"{path}.replaced-{os.urandom(4).hex()}")
    else:
        os.unlink(path)


def freeze(volume: Volume) -> None:
    """Make the volume read-only for good.

    Raises:
        OSError: EBUSY tells that a file in it is still open for writing.
    """
    syscalls.mount(None, volume.data, None, syscalls.MS_REMOUNT | syscalls.MS_RDONLY | _NOSUID_NODEV)


def used_bytes(volume: Volume) -> int:
    """Bytes that the volume's files take."""
    found = os.statvfs(volume.data)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def exhausted(volume: Volume) -> str | None:
    """'disk' or 'inodes' when the volume has none left."""
    try:
        found = os.statvfs(volume.data)
    except OSError:
        return None
    if found.f_favail == 0:
        return "inodes"
    return "disk" if found.f_bavail == 0 else None
