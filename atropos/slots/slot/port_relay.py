"""Runs in a slot: TCP connections of its loopback as frames on stdin and stdout; `slots.slot.ports` is the other end.

A frame is a kind, the connection's number, the payload's length and the payload. `O` opens, `D` has data, `E` ends one
direction, `C` ends both; `L` says that the port listens. `A` says how many more bytes of data its sender has passed on:
at most `WINDOW_BYTES` of each direction of a connection are under way, so that one whose reader pauses holds up no
other. It runs in the runner's own Python, which has few modules.
"""

import _socket
import os
import select
import sys

HEAD_BYTES = 9
READ_BYTES = 65_536
WINDOW_BYTES = 512 * 1024
MAX_CONNECTIONS = 1024
"""With the sockets of its service, fewer than end the programs of a slot of 1 GiB."""
LOOPBACK = "127.0.0.1"
RESET = (1).to_bytes(4, sys.byteorder) + bytes(4)
"""SO_LINGER of no seconds: to close is to reset."""


class RelayedConnection:
    """One of the slot's, and what waits to be written to it.

    Attributes:
        sent: bytes that the far end has not passed on yet.
        passed: bytes written to it and not yet acknowledged to the far end.
    """

    def __init__(self, number: int, peer: _socket.socket) -> None:
        self.number, self.peer, self.waiting = number, peer, bytearray()
        self.sent = self.passed = 0
        self.ended_here = self.ended_there = self.shut = False


class Relay:
    """All connections of one port."""

    def __init__(self, port: int, listener: "_socket.socket | None") -> None:
        self.port, self.listener, self.heard, self.last = port, listener, bytearray(), 0
        self.by_number: dict[int, RelayedConnection] = {}
        self.by_file: dict[int, RelayedConnection] = {}

    def emit(self, kind: bytes, number: int, data: bytes = b"") -> None:
        """Write a frame; waits while nobody reads."""
        frame = memoryview(kind + number.to_bytes(4, "big") + len(data).to_bytes(4, "big") + bytes(data))
        while frame:
            frame = frame[os.write(1, frame) :]

    def add(self, number: int, peer: _socket.socket) -> None:
        """Take a connection."""
        peer.setblocking(False)
        peer.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)  # as asyncio does at the other end
        self.by_number[number] = self.by_file[peer.fileno()] = RelayedConnection(number, peer)

    def drop(self, connection: RelayedConnection, *, tell: bool = True) -> None:
        """Close a connection, at the other end as well; one that is not over is reset, there too."""
        del self.by_number[connection.number], self.by_file[connection.peer.fileno()]
        if not (connection.ended_here and connection.shut):
            connection.peer.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, RESET)
        connection.peer.close()
        if tell:
            self.emit(b"C", connection.number)

    def accept(self) -> None:
        """A program of the slot connects."""
        assert self.listener is not None
        file, _ = self.listener._accept()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
        self.last += 1
        self.add(self.last, _socket.socket(fileno=file))
        self.emit(b"O", self.last)

    def may_read(self, connection: RelayedConnection) -> bool:
        """Whether the far end takes more of what it has."""
        return not connection.ended_here and connection.sent < WINDOW_BYTES

    def read(self, connection: RelayedConnection) -> None:
        """Pass what a connection has to the other end."""
        try:
            data = connection.peer.recv(min(READ_BYTES, WINDOW_BYTES - connection.sent))
        except BlockingIOError:
            return
        except OSError:
            self.drop(connection)
            return
        if data:
            connection.sent += len(data)
            self.emit(b"D", connection.number, data)
        else:
            connection.ended_here = True
            self.emit(b"E", connection.number)
            self.finish(connection)

    def write(self, connection: RelayedConnection) -> None:
        """Give a connection what waits for it."""
        try:
            count = connection.peer.send(connection.waiting)
        except BlockingIOError:
            return
        except OSError:
            self.drop(connection)
            return
        del connection.waiting[:count]
        connection.passed += count
        if connection.passed >= WINDOW_BYTES // 2:
            self.emit(b"A", connection.number, connection.passed.to_bytes(4, "big"))
            connection.passed = 0
        self.finish(connection)

    def finish(self, connection: RelayedConnection) -> None:
        """Shut down the direction that the far end has ended, and drop a connection once both have."""
        if connection.ended_there and not connection.waiting and not connection.shut:
            connection.shut = True
            try:
                connection.peer.shutdown(_socket.SHUT_WR)
            except OSError:
                self.drop(connection)
                return
        if connection.ended_here and connection.shut:
            self.drop(connection)

    def hear(self) -> bool:
        """Frames of the other end; False once it has gone."""
        data = os.read(0, READ_BYTES)
        self.heard += data
        while len(self.heard) >= HEAD_BYTES:
            end = HEAD_BYTES + int.from_bytes(self.heard[5:9], "big")
            if len(self.heard) < end:
                break
            self.obey(bytes(self.heard[:1]), int.from_bytes(self.heard[1:5], "big"), self.heard[HEAD_BYTES:end])
            del self.heard[:end]
        return bool(data)

    def obey(self, kind: bytes, number: int, data: bytearray) -> None:
        """Do what a frame says."""
        if kind == b"O":
            if len(self.by_number) >= MAX_CONNECTIONS:
                self.emit(b"C", number)
                return
            peer = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            self.add(number, peer)
            try:
                peer.connect((LOOPBACK, self.port))
            except BlockingIOError:
                pass  # a service with a full queue accepts it later
            except OSError:
                self.drop(self.by_number[number])
            return
        connection = self.by_number.get(number)
        if connection is None:
            return  # it has ended meanwhile
        if kind == b"D":
            connection.waiting += data
        elif kind == b"A":
            connection.sent -= int.from_bytes(data, "big")
        elif kind == b"E":
            connection.ended_there = True
            self.finish(connection)
        else:
            self.drop(connection, tell=False)

    def ready(self) -> list[tuple[int, int]]:
        """The files that can be read or written, as `poll` has them, once one can; none for which there is no room."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if self.listener is not None and len(self.by_number) < MAX_CONNECTIONS:
            poll.register(self.listener.fileno(), select.POLLIN)
        for file, connection in self.by_file.items():
            events = (select.POLLIN if self.may_read(connection) else 0) | (select.POLLOUT if connection.waiting else 0)
            if events:
                poll.register(file, events)
        return poll.poll()

    def run(self) -> None:
        """Until the other end has gone."""
        while True:
            for file, events in self.ready():
                if file == 0:
                    if not self.hear():
                        return
                elif self.listener is not None and file == self.listener.fileno():
                    self.accept()
                else:
                    if events & ~select.POLLOUT and file in self.by_file and self.may_read(self.by_file[file]):
                        self.read(self.by_file[file])
                    if events & select.POLLOUT and file in self.by_file:
                        self.write(self.by_file[file])


def main() -> None:
    """`listen PORT` takes connections to the slot's port, `connect PORT` makes them."""
    port, listener = int(sys.argv[2]), None
    if sys.argv[1] == "listen":
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    relay = Relay(port, listener)
    relay.emit(b"L", 0)
    relay.run()


main()
