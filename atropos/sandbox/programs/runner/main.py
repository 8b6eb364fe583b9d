"""The start of PID 1, and the operations that it serves."""

from __future__ import annotations

import gc
import os

from atropos.sandbox.linux.syscalls import PR_SET_DUMPABLE, prctl
from atropos.sandbox.programs.runner.children import children
from atropos.sandbox.programs.runner.files import archives, files, search, streams, unpacking
from atropos.sandbox.programs.runner.frames import OPS, link
from atropos.sandbox.programs.runner.loop import loop
from atropos.sandbox.programs.runner.paths import make_folders
from atropos.sandbox.programs.runner.processes import background, commands, ending
from atropos.sandbox.programs.runner.signals import signals
from atropos.sandbox.programs.runner.state import WORKSPACE, block_of, state

NO_HANDLER = (signals.SIGINT, signals.SIGPIPE, signals.SIGXFSZ, signals.SIGTERM, signals.SIGHUP, signals.SIGUSR1)
"""Without a handler here, which every program started inherits; the kernel drops such a signal where PID 1 gets it."""


SPECIAL = (
    *("/proc", "/proc/sys", "/dev", "/dev/pts", "/sys", "/sys/devices/system", "/sys/fs/cgroup"),
    *("/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu.max"),
    *("/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/cpuset"),
    *("/.atropos", "/etc/ld.so.preload"),
)
"""Mounts of the slot itself."""


def op_init(call: int, environment: dict[str, str], output_bytes: int, wall_s: float) -> None:
    """Set this slot up by the server's first message.

    With it comes this process's own oom_score_adj: from inside nobody, this process included, opens it.
    """
    if link.descriptors:
        state.oom = link.descriptors.pop(0)
        state.own_score = os.pread(state.oom, 16, 0)
    state.environment, state.output_bytes, state.wall_s = environment, output_bytes, wall_s
    state.block = block_of(environment)
    for path in SPECIAL:
        try:
            state.special.add(os.stat(path).st_dev)
        except OSError:
            pass
    try:
        # An image need not have it, and commands start there.
        make_folders(WORKSPACE)
    except OSError:
        pass
    for fd in (0, 1, 2):  # until here, errors reached the server
        os.dup2(state.null, fd, inheritable=True)
    link.answer(call, "ready", {})


def op_limits(call: int, environment: dict[str, str], wall_s: float) -> None:
    """Replace these settings of `op_init` with the limits of a lease."""
    state.environment |= environment
    state.block = block_of(state.environment)
    state.wall_s = wall_s
    link.answer(call, "done", {})


def ignore_signal(number: int, frame: object) -> None:
    """Do nothing on SIGCHLD: having a handler makes Python write a byte to the wakeup pipe."""


OPS.update(init=op_init, limits=op_limits)
for module in (archives, background, commands, ending, files, search, streams, unpacking):
    OPS.update({name[3:]: handler for name, handler in vars(module).items() if name.startswith("op_")})


def main() -> None:
    """Serve the slot until the server goes."""
    prctl(PR_SET_DUMPABLE, 0)  # no process of this slot may trace or read this one
    for number in NO_HANDLER:
        # a signal from inside that has no handler is dropped for PID 1; Python has one for SIGINT, which would end it
        signals.signal(number, signals.SIG_DFL)
    state.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    children.wake, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signals.set_wakeup_fd(written, warn_on_full_buffer=False)
    signals.signal(signals.SIGCHLD, ignore_signal)
    os.umask(0o022)
    os.chdir("/")
    # before the server's socket, since the loop keeps this order: a command must not find processes that ended before
    # it
    loop.watch(children.wake, children.reap)
    link.open()
    children.reap()  # what ended before there was a handler: the program that paused, on a busy machine
    gc.freeze()
    # After the freeze: what was loaded is never looked at again, so that its pages stay shared.
    gc.enable()
    loop.run()
