"""Shift every owner under a folder by an offset: `shift_owner.py DIR OFFSET RANGE`.

Slots see a root file system through a user namespace that maps their ids 0..RANGE-1 to OFFSET.. on the host, so what
root owns inside must belong to OFFSET outside. chown(2) clears set-user-id bits and file capabilities: both are put
back, the capabilities as the namespaced kind (revision 3) that belongs to the shifted root (capabilities(7)).
"""

from __future__ import annotations

import os
import stat
import struct
import sys

VFS_CAP_REVISION_2, VFS_CAP_REVISION_3, REVISION_MASK = 0x02000000, 0x03000000, 0xFF000000
CAPABILITY = "security.capability"


def shifted_capability(value: bytes, root: int) -> bytes:
    """The same file capability, granted only inside a user namespace whose root is the id `root`."""
    magic = struct.unpack_from("<I", value)[0]
    if magic & REVISION_MASK != VFS_CAP_REVISION_2:
        return value
    return struct.pack("<I", (magic & ~REVISION_MASK) | VFS_CAP_REVISION_3) + value[4:20] + struct.pack("<I", root)


def shift(path: str, offset: int, size: int) -> None:
    """Shift one file's owner and group; one already shifted (a second name of it) is left alone."""
    info = os.lstat(path)
    if info.st_uid >= offset:
        return
    if max(info.st_uid, info.st_gid) >= size:
        sys.exit(f"{path}: owner {info.st_uid}:{info.st_gid} is outside the {size} ids that slots map")
    capability = None
    if stat.S_ISREG(info.st_mode) and CAPABILITY in os.listxattr(path, follow_symlinks=False):
        capability = os.getxattr(path, CAPABILITY)
    os.lchown(path, info.st_uid + offset, info.st_gid + offset)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(path, stat.S_IMODE(info.st_mode))
    if capability is not None:
        try:
            os.setxattr(path, CAPABILITY, shifted_capability(capability, offset))
        except PermissionError:
            print(f"{path}: its file capability needs CAP_SETFCAP to be kept; dropped", file=sys.stderr)


def main() -> None:
    """Walk the tree without following links or leaving it."""
    top, offset, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for folder, names, files in os.walk(top):
        for name in (*names, *files):
            shift(os.path.join(folder, name), offset, size)
    shift(top, offset, size)


if __name__ == "__main__":
    main()
