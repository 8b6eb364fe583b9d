"""Opening regular files of the slot without ever waiting, reading and writing them."""

from __future__ import annotations

import os
from stat import S_ISDIR, S_ISREG

from atropos.sandbox.programs.runner.failures import OpFailed, text


def open_at_once(path: str, flags: int, mode: int = 0o644, folder: int | None = None) -> int:
    """Open a file without waiting for a program that holds a lease (F_SETLEASE) on it."""
    try:
        # NONBLOCK for FIFOs and leases; NOCTTY: a terminal of the slot must not become PID 1's.
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode, dir_fd=folder)
    except BlockingIOError:
        raise OpFailed("io", f"a program holds a lease on the file: {text(path)}") from None


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, without blocking on a FIFO, a device or a lease."""
    fd = open_at_once(path, os.O_RDONLY)
    try:
        status = os.fstat(fd)
        check_regular(status, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def check_regular(status: os.stat_result, path: str) -> None:
    """Raises `OpFailed` where a path leads to something else than a regular file."""
    if S_ISDIR(status.st_mode):
        raise OpFailed("is_directory", f"is a directory: {text(path)}")
    if not S_ISREG(status.st_mode):
        raise OpFailed("not_regular", f"is not a regular file: {text(path)}")


def read_all(fd: int, offset: int, limit: int) -> bytes:
    """Read at most `limit` bytes from `offset`."""
    parts: list[bytes] = []
    while limit > 0:
        data = os.pread(fd, min(limit, 1 << 20), offset)
        if not data:
            break
        parts.append(data)
        offset += len(data)
        limit -= len(data)
    return b"".join(parts)


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
