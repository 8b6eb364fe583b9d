"""Files and archives as streams, each in a child that has its own socket to the server: PID 1 moves no byte of them."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.files.archives import BoundedBuffer, write_archive
from atropos.sandbox.programs.runner.files.files import open_apart, replace_file, target_of
from atropos.sandbox.programs.runner.files.unpacking import unpack_from
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import loop, now
from atropos.sandbox.programs.runner.opening import write_all
from atropos.sandbox.programs.runner.paths import path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import STREAM, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from atropos.sandbox.programs.runner.work import Outcome

STREAM_BYTES = 1 << 18
ABORT_S = 5.0
"""How long a cancelled stream's child may take to tidy up, in seconds."""


class StreamWork(Work):
    """Work with a stream. Its time is the server's to bound, which sees the bytes move."""

    __slots__ = ()

    def __init__(self, call: int, job: Callable[[], Outcome]) -> None:
        # Descriptors arrive in the order of their operations: the first belongs to this one.
        stream = link.descriptors.pop(0)
        try:
            super().__init__(call, job, stream)
        finally:
            os.close(stream)

    def cancel(self) -> None:
        """Let the child of a cancelled call undo its work: the server has closed the stream."""
        if self.timer < 0:
            self.why = OpFailed("timeout", "the operation was cancelled")
            self.timer = loop.later(now() + ABORT_S, self.stop)


def op_write_stream(call: int, path: str, tar: bool, mode: int | None) -> None:
    """Write a file, or unpack an archive, from the stream."""
    StreamWork(call, lambda: unpack_stream(path_of(path)) if tar else write_stream(path_of(path), mode))


def op_read_stream(call: int, path: str, tar: bool, offset: int, max_bytes: int) -> None:
    """Send a file or an archive down the stream."""
    StreamWork(call, lambda: read_stream(path_of(path), Outgoing(max_bytes), offset, tar=tar))


class Incoming(io.RawIOBase):
    """What the server sends: chunks, each after its length. An empty one is the end; a stream without it broke off."""

    def __init__(self) -> None:
        self.remaining = 0
        self.count = 0
        """Bytes that came."""
        self.over = False

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for at least one byte; 0 at the end.

        Raises:
            OpFailed: the stream broke off.
        """
        if not self.remaining and not self.over:
            length = bytearray(4)
            got = 0
            while got < 4:
                got += receive(memoryview(length)[got:])
            self.remaining = int.from_bytes(length, "little")
            # An empty chunk is the end; the end of the socket alone would look the same where the server has died.
            self.over = not self.remaining
        if self.over:
            return 0
        got = receive(memoryview(buffer)[: self.remaining])
        self.remaining -= got
        self.count += got
        return got


def receive(into: memoryview) -> int:
    """Wait for at least one byte of the stream; returns how many came."""
    got = os.readv(STREAM, [into])
    if not got:
        raise OpFailed("io", "the stream broke off before its end")
    return got


class Outgoing(BoundedBuffer):
    """The stream to the server as a file to write to, which refuses to grow beyond a bound."""

    def write(self, data: bytes | bytearray) -> None:
        """Send it, however long that takes."""
        self.claim(len(data))
        self.size += len(data)
        write_all(STREAM, data)

    def copy(self, fd: int, size: int) -> int:
        """As `BoundedBuffer.copy`, by the kernel alone."""
        self.claim(size)
        remaining = size
        while remaining and (sent := os.sendfile(STREAM, fd, None, remaining)):
            remaining -= sent
        self.size += size - remaining
        return size - remaining


def write_stream(path: str, mode: int | None) -> Outcome:
    """Replace a file by what comes."""
    folder, name, old = target_of(path)
    stream = Incoming()
    source = io.BufferedReader(stream, STREAM_BYTES)
    replace_file(folder, name, iter(lambda: source.read(STREAM_BYTES), b""), mode, old)
    return "done", {"count": stream.count}, {}


def unpack_stream(path: str) -> Outcome:
    """Unpack the archive that comes."""
    source = io.BufferedReader(Incoming(), STREAM_BYTES)
    outcome = unpack_from(path, source)
    while source.read(STREAM_BYTES):  # the archive's padding; without its end marker, it was cut off
        pass
    return outcome


def read_stream(path: str, out: Outgoing, offset: int, *, tar: bool) -> Outcome:
    """Send a file, or an archive."""
    if tar:
        write_archive(out, path)
    else:
        fd, status = open_apart(path)
        os.lseek(fd, offset, 0)
        if not is_special(status.st_dev):  # the kernel's own files don't say how long they are
            out.copy(fd, max(0, status.st_size - offset))
        while data := os.read(fd, STREAM_BYTES):
            out.write(data)
    return "done", {"count": out.size}, {}
