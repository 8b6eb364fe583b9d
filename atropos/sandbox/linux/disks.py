"""Volumes on disk: ext4 images on loop devices, created and mounted while the server is root.

A user namespace can't mount a disk's file system or set a quota. So all that will be needed at once are mounted before
privilege is dropped: each is a *cell* with its own size and number of inodes. A volume is a new folder in an empty
cell; a cell that could not be emptied is not used again. The image files are unlinked and the loop devices clear
themselves, so that nothing of them is left however the server ends. Standard library only.

Images are sparse, and writes without room behind a loop device are lost silently. So before a cell is used, a file in
it, the *balloon*, takes all blocks that its volume may not use, and all others are reserved in the image: see `resize`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.sandbox.linux import syscalls

if TYPE_CHECKING:
    from atropos.config import ServerConfig

PROBE = "probe"
"""The cell of the start-up probe, which can be filled in milliseconds."""
PROBE_MIB, PROBE_INODES = 8, 200
BALLOON = "balloon"
"""The file in a cell that takes what its volume may not use."""
OWN_INODES = 40
"""Inodes of a volume for mount points, upper and working folders."""
_INODE_BYTES = 256
_MIB = 1024 * 1024
_FS_IOC_FIEMAP, _FIEMAP_SYNC, _FIEMAP_LAST = 0xC020660B, 1, 1  # <linux/fiemap.h>
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LO_FLAGS_AUTOCLEAR = 0x4C82, 0x4C0A, 4  # <linux/loop.h>


@dataclass(frozen=True)
class CellPlan:
    """Number and size of the cells.

    Attributes:
        cells: for slots, warm sandboxes, layers, and cells that are being emptied.
        layers: how many of them snapshots may keep; None: as many as there are.
        mib, inodes: the largest size of one.
        shared: whether volumes of several sizes share the room on the disk, so that not every cell can be that large.
    """

    cells: int
    layers: int | None
    mib: int
    inodes: int
    shared: bool

    @classmethod
    def of(cls, config: ServerConfig) -> CellPlan | None:
        """The cells that a configuration needs; None: no files on disk."""
        # Bounded: each cell's inode table takes room on the disk, used or not.
        layers = min(config.max_snapshots, max(4, config.slots))
        # Half as many again: those that are being emptied while their slots start anew.
        cells, inodes = config.slots + layers + max(2, config.slots // 2), config.limits.inodes
        if config.place_mib:
            return cls(cells, None, config.place_mib, inodes, shared=True)
        if config.volume != "disk":
            return None
        ahead = 4 if config.warm is None else config.warm
        return cls(cells + ahead, layers, config.limits.disk_mib, inodes, shared=False)


def make(plan: CellPlan, images: str, target: str, owner: int, group: int) -> tuple[list[int], int]:
    """Create the cells `target`/0, 1, … and the probe's.

    Descriptors that nobody gets (the probe's; after an error, all) end with this program, which is then executed again.

    Args:
        plan: their number and size.
        images: a folder on the disk.
        target: a new folder to mount them in.
        owner: the server's uid.
        group: the slots' root, which needs to pass through.

    Returns:
        A descriptor of each cell's image, for `resize`, and the MiB of files that fit into all together.

    Raises:
        OSError: this host or container has no loop devices, no mkfs.ext4, or no room for one cell.
    """
    os.mkdir(target, 0o755)
    template = f"{images}/template"
    count, mib = _share(images, plan) if plan.shared else (plan.cells, plan.cells * plan.mib)
    try:
        # Made once and copied: mkfs takes longer than copying the few blocks that it has written.
        _format(template, plan.mib, plan.inodes)
        cells = [_cell(template, images, f"{target}/{number}", owner, group) for number in range(count)]
        _format(template, PROBE_MIB, PROBE_INODES)
        _reserve(_cell(template, images, f"{target}/{PROBE}", owner, group), ())
    finally:
        if os.path.exists(template):
            os.unlink(template)
    return cells, mib


def _share(folder: str, plan: CellPlan) -> tuple[int, int]:
    """How many cells a folder's disk has room for, and for how much in them; a tenth of what is free is left to others.

    Raises:
        OSError: not for one of the largest size.
    """
    status = os.statvfs(folder)
    room = status.f_bavail * status.f_frsize // 10 * 9
    largest = _image_bytes(plan.mib, plan.inodes)
    if room < largest:
        raise OSError(errno.ENOSPC, f"one takes {largest // _MIB} MiB, and the disk has room for {room // _MIB}")
    # What a cell takes without a file in it: tables of inodes and blocks.
    empty = largest - plan.mib * _MIB
    cells = min(plan.cells, (room - plan.mib * _MIB) // empty)
    return cells, (room - cells * empty) // _MIB


def resize(image: int, cell: str, mib: int) -> None:
    """Have room for so much in an empty cell, reserved on the disk, which gets the rest back.

    Raises:
        OSError: the disk has no room for it.
    """
    balloon = os.open(f"{cell}/{BALLOON}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # First let go of everything: only then does the file system say what is free in all.
        os.ftruncate(balloon, 0)
        there = os.fstatvfs(balloon)
        if (rest := there.f_bavail * there.f_frsize - (mib + 1) * _MIB) > 0:  # 1 MiB: the volume's own folders
            os.posix_fallocate(balloon, 0, rest)
        extents = sorted(_extents(balloon))
    finally:
        os.close(balloon)
    for at, size in extents:
        # The balloon's blocks are never read: nothing has to be there for them.
        syscalls.punch_hole(image, at, size)
    # Last, and after the holes: the disk may need what those gave back.
    _reserve(image, extents)


def _reserve(image: int, but: Sequence[tuple[int, int]]) -> None:
    """Allocate the blocks of a cell's image, so that writes into it succeed even when the disk is full.

    Args:
        image: its descriptor.
        but: where it stays sparse: offsets and sizes, ascending.
    """
    done = 0
    for at, size in (*but, (os.fstat(image).st_size, 0)):
        if at > done:
            os.posix_fallocate(image, done, at - done)
        done = at + size


def _extents(fd: int) -> Iterator[tuple[int, int]]:
    """Where a file's blocks are on its device: offsets and sizes in bytes (struct fiemap of <linux/fiemap.h>)."""
    head, extent, most = struct.Struct("QQIIII"), struct.Struct("QQQ16xI12x"), 512
    start, last = 0, 0
    while not last:
        buffer = bytearray(head.size + extent.size * most)
        head.pack_into(buffer, 0, start, 2**64 - 1 - start, _FIEMAP_SYNC, 0, most, 0)
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, buffer)
        *_, count, _, _ = head.unpack_from(buffer)
        if not count:
            return
        for number in range(count):
            logical, at, size, flags = extent.unpack_from(buffer, head.size + extent.size * number)
            yield at, size
            start, last = logical + size, flags & _FIEMAP_LAST


