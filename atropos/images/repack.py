"""Makes the tars of layers again, from what was unpacked of them. A program of its own, without site-packages.

    repack LAYER…

Each LAYER is a folder of the store, with `files/` and its record. The tars are written to stdout, one after the other.
For exit codes see `untrusted.program`.
"""

from __future__ import annotations

import contextlib
import os
import sys

from atropos.images import tar_record
from atropos.images.folders import Folders, WrongFolder
from atropos.images.unpack import RECORD
from atropos.images.untrusted import ImageRefused, program

SEND_BYTES = 1 << 24


def repack(layer: str, to: int) -> None:
    """Write a layer's tar.

    Raises:
        ImageRefused: it has changed since it was unpacked.
    """
    record = f"{layer}/{RECORD}"
    remaining = tar_record.tar_size(record) or 0
    top = os.open(f"{layer}/files", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.closing(Folders(top, _make)) as folders, open(record, "rb", buffering=0) as file:
        for raw, path, size in tar_record.read(file):
            # The record also has the zeros that `TarStream` adds at the end of a tar that is cut short, which its
            # digest lacks.
            data = memoryview(raw)[:remaining]
            remaining -= len(data)
            while data:
                data = data[os.write(to, data) :]
            if path:
                remaining -= size
                _send(folders, path, size, to)


def _send(folders: Folders, path: str, size: int, to: int) -> None:
    where, _, name = path.rpartition("/")
    content = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folders.open(where))
    try:
        if os.fstat(content).st_size != size:
            raise ImageRefused(f"{path} has changed since it was unpacked")
        # From the page cache to the pipe without a copy here; each call sends at most what fits into the pipe.
        while size and (sent := os.sendfile(to, content, None, min(size, SEND_BYTES))):
            size -= sent
    finally:
        os.close(content)


def _make(_parent: int, _name: str, path: str) -> None:
    raise WrongFolder(path, is_missing=True)


def main() -> int:
    """The program."""
    # `program` prints its result to stdout, which here carries tars.
    layers, to = sys.argv[1:], os.dup(1)
    os.dup2(2, 1)  # nothing but tars

    def repack_all() -> None:
        for layer in layers:
            repack(layer, to)

    return program(repack_all)
