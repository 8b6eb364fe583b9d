"""Archives that ADD unpacks: tars, as they are or packed with gzip, bzip2, xz or zstd."""

from __future__ import annotations

import contextlib
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import IO

from atropos.archives import WholeTar

MAX_BYTES = 8 << 30
"""Most that is read of one that is packed with zstd."""
_HEAD_BYTES = 1 << 16
"""More than the first header of a tar takes."""
_READ_BYTES = 1 << 20


def is_zstd(path: Path) -> bool:
    """Whether a file is packed with zstd, which needs its program."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x28\xb5\x2f\xfd"


def is_archive(path: Path) -> bool:
    """Whether it is what Docker unpacks."""
    if not path.is_file():
        return False
    try:
        with opened(path, _HEAD_BYTES) as file, tarfile.open(fileobj=file, tarinfo=WholeTar) as archive:
            return archive.next() is not None  # as with Docker: a disk image that begins with zeros is none
    except (tarfile.TarError, EOFError, zlib.error):
        return False


def opened(path: Path, most: int = MAX_BYTES) -> IO[bytes]:
    """An archive for the tar module, which knows zstd since Python 3.14 alone.

    Args:
        path: the file.
        most: what is read of one that is packed with zstd.

    Raises:
        tarfile.ReadError: it is damaged.
    """
    if not is_zstd(path):
        return path.open("rb")
    with contextlib.ExitStack() as opening:
        plain = opening.enter_context(tempfile.TemporaryFile())
        with subprocess.Popen(("zstd", "-dcq", "--", path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            while most > 0 and (piece := child.stdout.read(min(most, _READ_BYTES))):
                plain.write(piece)
                most -= len(piece)
            if most <= 0:
                child.kill()
        if most > 0 and child.returncode != 0:
            raise tarfile.ReadError("it is cut off or damaged")
        plain.seek(0)
        opening.pop_all()
    return plain
