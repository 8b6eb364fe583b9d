"""Small files in memory that processes share. Unlike a pipe's, their size does not depend on other pipes or a reader.

New pipes of a user with many (`fs.pipe-user-pages-soft`) have a page or two.
"""

from __future__ import annotations

import fcntl
import os


def bounded(name: str, size_bytes: int) -> int:
    """An empty file for other processes' output, of at most `size_bytes`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size_bytes)
    # Sealed at its size: a writer can neither fill the memory nor cut the file under a reader.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def line(fd: int) -> str:
    """The content of a `bounded` file, as one line."""
    text = os.pread(fd, os.fstat(fd).st_size, 0).rstrip(b"\0").decode(errors="replace")
    return " ".join(text.split())
