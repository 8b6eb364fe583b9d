"""Calls to the kernel that no module of the standard library makes."""

from __future__ import annotations

import _ctypes  # the package around it would cost 2 MB a slot for the calls made here
import os
from typing import NoReturn

from atropos.sandbox.programs.runner.signals import signals

PR_SET_DUMPABLE, PTRACE_DETACH = 4, 17


def c_function(name: str) -> int:
    """The address of a function of the C library."""
    return _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # pyright: ignore[reportArgumentType]


def end_process(code: int) -> NoReturn:
    """End this process and nothing else: no handlers, no buffers."""
    os._exit(code)


def deny_tracing() -> bool:
    """Forbid every process of this slot to trace or read this one."""
    return _ctypes.call_function(c_function("prctl"), (PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0


def untrace(pid: int, number: int) -> None:
    """Let a child that asked its parent to trace it and has stopped go on, with the signal that stopped it."""
    carried = 0 if number == signals.SIGTRAP else number
    if _ctypes.call_function(c_function("ptrace"), (PTRACE_DETACH, pid, 0, carried)) != 0:
        try:
            os.kill(pid, signals.SIGKILL)
        except OSError:
            pass
