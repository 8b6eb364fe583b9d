"""A server whose files on disk lie on a small disk of their own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_THERE = 'mkdir -p /var/lib/atropos; mount --bind "$1" /var/lib/atropos; {extra}; shift; exec "$@"'


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """A file system of a size, which the server's own user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="small-disk-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=755", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def keeping_files_on(disk: Path, extra: str = "true") -> list[str]:
    """What a server's command begins with so that its files on disk are there, after a command more."""
    return ["unshare", "--mount", "sh", "-c", _THERE.format(extra=extra), "sh", str(disk)]
