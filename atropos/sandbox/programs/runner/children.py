"""Processes of the slot: reaping, finding, signalling, and making room for new ones."""

from __future__ import annotations

import os
import time
from ctypes import c_void_p
from typing import TYPE_CHECKING

from atropos.sandbox.linux.syscalls import libc
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import loop, now
from atropos.sandbox.programs.runner.signals import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol, TypeVar

    Started = TypeVar("Started")

    class Child(Protocol):
        """What a process was started for."""

        def ended(self, code: int) -> None:
            """Called when it was reaped, with its exit code (-N: by signal N)."""


MAX_REAPED = 256
"""Most ended processes that are reaped before waiting calls are answered."""
KILL_PATIENCE_S = 5.0
DEATH_S = 0.5
"""Longest that a start waits for the processes of a call that was killed, as with its time-out."""
PTRACE_DETACH = 17


class Children:
    """The children that calls started, by pid."""

    def __init__(self) -> None:
        self.running: dict[int, Child] = {}
        self.killed_at = -DEATH_S
        """When a session was last killed."""
        self.alone = False
        """Whether this process was the slot's only one when it last reaped."""
        self.quiescing: list[tuple[int, int]] = []
        self.wake = -1
        """A pipe that a signal writes to."""

    def reap(self) -> None:
        """Reap every ended child: those that calls started, and orphans."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        ended: list[tuple[Child, int]] = []
        self.alone = False
        # Bounded: a fork bomb's children end faster than they can be reaped, and answers would wait for ever.
        for _ in range(MAX_REAPED):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alone = True
                break
            if pid == 0:
                break
            # waitpid without WUNTRACED sees only traced children stop: this one asked for it (PTRACE_TRACEME).
            if os.WIFSTOPPED(status):
                untrace(pid, os.WSTOPSIG(status))
                continue
            child = self.running.pop(pid, None)
            if child is not None:
                ended.append((child, status))
        else:
            loop.later(now(), self.reap)
        for child, status in ended:
            child.ended(os.waitstatus_to_exitcode(status))
        if self.alone:
            for call, count in self.quiescing:
                link.answer(call, "done", {"count": count})
            self.quiescing = []


children = Children()


def untrace(pid: int, number: int) -> None:
    """Continue a stopped child that asked its parent to trace it, with the signal that stopped it."""
    carried = 0 if number == signals.SIGTRAP else number
    if libc.ptrace(PTRACE_DETACH, pid, None, c_void_p(carried)) != 0:
        signal_each((pid,), signals.SIGKILL)


def process_stat(pid: int | str) -> bytes:
    """The kernel's line about a process; nothing of one that is gone."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1024)
    except OSError:
        return b""
    finally:
        os.close(fd)


def pids(wanted: Callable[[int, int, int], bool]) -> list[int]:
    """Pids of the live processes in /proc for which `wanted(pid, session, group)` is true; no zombies."""
    result: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:  # out of descriptors
        return result
    for name in names:
        if name.isdigit() and name != "1":
            fields = process_stat(name).rpartition(b")")[2].split()
            # Fields counted from the state, since the name before it may have spaces (proc_pid_stat(5)).
            if fields and fields[0] != b"Z" and wanted(int(name), int(fields[3]), int(fields[2])):
                result.append(int(name))
    return result


def session_members(session: int, *, but_group: int = -1) -> list[int]:
    """Pids of all processes in a session, but those of one process group."""
    return pids(lambda _, its_session, group: its_session == session and group != but_group)


def signal_each(targets: Iterable[int], number: int) -> None:
    """Signal each process that is still there."""
    for pid in targets:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def signal_session(session: int, number: int) -> None:
    """Signal the first process group at once (nothing forks out of it meanwhile), then the session's other groups."""
    try:
        os.killpg(session, number)
    except OSError:
        pass
    kills = number == signals.SIGKILL
    if kills:
        children.killed_at = now()
    # Other groups may fork while they are read: killed until none is left, or the bound says that one outruns us.
    for _ in range(20 if kills else 1):
        members = session_members(session, but_group=-1 if kills else session)
        if not members:
            return
        signal_each(members, number)


def with_room(start: Callable[[], Started]) -> Started:
    """Return what `start` returns. At the limit of processes, first kill what ended commands left running, if anything.

    The dead hold their places until they are reaped: so it waits, also for those of a call that was killed just now.
    """
    try:
        return start()
    # EAGAIN of fork: the limit of processes.
    except BlockingIOError:
        patience = now() + KILL_PATIENCE_S
    while True:
        # Each round: what survived the last one has forked since.
        ended = end_leftovers()
        children.reap()
        try:
            return start()
        except BlockingIOError:
            dying = now() < children.killed_at + DEATH_S
            if not (ended or dying) or now() > patience:
                raise
        time.sleep(0.002)


def leftovers() -> list[int]:
    """Pids of all processes but this one, running commands, background processes, and the sessions of those two."""
    running = children.running
    # A command's pid is its session's number, as each is started in a session of its own.
    return pids(lambda pid, session, _: pid not in running and session not in running)


def end_leftovers() -> bool:
    """Kill what ended commands left running, even a fork bomb; keep the children of calls.

    Whether there was anything.
    """
    # kill(-1) is atomic against forks; with calls running, each process has to be chosen.
    if not children.running:
        kill_all()
        return True
    stopped: set[int] = set()
    # stopped processes cannot fork but still count: after a round or two the limit stops the bomb
    for _ in range(50):
        running = [pid for pid in leftovers() if pid not in stopped]
        signal_each(running, signals.SIGSTOP)
        stopped.update(running)
        if not running:
            break
    signal_each(stopped, signals.SIGKILL)
    return bool(stopped)


def kill_all() -> None:
    """Kill every other process, in one system call, so that none can escape by forking."""
    try:
        os.kill(-1, signals.SIGKILL)
    except ProcessLookupError:
        pass
