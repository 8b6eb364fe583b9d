"""Calls to the kernel that no module of the standard library makes."""

from __future__ import annotations

import os
from ctypes import c_void_p

from atropos.sandbox.linux.syscalls import PR_SET_DUMPABLE, libc, prctl
from atropos.sandbox.programs.runner.signals import signals

PTRACE_DETACH = 17


def deny_tracing() -> bool:
    """Forbid every process of this slot to trace or read this one."""
    try:
        prctl(PR_SET_DUMPABLE, 0)
    except OSError:
        return False
    return True


def untrace(pid: int, number: int) -> None:
    """Let a child that asked its parent to trace it and has stopped go on, with the signal that stopped it."""
    carried = 0 if number == signals.SIGTRAP else number
    if libc.ptrace(PTRACE_DETACH, pid, None, c_void_p(carried)) != 0:
        try:
            os.kill(pid, signals.SIGKILL)
        except OSError:
            pass
