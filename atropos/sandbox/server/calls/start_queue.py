"""Which lease starts a command next, where more are to start than the CPUs can run.

The kernel shares the CPUs evenly between slots, but not from one moment to the next: one slot may run command after
command while another waits 50 ms to begin (docs/decisions/0012). So few commands start at the same time, and of the
leases that wait, the one goes first whose last command started longest ago. A command that takes its time holds up
nobody: it counts as starting for `STARTING_S` only.
"""

from __future__ import annotations

import asyncio
import os
import time
from operator import attrgetter
from typing import Protocol

PER_CPU = 2
"""Commands that start at the same time, for each CPU. With three, the kernel's order shows again."""
STARTING_S = 0.01
"""Longest that a command counts as starting, in seconds. On a machine with nothing else to do, a short one takes 2
ms."""


class Starter(Protocol):
    """What starts commands: the calls of one lease."""

    started_at: float
    """When its last command started, or else itself: seconds of `time.perf_counter`."""

    def start_next(self) -> None:
        """Called when its turn has come: to start its next command, after `admit`."""


class StartQueue:
    """The commands of one server that are starting, and what waits to start more.

    Args:
        most: commands that start at the same time; by default `PER_CPU` for each CPU of this process.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most or PER_CPU * len(os.sched_getaffinity(0))
        self._starting: dict[object, float] = {}
        """When each command started, the oldest first."""
        self._waiting: dict[Starter, None] = {}
        self._turn: Starter | None = None
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, starter: Starter) -> bool:
        """Whether `starter` may start a command now; if not, its `start_next` is called when it may."""
        if starter is self._turn:
            self._turn = None
            return True
        # Not past those that wait, even where there is room: they come first.
        if not self._waiting and self._has_room():
            return True
        self._waiting[starter] = None
        self._set_timer()
        return False

    def started(self, starter: Starter, command: object) -> None:
        """`starter`, once admitted, starts `command`."""
        self._starting[command] = starter.started_at = time.perf_counter()

    def ended(self, command: object) -> None:
        """`command` has ended, if it ever started."""
        if self._starting.pop(command, None) is not None:
            self._give_turns()

    def _has_room(self) -> bool:
        # Looked through only when it is full; until then nobody needs to know which are over.
        if len(self._starting) >= self._most:
            over = time.perf_counter() - STARTING_S
            for command in [each for each, started_at in self._starting.items() if started_at <= over]:
                del self._starting[command]
        return len(self._starting) < self._most

    def _give_turns(self) -> None:
        while self._waiting and self._has_room():
            self._turn = min(self._waiting, key=attrgetter("started_at"))
            del self._waiting[self._turn]
            self._turn.start_next()
            # It may have had nothing to start any more.
            self._turn = None

    def _set_timer(self) -> None:
        if self._timer is None:
            oldest = min(self._starting.values(), default=0.0)
            # The moment when the oldest no longer counts as starting.
            delay_s = max(0.001, oldest + STARTING_S - time.perf_counter())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._give_turns()
        if self._waiting:
            self._set_timer()
