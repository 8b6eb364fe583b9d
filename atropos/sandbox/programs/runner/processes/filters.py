"""Filters that an ended command left behind, as `tee` in `exec > >(tee log)`: what they still print belongs to it.

A filter is a process that reads a pipe, and whose output is the command's, or a pipe that another filter reads. It
comes to its end by itself once nobody writes to its pipe any more; a background process such as `sleep 8 &` or a server
does not, and nothing waits for one that waits itself. While it computes, as `seq 3 &` and a server that starts, it is
read on for a moment. A filter that writes its output elsewhere (`tee >(gzip > file)`) still has the command's
output for its errors; it is waited for as well, but not for long.
"""

from __future__ import annotations

import os
import select
from math import inf
from stat import S_ISFIFO
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.children import process_stat
from atropos.sandbox.programs.runner.loop import IN, loop, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Place = tuple[int, int]
    """Device and inode, which identify a pipe or terminal."""

QUIET_S = 0.3
"""How long filters may print nothing while the session doesn't compute; and how long it may compute for filters whose
input goes on."""
PATIENCE_S = 5.0
"""Longest that filters are waited for."""
JOB_S, JOB_PATIENCE_S = 0.1, 2.0
"""How long the session may compute for background processes, and longest that they are read on."""
PAUSES_S = (0.001, 0.02)
"""Between two looks at them: the first pause, which doubles, and the longest."""
CUT = b"\n[... the command has ended; what its filters printed later is missing ...]\n"
TICKS = os.sysconf("SC_CLK_TCK")
"""In a second, as the kernel counts what processes computed."""
PF_FORKNOEXEC = 0x40
"""Of a process that has not executed a program since its fork (<linux/sched.h>)."""
IDLE, JOB, OPEN, ENDING = range(4)
"""What filters do: they wait for input, or there are none; the same, while a background process computes; they have
input, and may get more; they come to their end."""


class Filters:
    """Waits until the filters of an ended command have printed what they had to print."""

    def __init__(
        self,
        session: int,
        outputs: Iterable[Place],
        own_input: Place | None,
        progress: Callable[[], int | None],
        ended: Callable[[bool], None],
        pipes: Callable[[], list[int]],
        until: float = inf,
        behind: Callable[[], bool] = bool,
    ) -> None:
        """Look at them now; `ended` may be called at once.

        Args:
            session: the command's.
            outputs: where it printed.
            own_input: the pipe that it had as its input.
            progress: how much has been read of all outputs; None: nobody can print to them any more.
            ended: called once, with whether something that still printed was cut off.
            pipes: descriptors of its outputs that are open.
            until: when to give up, at the latest.
            behind: whether a caller has to read first, so that filters wait for it.
        """
        self.session, self.outputs, self.own_input = session, frozenset(outputs), own_input
        self.progress, self.ended, self.pipes, self.behind = progress, ended, pipes, behind
        self.began = self.active = now()
        self.until = min(until, self.active + PATIENCE_S)
        self.ticks = 0
        self.read = progress()
        self.pause = PAUSES_S[0]
        self.timer = 0
        self.look()

    def look(self) -> None:
        """Look at them, and once more after a pause while they work."""
        read = self.progress()
        work, ticks = (IDLE, 0) if read is None else self.look_twice()
        moment = now()
        printed = read is not None and (read != self.read or has_input(self.pipes()))
        if ticks or printed:
            self.active, self.read = moment, read
        # The filters can't go on while the caller reads nothing: time runs only while they could.
        if self.behind():
            self.active, self.until = moment, moment + PATIENCE_S
        if work == IDLE and printed:  # who waits for room in a full pipe sleeps, too
            work = JOB
        over = moment >= min(self.until, self.active + QUIET_S)
        if work in (JOB, OPEN):
            self.ticks = self.ticks or ticks
            over = over or ticks - self.ticks >= (QUIET_S if work == OPEN else JOB_S) * TICKS
        if work == JOB:
            self.ticks = ticks if printed else self.ticks
            over = over or moment >= self.began + JOB_PATIENCE_S
        if work == IDLE or over:
            self.ended(work == ENDING or printed)
            return
        self.timer = loop.later(moment + self.pause, self.look)
        self.pause = min(2 * self.pause, PAUSES_S[1])

    def look_twice(self) -> tuple[int, int]:
        """`at_work`, asked again where it finds nothing: a shell may wait for a program that has just ended."""
        state = at_work(self.session, self.outputs, self.own_input)
        return at_work(self.session, self.outputs, self.own_input) if state[0] == IDLE else state

    def stop(self) -> None:
        """Wait no longer."""
        loop.timers.pop(self.timer, None)
        self.ended(True)


