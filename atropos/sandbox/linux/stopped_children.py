"""Children of a slot's PID 1 that are stopped during their start, between vfork and exec, and so block PID 1.

PID 1 starts programs with vfork and waits in the kernel for the exec. A program of the slot that stops all processes
(SIGSTOP) may stop a child just then, and PID 1, which waits, can't kill it: the program could turn the results of its
own calls into faults of the infrastructure. So could one with a lease (F_SETLEASE) on the file to be executed: opening
it sleeps for up to 45 s (`fs.lease-break-time`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Set as AbstractSet


def kill_stopped_children(pid: int, seen: AbstractSet[int]) -> set[int]:
    """Kill children of a slot's PID 1 that block it: stopped, or asleep before their exec, for a second time.

    Not at the first: it may be over at any moment, and PID 1 takes a child that dies soon after its start for a program
    that did (`SLOW_START_S` of the runner).

    Args:
        pid: PID 1's in this namespace.
        seen: what the last check returned.

    Returns:
        Those that it waits for now.
    """
    status = _stat(pid)
    stuck: set[int] = set()
    if status is None or status[1] != "D":
        return stuck
    for child in children_of(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Before it is looked at: what is killed below is then the very process that was judged.
            handle = os.pidfd_open(child)
            try:
                # before its exec, a child has PID 1's name; those that serve files have another
                if _stat(child) in ((status[0], "T", pid), (status[0], "S", pid)):
                    stuck.add(child)
                    if child in seen:
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
    return stuck


def _stat(pid: int) -> tuple[bytes, str, int] | None:
    """(name, state, parent) of a process; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The last parenthesis: a program may have some in its name (proc_pid_stat(5)).
            head, _, tail = file.read(1024).rpartition(b")")
    except OSError:
        return None
    state, parent, *_ = tail.split()
    return head.partition(b"(")[2], state.decode(), int(parent)


def children_of(pid: int) -> list[int]:
    """The children of a process of one thread, the adopted ones among them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        everything = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [child for child in everything if (status := _stat(child)) is not None and status[2] == pid]
