"""Small files in memory that go from process to process: unlike a pipe, they take what is written whether it is read or not.

A user who has many pipes (`fs.pipe-user-pages-soft`) gets new ones of a page or two.
"""

from __future__ import annotations

import fcntl
import os


def holding(name: str, data: bytes) -> int:
    """A file with this content, to be read from its start."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def bounded(name: str, size_bytes: int) -> int:
    """An empty file for what others write, of which no more than `size_bytes` is taken."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def line(fd: int) -> str:
    """What was written into a `bounded` one, as one line."""
    text = os.pread(fd, os.fstat(fd).st_size, 0).rstrip(b"\0").decode(errors="replace")
    return " ".join(text.split())
