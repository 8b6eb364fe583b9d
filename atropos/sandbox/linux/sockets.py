"""How many sockets a slot has open: what waits in them is memory of the kernel's, of which cgroups count only a part.

Answers of the kernel that nobody reads (netlink) and errors that come back (ICMP, time stamps) are charged to nobody:
60 sockets held 400 MiB of a host's memory in a slot of 256. A socket holds as much as its receive buffer, which the
slot's seccomp filter keeps at the kernel's default (`net.core.rmem_default`), and a process may open `open_files` of them.
"""

from __future__ import annotations

import socket
from pathlib import Path

_DEFAULT_BYTES = 212_992
_FEWEST = 256


def most(memory_bytes: int) -> int:
    """How many sockets a slot may have open: together they hold as much again as its limit of memory."""
    try:
        each = int(Path("/proc/sys/net/core/rmem_default").read_text(encoding="ascii"))
    except (OSError, ValueError):  # the file shows in the first network namespace alone
        each = _DEFAULT_BYTES
    return max(_FEWEST, memory_bytes // max(each, 4096))


def used(pid: int) -> int:
    """How many are open in the network namespace of a process; 0 when it has gone.

    Not only what descriptors of living processes refer to: a socket that is on its way through another is one of them.
    """
    try:
        with open(f"/proc/{pid}/net/sockstat", "rb") as file:
            first = file.readline().split()
    except OSError:
        return 0
    return int(first[2]) if first[:2] == [b"sockets:", b"used"] else 0


def collect_garbage() -> None:
    """Have the kernel close sockets that refer to one another from their own queues, and what waits with them.

    No process holds them any more, so nothing else ends them; the kernel looks for them when a Unix socket is closed. It
    does so at its leisure (in a work queue, since Linux 6.9).
    """
    for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        each.close()
