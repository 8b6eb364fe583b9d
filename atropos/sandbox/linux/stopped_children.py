"""Programs that hold PID 1 of a slot up: stopped in the moment of their start, before they are what they will be.

PID 1 starts programs with vfork and waits in the kernel until the child has become the program. A program of the slot that
stops everything it finds (SIGSTOP) may catch a child just then; PID 1 can't end it, because it waits. Without this, a
program could turn the results of its own calls into faults of the infrastructure. The same goes for one that holds a lease
(F_SETLEASE) on the file that is to be executed: who opens it sleeps for up to 45 s (`fs.lease-break-time`).
"""

from __future__ import annotations

import contextlib
import os
import signal


def kill_stopped_children(pid: int) -> int:
    """Kill the children of a slot's PID 1 that were stopped, or sleep, before they became programs, and for which it waits.

    Args:
        pid: PID 1, as this process sees it.

    Returns:
        How many there were.
    """
    found = _stat(pid)
    if found is None or found[1] != "D":
        return 0
    released = 0
    for child in _children(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = os.pidfd_open(child)
            try:
                # by the name: what has become a program bears its own
                if _stat(child) in ((found[0], "T", pid), (found[0], "S", pid)):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    released += 1
            finally:
                os.close(handle)
    return released


def _stat(pid: int) -> tuple[bytes, str, int] | None:
    """(name, state, parent) of a process that is there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            head, _, tail = file.read(1024).rpartition(b")")
    except OSError:
        return None
    state, parent, *_ = tail.split()
    return head.partition(b"(")[2], state.decode(), int(parent)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        everything = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [child for child in everything if (found := _stat(child)) is not None and found[2] == pid]
