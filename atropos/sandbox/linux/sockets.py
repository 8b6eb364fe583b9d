"""A bound on a slot's open sockets, whose queues use kernel memory that cgroups count only in part.

Unread answers of the kernel (netlink) and errors (ICMP, time stamps) are charged to no cgroup: 60 sockets held 400 MiB
in a slot of 256. A socket holds as much as its receive buffer, which the slot's seccomp filter keeps at the kernel's
default (`net.core.rmem_default`), and a process may open `open_files` sockets.
"""

from __future__ import annotations

import socket

from atropos.sandbox.linux.sysctl import sysctl

_DEFAULT_BYTES = 212_992
_FEWEST = 256


def most(memory_bytes: int) -> int:
    """How many sockets a slot may have open: their buffers hold as much as its memory limit."""
    each = sysctl("net/core/rmem_default", _DEFAULT_BYTES)  # which only the first network namespace shows
    return max(_FEWEST, memory_bytes // max(each, 4096))


def used(pid: int) -> int:
    """How many are open in the network namespace of a process, queued ones included; 0 when the process has ended."""
    try:
        with open(f"/proc/{pid}/net/sockstat", "rb") as file:
            first = file.readline().split()
    except OSError:
        return 0
    return int(first[2]) if first[:2] == [b"sockets:", b"used"] else 0


def collect_garbage() -> None:
    """Make the kernel close sockets that only refer to one another from their queues.

    The kernel collects them when a Unix socket is closed (since Linux 6.9 later, in a work queue).
    """
    for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        each.close()
