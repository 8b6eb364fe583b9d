"""File streams of one lease: bytes between a client's HTTP requests and the process in the slot that has the file.

A stream is a socket pair. Its far end goes to the slot's runner with the operation (`wire.WriteStream`, `ReadStream`),
whose child reads or writes the file by itself: the server opens no path of a slot. Each side waits for the other, so a
stream holds two socket buffers and nothing else.

A `PUT` brings a piece of a stream from an offset on. What is here already is skipped, so that a piece whose answer was
lost can be sent again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Literal

from atropos.aio import Tasks, cancel_and_wait
from atropos.errors import SandboxError
from atropos.wire import OpError

OPEN_S = 20.0
"""Longest a request waits for its stream's operation to start, in seconds; the client asks again."""
IDLE_S = 60.0
"""Longest pause between bytes of a stream before it is aborted, in seconds."""
IDLE_CHECKS = 12
"""Checks in that time. A stop of this process, in which nothing can move, is the time of one."""
COPY_BYTES = 1 << 18
MAX_OPEN = 16
"""Streams of one lease that are open at once: one runs, the others have not been read to their end."""
END = bytes(4)
"""The empty chunk."""


class StreamGone(SandboxError):
    """There is no such stream now: its operation has not started, or is over."""

    code = "no_stream"


class FileStream:
    """The server's end of one stream, and for a moment its far one.

    Args:
        broke_off: called when nothing moved for `IDLE_S`.
        max_bytes: most that the slot may send.
    """

    def __init__(self, broke_off: Callable[[], None], max_bytes: int = 0) -> None:
        self._near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._near.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._broke_off = broke_off
        self._remaining = max_bytes
        self._idle_checks = 0
        self._timer = self._loop.call_later(IDLE_S / IDLE_CHECKS, self._check_idle)
        self._turn: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._unsent: list[memoryview] = []
        self.received = 0
        self._idle_side: Literal["client", "slot"] | None = None
        """Who was waited for when the stream was aborted. A program of the slot can stop the process at its end."""
        self.closed = self._finished = False

    def __repr__(self) -> str:
        return f"<FileStream {self.received} bytes received{', closed' if self.closed else ''}>"

    def _check_idle(self) -> None:
        """Abort the stream when it was idle for `IDLE_S`; else check again."""
        self._idle_checks += 1
        if self._idle_checks < IDLE_CHECKS:
            self._timer = self._loop.call_later(IDLE_S / IDLE_CHECKS, self._check_idle)
        else:
            self._idle_side = "slot" if self._waiter is not None or self._finished else "client"
            self._broke_off()

    def failure(self, error: OpError, path: str) -> OpError | SandboxError:
        """What an operation's error means: after an idle client's stream was aborted, a fault of the infrastructure."""
        if self._idle_side == "client":
            return SandboxError(f"the stream of {path} broke off: no byte of it came for {IDLE_S:g} s")
        if self._idle_side == "slot":
            why = f"the slot's process that has the file moved no byte of it for {IDLE_S:g} s (did a program stop it?)"
            return OpError(error="timeout", message=why, limit="time")
        return error

    def close(self) -> None:
        """Close both ends; an incomplete file is discarded."""
        if not self.closed:
            self._unwatch()
            self.closed = True
            self._timer.cancel()
            if self._turn is not None:
                self._turn.cancel()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            self._near.close()
            # Usually closed when the operation began; this is for one that never did.
            self.far.close()

    async def receive(self, offset: int, chunks: AsyncIterator[bytes], *, last: bool) -> None:
        """Pass a piece on. A later request takes over from an earlier one, whose connection has broken.

        Raises:
            StreamGone: the stream is over, or another request has taken over.
        """
        while self._turn is not None:  # after its end, another one may have come first
            await cancel_and_wait([self._turn])
        if self.closed or offset > self.received:
            raise StreamGone(f"a piece starts at {offset}, and the stream has {self.received} bytes")
        # A task of its own, so that a later request can end it without cancelling the handler that awaits it.
        async with Tasks("file stream") as tasks:
            self._turn = turn = tasks.spawn(self._receive(offset, chunks, last=last), "piece", awaited=True)
            try:
                await asyncio.wait([turn])
            finally:
                if self._turn is turn:
                    self._turn = None
        if turn.cancelled():
            raise StreamGone("the stream is over, or another request continues it")
        await turn

    async def _receive(self, offset: int, chunks: AsyncIterator[bytes], *, last: bool) -> None:
        await self._flush()
        at = offset
        async for chunk in chunks:
            # What an earlier request delivered before its connection broke has reached the slot already.
            new = memoryview(chunk)[max(0, self.received - at) :]
            at += len(chunk)
            if new:
                # Counted before it is sent: `_unsent` belongs to the stream, and the next piece continues it.
                self.received += len(new)
                self._unsent = [memoryview(len(new).to_bytes(4, "little")), new]
                await self._flush()
        # The end may be repeated as well, when its answer was lost.
        if last and not self._finished:
            self._finished = True
            self._unsent = [memoryview(END)]
            await self._flush()

    async def _flush(self) -> None:
        """Send what is left; if cancelled, the next piece continues it."""
        while self._unsent:
            if self.closed:
                raise StreamGone("the stream is over")
            try:
                sent = self._near.sendmsg(self._unsent)
            except BlockingIOError:
                await self._ready(self._loop.add_writer)
                continue
            except OSError as error:
                raise StreamGone(f"the slot stopped reading: {error.strerror}") from None
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.pop(0))
            if sent:
                self._unsent[0] = self._unsent[0][sent:]
            self._idle_checks = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        """What the slot sends, to its end.

        Raises:
            ConnectionResetError: the stream was closed before, or the slot sends more than it may.
        """
        while not self.closed:
            try:
                data = self._near.recv(COPY_BYTES)
            except BlockingIOError:
                await self._ready(self._loop.add_reader)
                continue
            if not data:
                return
            self._idle_checks = 0
            # The runner keeps the bound, too; what it sends is not trusted.
            self._remaining -= len(data)
            if self._remaining < 0:
                raise ConnectionResetError("the slot sends more than was asked for")
            yield data
        raise ConnectionResetError("the stream is over")

    async def _ready(self, watch: Callable[[int, Callable[[], object]], None]) -> None:
        """Wait until the socket has something, or room, or is closed."""
        self._waiter = waiter = self._loop.create_future()
        watch(self._near.fileno(), lambda: waiter.done() or waiter.set_result(None))
        try:
            await waiter
        finally:
            self._waiter = None
            self._unwatch()

    def _unwatch(self) -> None:
        if not self.closed:
            self._loop.remove_reader(self._near)
            self._loop.remove_writer(self._near)


