"""Starting programs, without a copy of this process."""

from __future__ import annotations

import errno
import os
import select
import time
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.children import process_stat
from atropos.sandbox.programs.runner.loop import IN, now
from atropos.sandbox.programs.runner.signals import signals
from atropos.sandbox.programs.runner.start_failures import ShellHeld, UserRefused
from atropos.sandbox.programs.runner.state import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from atropos.sandbox.programs.runner.users import Identity

SLOW_START_S = 0.1
START_PATIENCE_S = 2.0


def spawn(
    argv: tuple[str, ...],
    block: dict[bytes, bytes],
    workdir: str,
    stdio: tuple[int, int, int],
    keep: tuple[int, ...],
    identity: Identity | None,
    terminal: str | None,
) -> int:
    """Start a program in a session of its own.

    For root and without a terminal by `posix_spawn`, which uses vfork: nothing of this process is copied, and when it
    returns, the child has become the program, or has failed. Otherwise it forks, and a pipe is closed when the child
    has done so.
    """
    if identity is not None and identity.uid == identity.gid == 0:
        identity = None  # as this process is
    started = now()
    # Before the fork: the score is inherited, and inside nobody can change it afterwards (decision 17).
    state.expose_children()
    try:
        if identity or terminal:
            pid = forked(argv, block, workdir, stdio, keep, identity, terminal)
        else:
            pid = spawned(argv, block, workdir, stdio, keep)
    finally:
        state.protect_self()
    if now() - started > SLOW_START_S and ended_before_exec(pid):
        # it was ended from outside, because this process waited for it
        raise ShellHeld(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return pid


def spawned(
    argv: tuple[str, ...], block: dict[bytes, bytes], workdir: str, stdio: tuple[int, int, int], keep: tuple[int, ...]
) -> int:
    """Start it as this process is, and in its folder, which this process enters for that."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
    actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in keep]  # on itself: it stays open
    # posix_spawn has no action for the folder; PID 1 is single-threaded, so that nothing else sees it there.
    os.chdir(workdir)
    try:
        return first_of(
            candidates(argv[0], block),
            lambda path: os.posix_spawn(path, argv, block, file_actions=actions, setsid=True),
        )
    finally:
        os.chdir("/")


def forked(
    argv: tuple[str, ...],
    block: dict[bytes, bytes],
    workdir: str,
    stdio: tuple[int, int, int],
    keep: tuple[int, ...],
    identity: Identity | None,
    terminal: str | None,
) -> int:
    """Start it as another user, or on a terminal that shall control its session.

    The child reports why it can't: the error's number, and `R` where the kernel refused the user.
    """

    def become() -> None:
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        for fd in keep:
            os.set_inheritable(fd, True)
        os.chdir(workdir)
        # Before the terminal is opened: only a session's leader without one gets it as its controlling terminal.
        os.setsid()
        if identity is not None:
            identity.take()
        if terminal is not None:
            control_terminal(terminal)
        first_of(candidates(argv[0], block), lambda path: os.execve(path, argv, block))  # noqa: S606

    read, report = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            in_child(become, report)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(report)
    raise_report(read_report(read, pid))
    return pid


def in_child(become: Callable[[], None], report: int) -> None:
    """Become the program, or report why not and end."""
    try:
        signals.set_wakeup_fd(-1)
        become()
    except BaseException as error:
        number = getattr(error, "errno", None) or errno.EINVAL
        # An exec that succeeds closes the pipe (O_CLOEXEC): an empty report is success.
        os.write(report, b"%dR" % number if isinstance(error, UserRefused) else b"%d" % number)
    finally:
        os._exit(255)


def candidates(program: str, block: dict[bytes, bytes]) -> tuple[bytes, ...]:
    """Where a program may be: by the PATH that it will have, unless it is named with a folder."""
    name = program.encode("utf-8", "surrogateescape")
    if b"/" in name:
        return (name,)
    return tuple(folder + b"/" + name for folder in block.get(b"PATH", b"/usr/bin:/bin").split(b":") if folder)


def first_of(paths: tuple[bytes, ...], start: Callable[[bytes], int]) -> int:
    """`start` of the first of these programs that exists; like a shell, skips those that can't be executed or seen."""
    failed: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in paths:
        try:
            os.stat(path)  # it costs less than a start that fails
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if len(paths) == 1:
                raise
            continue  # a folder of PATH that this user may not search
        try:
            return start(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            failed = error
    raise failed


def control_terminal(path: str) -> None:
    """Open the terminal in the child: the first one that a session's leader opens controls it."""
    fd = os.open(path, os.O_RDWR)
    for number in range(3):
        os.dup2(fd, number)
    if fd > 2:
        os.close(fd)


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
        # Stopped by another program, or asleep on a lease: waiting longer would hold up every call of the slot.
        os.kill(pid, signals.SIGKILL)
        raise ShellHeld(errno.EAGAIN, os.strerror(errno.EAGAIN))
    finally:
        os.close(fd)


def raise_report(report: bytes) -> None:
    """Raise the error that a child reported."""
    if report:
        number = int(report.removesuffix(b"R"))
        raise (UserRefused if report.endswith(b"R") else OSError)(number, os.strerror(number))


def ended_before_exec(pid: int) -> bool:
    """Whether a child ended before it was a program: it has its parent's name still.

    So has one that lives, for a moment: the kernel lets the parent go on before it names what the child has become.
    """
    own, _ = name_and_state(os.getpid())
    patience = now() + SLOW_START_S
    while True:
        name, does = name_and_state(pid)
        if name != own or now() > patience:
            return False
        if does in (b"Z", b"X"):
            return True
        time.sleep(0.0005)


def name_and_state(pid: int) -> tuple[bytes, bytes]:
    """The name of a process, and what it does."""
    before, _, after = process_stat(pid).rpartition(b")")
    return before.partition(b"(")[2], after[1:2]
