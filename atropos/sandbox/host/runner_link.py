"""The server's end of a runner's socket. Every byte that comes from it is untrusted.

A slot's PID 1 shares a machine with programs that a model wrote; if one ever took it over, what it sends must not do
more than end its own slot. So an answer is accepted only for an open call, of the kind that was asked for, within
bounds, and if the wire's own models validate it.
"""

from __future__ import annotations

import asyncio
import errno
import marshal
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic_core import from_json

from atropos.aio import RECEIVE_BYTES
from atropos.errors import SandboxError
from atropos.wire import MAX_FILE_BYTES, OP_RESULT, SlotOperation

if TYPE_CHECKING:
    from atropos.sandbox.contract import OnResult

_MAX_HEADER = 32 * 1024 * 1024
_MAX_QUEUED = 384 * 1024 * 1024
"""More bytes than the unanswered calls of a client have (`http.stream.MAX_QUEUED_BYTES` and one frame beyond)."""
_BLOBS = frozenset(("output", "stdout", "stderr", "data"))


class ProtocolViolation(Exception):
    """The runner sent a malformed or unexpected frame."""


def _encoded(number: int, op: str, arguments: dict[str, object]) -> bytes:
    # marshal only towards the runner, which is a fork of the same Python: loading untrusted marshal data can crash.
    body = marshal.dumps((number, op, arguments))
    return len(body).to_bytes(4, "little") + body


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


