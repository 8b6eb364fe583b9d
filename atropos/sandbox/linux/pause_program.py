"""A program without libraries: it writes one byte and waits for its input. Bubblewrap executes it in a slot's new root.

Any other would be of the slot's root, or would have a loader look for its libraries there.
"""

from __future__ import annotations

import errno
import os
import struct

PAUSED = b"\x7f"
"""What it writes to its standard output: the first byte of itself."""
_ADDRESS = 0x40_0000
_MACHINES = {
    # <elf.h>'s number; write(1, _ADDRESS, 1), read(0, stack, 1), exit_group(0)
    "x86_64": (
        62,
        "b801000000 bf01000000 be00004000 ba01000000 0f05 31c0 31ff 4889e6 ba01000000 0f05 b8e7000000 31ff 0f05",
    ),
    "aarch64": (
        183,
        (
            "080880d2 200080d2 0108a0d2 220080d2 010000d4 e80780d2 000080d2 e1030091 220080d2 010000d4 "
            "c80b80d2 000080d2 010000d4"
        ),
    ),
}


def elf() -> bytes:
    """The program.

    Raises:
        OSError: it isn't written for this machine.
    """
    name = os.uname().machine
    if name not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no program that pauses is written for {name}")
    machine, digits = _MACHINES[name]
    code = bytes.fromhex(digits)
    size = 64 + 56 + len(code)
    # Elf64_Ehdr and one Elf64_Phdr (PT_LOAD, readable and executable); the code comes right after them
    identity = PAUSED + b"ELF" + bytes((2, 1, 1)) + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, _ADDRESS + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return identity + header + segment + code
