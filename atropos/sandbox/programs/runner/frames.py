"""Frames over the socket to the server.

From the server: a length and a marshalled tuple (the server is trusted, and it is the same Python). To the server: a
length, a header length, a JSON header and raw bytes (nothing from here is trusted there).
"""

from __future__ import annotations

import marshal
import os
from _json import encode_basestring_ascii as quote
from _socket import MSG_CMSG_CLOEXEC, socket
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed, failure, text
from atropos.sandbox.programs.runner.loop import CHUNK, loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    class StartedCall(Protocol):
        """A call without an answer yet."""

        def cancel(self) -> None:
            """End it; it answers all the same."""


SOCKET = 3
OPS: dict[str, Callable[..., None]] = {}
"""By its name, what an operation calls with the call's number and the operation's fields: a function `op_NAME`."""


class ServerLink:
    """The socket to the server, and the calls that have no answer yet."""

    def __init__(self) -> None:
        self.incoming = bytearray()
        self.outgoing: list[memoryview] = []
        self.calls: dict[int, StartedCall] = {}
        self.socket: socket | None = None
        self.descriptors: list[int] = []
        """Descriptors that came with operations that are still to be dispatched, in their order."""

    def open(self) -> None:
        """Serve the socket."""
        os.set_inheritable(SOCKET, False)
        os.set_blocking(SOCKET, False)
        self.socket = socket(fileno=SOCKET)
        loop.watch(SOCKET, self.receive)

    def receive(self) -> None:
        """Run what the server sent."""
        assert self.socket is not None
        try:
            # MSG_CMSG_CLOEXEC: a program that starts in the same moment must not inherit it.
            data, extra, _, _ = self.socket.recvmsg(CHUNK, 64, MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        for _, _, numbers in extra:
            self.descriptors.append(int.from_bytes(numbers[:4], "little"))
        if not data:
            os._exit(0)  # the server is gone, and with PID 1 everything here goes
        buffer = self.incoming
        # The usual case: one whole message, without a copy.
        if not buffer and len(data) == 4 + int.from_bytes(data[:4], "little"):
            self.dispatch(marshal.loads(data[4:]))  # noqa: S302
            return
        buffer += data
        while len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "little")
            if len(buffer) < 4 + size:
                break
            with memoryview(buffer) as view:  # a copy of a large frame would be the slot's memory
                message = marshal.loads(view[4 : 4 + size])  # noqa: S302
            del buffer[: 4 + size]
            self.dispatch(message)

    def dispatch(self, message: tuple[int, str, dict[str, object]]) -> None:
        """Run one operation, or cancel the one that runs under this number."""
        call, op, arguments = message
        if op == "cancel":
            task = self.calls.get(call)
            if task is not None:
                task.cancel()
            return
        try:
            OPS[op](call, **arguments)
        except Exception as error:
            path = arguments.get("path")
            self.fail(call, failure(error, path if isinstance(path, str) else ""))

    def send(self, call: int, header: str, *blobs: bytes) -> None:
        """Send a frame, at once where the socket has room."""
        # Before it is sent: a cancel that crosses the answer finds nothing.
        self.calls.pop(call, None)
        raw = header.encode()
        size = 4 + len(raw) + sum(map(len, blobs))
        frame = b"".join((size.to_bytes(4, "little"), len(raw).to_bytes(4, "little"), raw, *blobs))
        sent = 0
        if not self.outgoing:
            try:
                sent = os.write(SOCKET, frame)
            except BlockingIOError:
                pass
            if sent == len(frame):
                return
            loop.watch_room(SOCKET, self.flush)
        self.outgoing.append(memoryview(frame)[sent:])

    def flush(self) -> None:
        """Send what had no room."""
        while self.outgoing:
            frame = self.outgoing[0]
            try:
                sent = os.write(SOCKET, frame[: 1 << 20])
            except BlockingIOError:
                return
            if sent < len(frame):
                self.outgoing[0] = frame[sent:]
            else:
                self.outgoing.pop(0)
        loop.unwatch_room(SOCKET)

    def answer(
        self, call: int, kind: str, fields: Mapping[str, object], blobs: Mapping[str, bytes] | None = None
    ) -> None:
        """Answer a call with a result of the wire."""
        blobs = blobs or {}
        sizes = [(name, len(data)) for name, data in blobs.items()]
        header = f'{{"id":{call},"r":{json({"kind": kind, **fields})},"b":{json(sizes)}}}'
        self.send(call, header, *blobs.values())

    def fail(self, call: int, error: OpFailed) -> None:
        """Answer a call with an `op_error`."""
        self.answer(call, "op_error", {"error": error.error, "message": error.message[:4000], "limit": error.limit})


link = ServerLink()


def json(value: object) -> str:
    """JSON of the few types that are sent; names that aren't UTF-8 are made readable (`text`)."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        return quote(text(value))
    if isinstance(value, dict):
        return "{" + ",".join(quote(k) + ":" + json(v) for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(json, value)) + "]"
    # Numbers: JSON writes them as Python does (none here is infinite).
    return repr(value)
