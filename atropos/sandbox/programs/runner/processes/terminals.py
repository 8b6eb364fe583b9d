"""Terminals for background processes, without the C library, which may ask the name service for a group."""

from __future__ import annotations

import errno
import fcntl
import os
import termios

from atropos.sandbox.programs.runner.failures import OpFailed

TIOCSPTLCK, TIOCGPTN = 0x40045431, 0x80045430


def open_terminal(rows: int, cols: int) -> tuple[int, str]:
    """(master, path of the other end)."""
    try:
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # it says nothing about the disk
            raise OpFailed("limit", "the slot's terminals are used up") from None
        raise
    try:
        # What unlockpt(3) and ptsname(3) do: unlock the other end, and ask for its number.
        fcntl.ioctl(master, TIOCSPTLCK, (0).to_bytes(4, "little"))
        number = int.from_bytes(fcntl.ioctl(master, TIOCGPTN, b"\0" * 4), "little")
        resize(master, rows, cols)
    except OSError:
        os.close(master)
        raise
    return master, f"/dev/pts/{number}"


def resize(fd: int, rows: int | None, cols: int | None) -> None:
    """Set a terminal's size; None leaves it."""
    old = fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8)
    new_rows = old[:2] if rows is None else rows.to_bytes(2, "little")
    new_cols = old[2:4] if cols is None else cols.to_bytes(2, "little")
    fcntl.ioctl(fd, termios.TIOCSWINSZ, new_rows + new_cols + b"\0" * 4)
