"""Locks on a machine's files, which end with their process however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

# A blocking flock would take a thread for each that waits, and could not be cancelled.
POLL_S = 0.1


@contextlib.asynccontextmanager
async def locked(path: Path, waiting: Callable[[], None]) -> AsyncGenerator[None]:
    """One holder of a file at a time, over all processes of the machine; the file is gone when nobody holds it.

    Args:
        path: made if it is missing.
        waiting: called again and again while another one holds it; what it raises ends the wait.
    """
    while True:
        # Opened anew in each round: O_CLOEXEC, as a child that inherits the open file would hold the lock on
        # (flock(2)).
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not try_lock(fd):
                waiting()
                await asyncio.sleep(POLL_S)
            if not is_still(path, fd):  # its last holder removed it
                continue
            try:
                yield
            finally:
                # Before the lock ends, so that it can only be this holder's; those that wait find it gone by
                # `is_still`.
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(fd)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file, alone or with others that share it; False when it is locked otherwise."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still(path: Path, fd: int) -> bool:
    """Whether a name leads to what is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
