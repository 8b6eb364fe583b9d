"""What the programs share that read files from strangers: bounded memory, compression, and how they end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, cast

from isal import isal_zlib

MEMORY_BYTES = 1 << 30
"""Address space of such a process: a header of gigabytes ends it instead of the machine."""
# As many as the pipe holds (`pulling.PIPE_BYTES`).
READ_BYTES = 1 << 20
PIECE_BYTES = 4 << 20
"""Most that a piece is decompressed to at once."""
BROKEN: tuple[type[Exception], ...] = (EOFError, cast("type[Exception]", isal_zlib.error))
"""What a compressed file that is damaged or cut off raises."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class ImageRefused(Exception):
    """The image holds something that it must not."""


def decompressed(packed: Iterator[bytes]) -> Iterator[bytes]:
    """What is packed with gzip or zstd, by its first bytes, or not at all: unpacked, in pieces."""
    head = b""
    # A pipe may give less than four bytes at first.
    while len(head) < len(_ZSTD) and (piece := next(packed, b"")):
        head += piece
    packed = itertools.chain([head], packed)
    if head.startswith(_GZIP):
        return _gunzipped(packed)
    return _from_zstd(packed) if head.startswith(_ZSTD) else packed


def is_compressed(file: int) -> bool:
    """Whether a file begins as what `decompressed` decompresses."""
    return os.pread(file, 4, 0).startswith((_GZIP, _ZSTD))


def pieces(file: int, size: int = sys.maxsize) -> Iterator[bytes]:
    """A descriptor's content from its position on, at most so many bytes of it."""
    while piece := os.read(file, min(READ_BYTES, size)):
        size -= len(piece)
        yield piece


def _gunzipped(packed: Iterable[bytes]) -> Iterator[bytes]:
    """All members of a gzip file, as gzip(1) reads them: zeros may follow the last one."""
    member = None
    for piece in packed:
        rest = piece
        while rest := (rest if member else rest.lstrip(b"\0")):
            member = member or isal_zlib.decompressobj(wbits=31)
            # Bounded, as one piece may decompress a thousandfold.
            yield member.decompress(rest, PIECE_BYTES)
            rest = member.unconsumed_tail
            if member.eof:
                rest, member = member.unused_data, None
    if member is not None:
        raise EOFError("compressed file ended before the end-of-stream marker was reached")


def _from_zstd(packed: Iterator[bytes]) -> Iterator[bytes]:
    """All frames of a zstd file, by the program."""
    if shutil.which("zstd") is None:
        raise ImageRefused("a layer needs zstd, which is not installed on the sandbox server's machine")
    # A frame says itself how much memory its decompression takes.
    with subprocess.Popen(["zstd", "-dcq", "-M64MB"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        # In a thread: with both pipes full, neither would go on.
        threading.Thread(target=_feed, args=(child.stdin, packed), daemon=True).start()
        try:
            yield from pieces(child.stdout.fileno())
        finally:
            child.kill()


def _feed(to: IO[bytes], packed: Iterator[bytes]) -> None:
    # zstd has ended early: what it put out is no whole tar, which its reader notices.
    with contextlib.suppress(BrokenPipeError), to:
        for piece in packed:
            to.write(piece)


def program(work: Callable[[], object]) -> int:
    """Do the work of a program, and print its result as JSON.

    Returns:
        Exit code: 0 done, 1 the image is refused (the reason is one line on stderr), 2 the machine failed, 28 the disk
            is full.
    """
    # Inherited by zstd, and enforced by the kernel on allocations that Python doesn't make itself.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Modes are the image's own.
    os.umask(0)
    try:
        result = work()
    # stderr's last line is what the server shows.
    except ImageRefused as error:
        print(error, file=sys.stderr)
        return 1
    except (MemoryError, RecursionError) as error:
        print(f"it can't be read within {MEMORY_BYTES >> 20} MiB of memory ({type(error).__name__})", file=sys.stderr)
        return 1
    except OSError as error:
        # Names of an image that no file system here takes are the image's fault.
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}:
            print(f"{error.filename or 'a name in it'}: {error.strerror}", file=sys.stderr)
            return 1
        print(error, file=sys.stderr)
        return errno.ENOSPC if error.errno in {errno.ENOSPC, errno.EDQUOT} else 2
    print(json.dumps(result))
    return 0
