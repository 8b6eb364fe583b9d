"""Terminals for background processes, without the C library, which may ask the name service for a group."""

from __future__ import annotations

import errno
import posix as os

from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.state import state

TIOCSPTLCK, TIOCGPTN = 0x40045431, 0x80045430


def open_terminal(rows: int, cols: int) -> tuple[int, str]:
    """(master, path of the other end)."""
    import fcntl

    try:
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # which says nothing of the disk here
            raise OpFailed("limit", "the slot's terminals are used up") from None
        raise
    try:
        fcntl.ioctl(master, TIOCSPTLCK, (0).to_bytes(4, "little"))
        number = int.from_bytes(fcntl.ioctl(master, TIOCGPTN, b"\0" * 4), "little")
        resize(master, rows, cols)
    except OSError:
        os.close(master)
        raise
    return master, f"/dev/pts/{number}"


def resize(fd: int, rows: int | None, cols: int | None) -> None:
    """Set a terminal's size; None leaves it."""
    import fcntl
    import termios

    old = fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8)
    new_rows = old[:2] if rows is None else rows.to_bytes(2, "little")
    new_cols = old[2:4] if cols is None else cols.to_bytes(2, "little")
    fcntl.ioctl(fd, termios.TIOCSWINSZ, new_rows + new_cols + b"\0" * 4)


def spawn_on_terminal(argv: tuple[str, ...], block: list[bytes], workdir: str, path: str, keep: tuple[int, ...]) -> int:
    """Start a program with a terminal of its own: the first that the leader of a new session opens."""
    environment: dict[bytes, bytes] = {}
    for line in block:
        name, _, value = line.partition(b"=")
        environment[name] = value
    dup2 = os.POSIX_SPAWN_DUP2
    actions = [(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDWR, 0), (dup2, 0, 1), (dup2, 0, 2)]
    actions += [(dup2, fd, fd) for fd in keep]
    os.chdir(workdir)
    state.expose_children()
    try:
        return os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=())
    finally:
        state.protect_self()
        os.chdir("/")
