"""The event loop: descriptors with a function each, and timers."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

IN, OUT = select.POLLIN, select.POLLOUT
WRITABLE = select.POLLOUT | select.POLLERR
"""A full pipe whose reader has closed it reports an error, not room. Its writer must be called, too."""
CHUNK = 65536
LONGEST_S = 3600.0
"""Longest wait of the loop: the kernel takes no more than 24 days."""
now = time.monotonic


class Loop:
    """Descriptors with a function each, and timers."""

    def __init__(self) -> None:
        self.poll = select.poll()  # not epoll: its watches are counted per user, and other slots can use them all up
        self.readers: dict[int, Callable[[], object]] = {}
        self.writers: dict[int, Callable[[], object]] = {}
        self.timers: dict[int, tuple[float, Callable[[], object]]] = {}
        self.serial = 0

    def watch(self, fd: int, function: Callable[[], object]) -> None:
        """Call `function` whenever `fd` can be read."""
        self.readers[fd] = function
        self.register(fd)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        if self.readers.pop(fd, None) is not None:
            self.register(fd)

    def watch_room(self, fd: int, function: Callable[[], object]) -> None:
        """Call `function` whenever `fd` can be written to."""
        self.writers[fd] = function
        self.register(fd)

    def unwatch_room(self, fd: int) -> None:
        """Undo `watch_room`."""
        if self.writers.pop(fd, None) is not None:
            self.register(fd)

    def register(self, fd: int) -> None:
        """Wait for what has a function, and for nothing else."""
        events = (IN if fd in self.readers else 0) | (OUT if fd in self.writers else 0)
        if events:
            self.poll.register(fd, events)
        else:
            self.poll.unregister(fd)

    def later(self, when: float, function: Callable[[], object]) -> int:
        """Call `function` at a time of `now`; the number is the timer's key in `timers`."""
        self.serial += 1
        self.timers[self.serial] = (when, function)
        return self.serial

    def run(self) -> None:
        """Run until the process ends."""
        poll, readers, writers, timers = self.poll.poll, self.readers, self.writers, self.timers
        while True:
            timeout = None
            if timers:
                timeout = min(max(0.0, min(when for when, _ in timers.values()) - now()), LONGEST_S) * 1000
            for fd, event in poll(timeout):
                if event & WRITABLE and fd in writers:
                    writers[fd]()
                # POLLHUP and POLLERR count as readable: the read then tells what happened.
                if event & ~OUT and fd in readers:
                    readers[fd]()
            if timers:
                moment = now()
                # A list, since timers set and remove each other; one that was removed meanwhile is not called.
                for key in [key for key, (when, _) in timers.items() if when <= moment]:
                    timer = timers.pop(key, None)
                    if timer is not None:
                        timer[1]()


loop = Loop()