def _image_bytes(mib: int, inodes: int) -> int:
    # Files, inodes, a 64th for bitmaps, extent trees and folders, and a fixed part for superblocks.
    return mib * _MIB + (inodes + OWN_INODES) * _INODE_BYTES + (mib * _MIB >> 6) + 2 * _MIB


def _format(path: str, mib: int, inodes: int) -> None:
    """A sparse file with an empty file system in which `mib` and `inodes` fit."""
    import subprocess  # servers that have no cells start without it

    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        raise OSError(errno.ENOENT, "mkfs.ext4 is not installed (apt-get install e2fsprogs)")
    with open(path, "wb") as file:
        file.truncate(_image_bytes(mib, inodes))
    # no journal: its content is not used after a crash
    # -m 0: no blocks for root, which nobody here is; else writes would fail before the volume is full.
    options = ["-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard", "-m", "0"]
    command = [program, "-q", "-F", *options, "-I", str(_INODE_BYTES), "-N", str(inodes + OWN_INODES), path]
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
        # The loop device keeps the file: whatever ends this server, the disk gets its blocks back.
        os.unlink(image)
    device = _attach(fd)
    try:
        # nodiscard: deleted blocks stay reserved; noinit_itable: the table of unused inodes stays sparse
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount(f"/proc/self/fd/{device}", target, "ext4", flags, "nodiscard,noinit_itable")
    finally:
        os.close(device)
    # mkfs makes it; a cell has to be empty.
    os.rmdir(f"{target}/lost+found")
    os.chown(target, owner, group)
    os.chmod(target, 0o710)  # noqa: S103 - the slots' root passes through
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
    """A descriptor of a loop device on an open file; the device clears itself with its last user."""
    info = bytearray(232)
    # lo_flags of struct loop_info64, inside struct loop_config (Linux 5.8): one call, no moment without autoclear.
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
                if error.errno != errno.EBUSY:  # another process took it meanwhile
                    raise
            else:
                return device
    finally:
        os.close(control)
