"""What the programs share that read files from strangers: bounded memory, compression, and how they end."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from typing import IO, cast

MEMORY_BYTES = 1 << 30
"""Address space of such a process: a header of gigabytes ends it instead of the machine."""


class ImageRefused(Exception):
    """The image holds something that it must not."""


@contextlib.contextmanager
def uncompressed(path: str) -> Generator[IO[bytes]]:
    """A layer's or an archive's tar, whatever it was compressed with (gzip or zstd, by its first bytes)."""
    with open(path, "rb") as file:
        magic = os.pread(file.fileno(), 4, 0)  # zstd starts where the descriptor stands
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(file) as stream:
                yield cast("IO[bytes]", stream)
        elif magic == b"\x28\xb5\x2f\xfd":
            if shutil.which("zstd") is None:
                raise ImageRefused("a layer needs zstd, which is not installed on the sandbox server's machine")
            with subprocess.Popen(["zstd", "-dcq", "-M64MB"], stdin=file, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                try:
                    yield child.stdout
                finally:
                    child.kill()
        else:
            yield file


def program(work: Callable[[], object]) -> int:
    """Do the work of a program, and print its result as JSON.

    Returns:
        Exit code: 0 done, 1 the image is refused (the reason is one line on stderr), 2 the machine failed, 28 the disk is full.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.umask(0)
    try:
        result = work()
    except ImageRefused as error:
        print(error, file=sys.stderr)
        return 1
    except (MemoryError, RecursionError) as error:
        print(f"it can't be read within {MEMORY_BYTES >> 20} MiB of memory ({type(error).__name__})", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}:
            print(f"{error.filename or 'a name in it'}: {error.strerror}", file=sys.stderr)
            return 1
        print(error, file=sys.stderr)
        return errno.ENOSPC if error.errno in {errno.ENOSPC, errno.EDQUOT} else 2
    print(json.dumps(result))
    return 0