class FileStreams:
    """The open streams of one lease, by their ids."""

    def __init__(self) -> None:
        self._open: dict[str, FileStream] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def open(self, stream_id: str, broke_off: Callable[[], None], max_bytes: int = 0) -> FileStream:
        """A new stream, for an operation that starts; its slot may send this many bytes.

        Raises:
            SandboxError: there are too many, or one of this id.
        """
        if stream_id in self._open or len(self._open) >= MAX_OPEN:
            raise SandboxError(f"stream {stream_id} is open already, or {MAX_OPEN} of this lease are; it was not run")
        stream = self._open[stream_id] = FileStream(broke_off, max_bytes)
        self._changed.set()
        return stream

    async def find(self, stream_id: str) -> FileStream:
        """A stream, as soon as its operation has started.

        Raises:
            StreamGone: it has not within `OPEN_S`, or is over.
        """
        try:
            async with asyncio.timeout(OPEN_S):
                while stream_id not in self._open:
                    if self._closed:
                        raise StreamGone("the lease is over")
                    # Before the wait, after the look: nothing else runs in between.
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise StreamGone(f"stream {stream_id} is not open") from None
        return self._open[stream_id]

    def end(self, stream_id: str) -> None:
        """Close a stream."""
        stream = self._open.pop(stream_id, None)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close all: the lease is over."""
        for stream_id in list(self._open):
            self.end(stream_id)
        self._closed = True
        self._changed.set()
