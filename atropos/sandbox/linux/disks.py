"""Sized places on disk for slots' volumes: ext4 images on loop devices, made and mounted while the server is still root.

Inside a user namespace nobody may mount a disk's file system or set a quota. So as many as will be needed at once are
mounted before privilege is left: a *cell* each, with its own size and number of inodes. A volume is a new folder in an
empty cell; a cell that could not be emptied is not used again. The image files have no name and the loop devices clear
themselves: however the server ends, nothing of them stays. They are sparse until a cell is first used: then all of its
blocks are reserved, because a write that finds no room behind a loop device is lost in silence. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.sandbox.linux import syscalls

if TYPE_CHECKING:
    from atropos.config import ServerConfig

PROBE = "probe"
"""The cell of the start-up probe, small enough to be filled in milliseconds."""
PROBE_MIB, PROBE_INODES = 8, 200
OWN_INODES = 40
"""Inodes of a volume that are not its slot's: mount points, upper and working folders."""
_INODE_BYTES = 256
_MIB = 1024 * 1024
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LO_FLAGS_AUTOCLEAR = 0x4C82, 0x4C0A, 4  # <linux/loop.h>


@dataclass(frozen=True)
class CellPlan:
    """How many cells, and how large.

    Attributes:
        cells: for slots, those started ahead, layers, and those that are just being emptied.
        layers: how many of them snapshots may keep.
        mib, inodes: what fits into one.
    """

    cells: int
    layers: int
    mib: int
    inodes: int

    @classmethod
    def of(cls, config: ServerConfig) -> CellPlan:
        """What a configuration needs."""
        ahead = 4 if config.warm is None else config.warm
        layers = min(config.max_snapshots, max(4, config.slots))
        cells = config.slots + ahead + layers + max(2, config.slots // 2)
        return cls(cells, layers, config.limits.disk_mib, config.limits.inodes)


def make(plan: CellPlan, images: str, target: str, owner: int, group: int) -> list[int]:
    """Make the cells `target`/0, 1, … and the probe's.

    Args:
        plan: how many and how large.
        images: a folder on the disk.
        target: a new folder to mount them in.
        owner: the server's uid.
        group: that of the slots' root, which passes through.

    Returns:
        A descriptor of each cell's image, for `reserve`.

    Raises:
        OSError: this host or container has no loop devices, or no mkfs.ext4.
    """
    os.mkdir(target, 0o755)
    template = f"{images}/template"
    made: list[int] = []
    try:
        _format(template, plan.mib, plan.inodes)
        for number in range(plan.cells):
            made.append(_cell(template, images, f"{target}/{number}", owner, group))  # noqa: PERF401 - as far as it came
        os.unlink(template)
        _format(template, PROBE_MIB, PROBE_INODES)
        probe = _cell(template, images, f"{target}/{PROBE}", owner, group)
        try:
            reserve(probe)
        finally:
            os.close(probe)
    except BaseException:
        for fd in made:
            os.close(fd)
        raise
    finally:
        if os.path.exists(template):
            os.unlink(template)
    return made


def reserve(image: int) -> None:
    """Give a cell's image all of its blocks, so that what is written into it finds room whatever else fills the disk.

    Raises:
        OSError: the disk has no room for it.
    """
    os.posix_fallocate(image, 0, os.fstat(image).st_size)


def _format(path: str, mib: int, inodes: int) -> None:
    """A sparse file with an empty file system in which `mib` and `inodes` fit."""
    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        raise OSError(errno.ENOENT, "mkfs.ext4 is not installed (apt-get install e2fsprogs)")
    inodes += OWN_INODES
    size = mib * _MIB + inodes * _INODE_BYTES + (mib * _MIB >> 6) + 2 * _MIB
    with open(path, "wb") as file:
        file.truncate(size)
    # no journal: what is in it is worth nothing after a crash
    options = ["-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard", "-m", "0"]
    command = [program, "-q", "-F", *options, "-I", str(_INODE_BYTES), "-N", str(inodes), path]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(errno.EINVAL, f"mkfs.ext4: {' '.join(done.stderr.split()) or done.returncode}")


def _cell(template: str, images: str, target: str, owner: int, group: int) -> int:
    os.mkdir(target, 0o755)
    image = f"{images}/image"
    _copy_sparse(template, image)
    try:
        fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.unlink(image)
    try:
        device = _attach(fd)
        try:
            # nodiscard: what is deleted inside stays reserved; noinit_itable: unused inodes stay holes until then
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
            syscalls.mount(f"/proc/self/fd/{device}", target, "ext4", flags, "nodiscard,noinit_itable")
        finally:
            os.close(device)
        os.rmdir(f"{target}/lost+found")
        os.chown(target, owner, group)
        os.chmod(target, 0o710)  # noqa: S103 - the slots' root passes through
    except BaseException:
        os.close(fd)
        raise
    return fd


def _copy_sparse(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as file, open(target, "xb", buffering=0) as copy:
        size = os.fstat(file.fileno()).st_size
        copy.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: holes up to the end
                return
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            os.lseek(copy.fileno(), at, os.SEEK_SET)
            while at < end and (sent := os.sendfile(copy.fileno(), file.fileno(), at, end - at)):
                at += sent


def _attach(image: int) -> int:
    """A loop device on an open file, which clears itself with its last user; a descriptor of it."""
    info = bytearray(232)
    struct.pack_into("I", info, 52, _LO_FLAGS_AUTOCLEAR)
    config = struct.pack("II", image, 0) + bytes(info) + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # another took it meanwhile
                    raise
            else:
                return device
    finally:
        os.close(control)