def at_work(session: int, outputs: frozenset[Place], own_input: Place | None) -> tuple[int, int]:
    """What the filters of these outputs do; if the command's session computes, 1 and its ticks of CPU time.

    A process of another user can't be looked into: in the session it counts as a filter while it computes.
    """
    work, computes, ticks = IDLE, False, 1
    readers: dict[Place, list[tuple[str, Place]]] = {}
    """By where they print: pid, and what it reads."""
    busy: set[Place] = set()
    """Where those print that run."""
    for name in os.listdir("/proc"):
        fields = process_stat(name).rpartition(b")")[2].split() if name.isdigit() and name != "1" else ()
        # A zombie prints nothing any more.
        if not fields or fields[0] == b"Z":
            continue
        member = int(fields[3]) == session
        # R or D: it computes, or waits for a disk.
        runs = fields[0] in b"RD" and member
        forked = runs and bool(int(fields[6]) & PF_FORKNOEXEC)
        computes = computes or runs
        ticks += (int(fields[11]) + int(fields[12])) * member
        try:
            source, *targets = [os.stat(f"/proc/{name}/fd/{fd}") for fd in range(3)]
            starts = forked and has_pipe(name, {*outputs, own_input})
        except FileNotFoundError:  # it is ending; or it is a shell that is arranging its descriptors
            work = max(work, OPEN if forked else JOB if runs else IDLE)
            continue
        except OSError:
            work = max(work, OPEN if runs else IDLE)
            continue
        place = source.st_dev, source.st_ino
        into, beside = ((target.st_dev, target.st_ino) for target in targets)
        if runs:
            busy.add(into)
        # The pipe that the command itself had as its input is the caller's, who may keep it open for ever.
        if S_ISFIFO(source.st_mode) and place != own_input:
            readers.setdefault(into, []).append((name, place))
            if runs and into in outputs:
                work = max(work, OPEN)
            if into not in outputs and beside in outputs:
                work = max(work, min(OPEN, input_of(name)))
        elif into in outputs or beside in outputs:
            work = max(work, ENDING if starts else JOB if runs else IDLE)
    # From the outputs upwards: a filter counts if what it prints ends there, through however many pipes.
    waiting, seen = list(outputs), set(outputs)
    while waiting:
        for pid, place in readers.get(waiting.pop(), ()):
            work = max(work, input_of(pid))
            if place not in seen:
                seen.add(place)
                waiting.append(place)
    if busy & seen:
        work = max(work, JOB)
    return work, ticks if computes else 0


def has_input(fds: list[int]) -> bool:
    """Whether one of these can be read."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, IN)
    return any(event & IN for _, event in poll.poll(0))


def has_pipe(pid: str, known: set[Place | None]) -> bool:
    """Whether a process that a shell has just forked has another pipe, which will be its input."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        status = os.stat(f"/proc/{pid}/fd/{fd}")
        if S_ISFIFO(status.st_mode) and (status.st_dev, status.st_ino) not in known:
            return True
    return False


def input_of(pid: str) -> int:
    """What the pipe that a process reads says of it."""
    try:
        # A second reader of the same pipe: it takes nothing, and poll says whether a writer is left.
        fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return IDLE
    try:
        poll = select.poll()
        poll.register(fd, IN)
        events = sum(event for _, event in poll.poll(0))
    finally:
        os.close(fd)
    if events & select.POLLHUP:
        return ENDING
    return OPEN if events & IN else IDLE


def place_of(file: int | str) -> Place:
    """Which pipe or terminal a descriptor or path leads to."""
    status = os.stat(file)
    return status.st_dev, status.st_ino