class RunnerLink:
    """Frames to and from one runner."""

    def __init__(self, sock: socket.socket, *, output_bytes: int, on_broken: Callable[[str], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._on_broken = on_broken
        self._output_bytes = output_bytes
        # The largest of a read file, a command's three outputs and a background process's buffer; 200: the note of what
        # was dropped.
        self._max_frame = max(MAX_FILE_BYTES, 3 * (output_bytes + 200), 4_100_000) + _MAX_HEADER
        self._buffer = bytearray()
        self._queue: list[tuple[memoryview, int]] = []
        """Frames that wait for room, each with its descriptor, or -1."""
        self._queued = 0
        self._open: dict[int, tuple[str, OnResult | None]] = {}
        """Calls without an answer: its kind, and who gets it."""
        self._number = 0
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.closed = False
        self._alone = False
        """Whether the latest answer said that the runner was the slot's only process."""
        self._loop.add_reader(self._fd, self._readable)

    def __repr__(self) -> str:
        return (
            f"<RunnerLink {len(self._open)} open calls, {self._queued} bytes queued{', closed' if self.closed else ''}>"
        )

    @property
    def alone(self) -> bool:
        """Whether the slot has no other process: the latest answer said so, and no open call may start one."""
        return self._alone and not self._open

    def start(self, environment: dict[str, str], output_bytes: int, wall_s: float, oom_fd: int) -> None:
        """Send the first message; `ready` is done when the runner has answered.

        `oom_fd`: its own oom_score_adj, which can't be opened from inside.
        """
        frame = _encoded(0, "init", {"environment": environment, "output_bytes": output_bytes, "wall_s": wall_s})
        socket.send_fds(self._sock, [frame], [oom_fd])

    def call(
        self,
        op: str,
        arguments: dict[str, object],
        done: OnResult,
        *,
        answer: str = SlotOperation.answer,
        descriptor: int = -1,
    ) -> int:
        """Send an operation; `done` gets its result, of the kind `answer`, or an exception when the channel breaks.

        The runner gets a copy of `descriptor`.

        Raises:
            SandboxError: descriptors can't be passed now; nothing was sent.
        """
        self._number += 1
        self._open[self._number] = (answer, done)
        try:
            self._send(self._number, op, arguments, descriptor)
        except SandboxError:
            del self._open[self._number]
            raise
        return self._number

    def cancel(self, number: int, *, forget: bool = False) -> None:
        """Cancel a call; with `forget`, ignore its answer."""
        answer, _ = self._open.get(number, (None, None))
        if answer is None or self.closed:
            return
        if forget:
            # The entry stays: an answer to a number that is not open would break the protocol.
            self._open[number] = (answer, None)
        self._send(number, "cancel", {})

    def close(self, error: Exception) -> None:
        """End the channel; open calls get `error`."""
        if self.closed:
            return
        # First: callbacks below may call back into this object.
        self.closed = True
        # Before the socket is closed: its number may be another file's at once.
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        waiting, self._open = self._open, {}
        for _, done in waiting.values():
            if done is not None:
                self._loop.call_soon(done, error)  # only after the caller of `close` has recorded the reason
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody may be waiting for it
        self._buffer.clear()
        for _, descriptor in self._queue:
            _close(descriptor)
        self._queue.clear()

    # -------------------------------------------------------------------------------------------------------- sending

    def _send(self, number: int, op: str, arguments: dict[str, object], descriptor: int = -1) -> None:
        if self.closed:
            return
        frame = memoryview(_encoded(number, op, arguments))
        # Written at once where nothing waits, without a round of the event loop.
        if not self._queue:
            try:
                sent = self._write(frame, descriptor)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._break(f"its socket: {error.strerror}")
                return
            if sent == len(frame):
                return
            if sent:
                # Descriptors travel with the first byte (unix(7)); sent again they would arrive twice.
                frame, descriptor = frame[sent:], -1
            self._loop.add_writer(self._fd, self._writable)
        # A copy: the caller closes its own as soon as `call` returns.
        self._queue.append((frame, os.dup(descriptor) if descriptor >= 0 else -1))
        self._queued += len(frame)
        if self._queued > _MAX_QUEUED:
            self._break("it doesn't read its input")

    def _writable(self) -> None:
        while self._queue:
            frame, descriptor = self._queue[0]
            try:
                sent = self._write(frame, descriptor)
            except BlockingIOError:
                return
            except (OSError, SandboxError) as error:
                self._break(f"its socket: {error}")
                return
            self._queued -= sent
            _close(descriptor)
            if sent < len(frame):
                self._queue[0] = (frame[sent:], -1)
                return
            self._queue.pop(0)
        self._loop.remove_writer(self._fd)

    def _write(self, frame: memoryview, descriptor: int) -> int:
        if descriptor < 0:
            return os.write(self._fd, frame)
        try:
            return socket.send_fds(self._sock, [frame], [descriptor])
        except OSError as error:
            # The bound is RLIMIT_NOFILE, over all sockets of a user (unix(7)): other slots' transfers count as well.
            if error.errno != errno.ETOOMANYREFS:
                raise
            raise SandboxError("the kernel's bound on descriptors in flight of this user is reached; not run") from None

    # ------------------------------------------------------------------------------------------------------ receiving

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(f"its socket: {error.strerror}")
            return
        if not data:
            self._break("PID 1 of the slot ended")
            return
        try:
            self._feed(data)
        except ProtocolViolation as error:
            self._break(f"PID 1 of the slot broke the protocol: {error}")

    def _feed(self, data: bytes) -> None:
        buffer = self._buffer
        # The usual case, one whole frame in one read, without copies through the buffer.
        if not buffer and len(data) >= 8 and len(data) == 4 + int.from_bytes(data[:4], "little"):
            self._receive(data[4:])
            return
        buffer += data
        while len(buffer) >= 4 and not self.closed:
            size = int.from_bytes(buffer[:4], "little")
            if size > self._max_frame or size < 4:
                raise ProtocolViolation(f"a frame of {size} bytes")
            # Checked before the body arrives: nobody asked, so nothing of it is worth buffering.
            if not self._open and self.ready.done():
                raise ProtocolViolation("a frame while no call is open")
            if len(buffer) < 4 + size:
                return
            frame = bytes(memoryview(buffer)[4 : 4 + size])
            del buffer[: 4 + size]
            self._receive(frame)

    def _receive(self, frame: bytes) -> None:
        length = int.from_bytes(frame[:4], "little")
        if len(frame) < 4 + length:
            raise ProtocolViolation("a header longer than its frame")
        try:
            header = from_json(frame[4 : 4 + length])
            number, fields, blobs = header["id"], header["r"], header["b"]
            # Only believed to save work: a lie makes the slot's own limits less exact, nobody else's.
            self._alone = header.get("alone") is True
            at = 4 + length
            for name, size in blobs:
                if name not in _BLOBS or size < 0 or at + size > len(frame):
                    raise ProtocolViolation("a blob outside its frame")
                # Blobs travel beside the JSON, since bytes in it would have to be escaped.
                fields[name] = frame[at : at + size]
                at += size
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolViolation(f"a malformed header ({type(error).__name__})") from None
        if at != len(frame):
            raise ProtocolViolation("bytes after the last blob")
        if number == 0 and not self.ready.done() and isinstance(fields, dict) and fields.get("kind") == "ready":
            self.ready.set_result(None)
            return
        self._result(number, fields)

    def _result(self, number: object, fields: object) -> None:
        if not isinstance(number, int) or number not in self._open:
            raise ProtocolViolation("an answer to no open call")
        answer, done = self._open[number]
        try:
            result = OP_RESULT.validate_python(fields)
        except ValidationError as error:
            raise ProtocolViolation(f"an invalid result ({error.error_count()} errors)") from None
        # A slot that answers a read with a command's result would be read by code that expects another type.
        if result.kind not in (answer, "op_error"):
            raise ProtocolViolation(f"a {result.kind} in the place of {answer}")
        if result.kind == "exec_result" and len(result.output) > self._output_bytes + 200:
            raise ProtocolViolation("more output than the bound")
        del self._open[number]
        if done is not None:
            done(result)

    def _break(self, reason: str) -> None:
        if not self.closed:
            self._on_broken(reason)
