"""Pipes of ended commands that background children still hold."""

from __future__ import annotations

import os

from atropos.sandbox.programs.runner.loop import CHUNK, loop

MAX_ORPHAN_PIPES = 256
"""Most of them; a quarter of this slot's descriptors where that is less."""
orphan_pipes: dict[int, bool] = {}


def adopt(fd: int) -> None:
    """Discard what a pipe brings until its last writer is gone; at the bound, close the oldest pipe."""
    loop.unwatch(fd)
    most = min(MAX_ORPHAN_PIPES, os.sysconf("SC_OPEN_MAX") // 4)
    while len(orphan_pipes) >= most:
        # Its writers get SIGPIPE then; without a bound a loop of commands would use up PID 1's descriptors.
        close_orphan(next(iter(orphan_pipes)))
    orphan_pipes[fd] = True

    def sink() -> None:
        try:
            if os.read(fd, CHUNK):
                return
        except BlockingIOError:
            return
        close_orphan(fd)

    loop.watch(fd, sink)


def close_orphan(fd: int) -> None:
    """Stop reading it."""
    orphan_pipes.pop(fd, None)
    loop.unwatch(fd)
    os.close(fd)
