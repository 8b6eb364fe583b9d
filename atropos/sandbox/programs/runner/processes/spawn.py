"""Starting programs, without a copy of this process."""

from __future__ import annotations

import errno
import os
import select
from _posixsubprocess import fork_exec
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.children import children, process_stat
from atropos.sandbox.programs.runner.loop import IN, now
from atropos.sandbox.programs.runner.signals import signals
from atropos.sandbox.programs.runner.start_failures import ShellHeld, UserRefused
from atropos.sandbox.programs.runner.state import state

if TYPE_CHECKING:
    from atropos.sandbox.programs.runner.users import Identity

SLOW_START_S = 0.1
START_PATIENCE_S = 2.0


def spawn(
    argv: tuple[str, ...],
    block: list[bytes],
    workdir: str,
    stdio: tuple[int, int, int],
    keep: tuple[int, ...],
    identity: Identity | None,
    terminal: str | None,
) -> int:
    """Start a program in a session of its own, by the C part of `subprocess`.

    For root and without a terminal it uses vfork: nothing of this process is copied, and by the time vfork returns, the
    child has become the program or written its report. Otherwise it forks, and a pipe is closed when the child has done so.
    """
    if identity is not None and identity.uid == identity.gid == 0:
        identity = None  # as this process is
    uid, gid, groups = (identity.uid, identity.gid, identity.groups) if identity else (None, None, None)
    forks = bool(identity or terminal)
    # of the pipe that `subprocess` would have here, the child closes the other end: with vfork any descriptor does
    other_end, report = os.pipe2(os.O_CLOEXEC) if forks else (children.wake, state.exec_report)
    kept = tuple(sorted((report, *keep)))
    before_exec = (lambda: control_terminal(terminal)) if terminal else None
    started = now()
    state.expose_children()
    try:
        pid = fork_exec(
            *(argv, candidates(argv[0], block), False, kept, workdir, block),
            *(stdio[0], -1, -1, stdio[1], -1, stdio[2], other_end, report, False, True, -1, gid, groups, uid, -1),
            before_exec,  # pyright: ignore[reportArgumentType]
            True,
        )
    except BaseException:
        if forks:
            os.close(other_end)
        raise
    finally:
        state.protect_self()
        if forks:
            os.close(report)
    raise_report(read_report(other_end, pid) if forks else take_report(), identity)
    if now() - started > SLOW_START_S and process_name(pid) == process_name(os.getpid()):
        # it was ended from outside, before it was a program, because this process waited for it
        raise ShellHeld(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return pid


def candidates(program: str, block: list[bytes]) -> tuple[bytes, ...]:
    """Where a program may be: by the PATH that it will have, unless it is named with a folder."""
    name = program.encode("utf-8", "surrogateescape")
    if b"/" in name:
        return (name,)
    path = next((entry[5:] for entry in block if entry.startswith(b"PATH=")), b"/usr/bin:/bin")
    return tuple(folder + b"/" + name for folder in path.split(b":") if folder)


def control_terminal(path: str) -> None:
    """Open the terminal in the child: the first one that a session's leader opens controls it."""
    fd = os.open(path, os.O_RDWR)
    for number in range(3):
        os.dup2(fd, number)
    if fd > 2:
        os.close(fd)


def take_report() -> bytes:
    """The report of a child that used vfork."""
    report = os.pread(state.exec_report, 64, 0)
    if report:
        os.ftruncate(state.exec_report, 0)
        os.lseek(state.exec_report, 0, 0)
    return report


def read_report(fd: int, pid: int) -> bytes:
    """The report of a child that was forked: nothing once it has become the program."""
    poll = select.poll()
    poll.register(fd, IN)
    try:
        report = b""
        while poll.poll(START_PATIENCE_S * 1000):
            if not (piece := os.read(fd, 64)):
                return report
            report += piece  # a child writes it in pieces
        os.kill(pid, signals.SIGKILL)
        raise ShellHeld(errno.EAGAIN, os.strerror(errno.EAGAIN))
    finally:
        os.close(fd)


def raise_report(report: bytes, identity: Identity | None) -> None:
    """Raises the error that a child reported, as `OSError:<number>:<'noexec', when it was before the exec>`."""
    if not report:
        return
    _, code, place = report.split(b":", 2)
    number = int(code, 16)
    if identity is not None and place == b"noexec" and number in (errno.EINVAL, errno.EPERM):
        raise UserRefused(number, os.strerror(number))
    raise OSError(number, os.strerror(number))


def process_name(pid: int) -> bytes:
    """The name of a process: of one that ended before its exec, its parent's."""
    return process_stat(pid).rpartition(b")")[0].partition(b"(")[2]
