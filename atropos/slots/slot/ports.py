"""TCP ports of a slot's loopback: its services reached from this machine, this machine's from the slot.

Both go through the lease like any background process, so they work on every backend and need no network in the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from atropos.aio import Tasks
from atropos.errors import ConfigError, SandboxError
from atropos.slot_python import SLOT_PYTHON
from atropos.slots.slot import Slot
from atropos.slots.slot.arguments import named_if_wrong
from atropos.slots.slot.processes import Process

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
HEAD_BYTES = 9
READ_BYTES = 64 * 1024
WINDOW_BYTES = 512 * 1024
"""Bytes of each direction of a connection that are under way at most, as in the relay."""
MAX_WRITES = 16
"""Frames that are on their way to the relay at once."""
BUFFER_BYTES = 1024 * 1024
"""Output of the relay that waits in the slot; beyond half of it, the slot's connections wait."""
MAX_CONNECTIONS = 4096
"""More than the relay has open at once, those that have ended there and not here among them."""
FORGED = "a program of the slot has written into the port relay's output, and the forward has ended"
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: to close is to reset."""
# Travels as an argument of the command: its comments are part of what is sent.
PROGRAM = Path(__file__).with_name("port_relay.py").read_text()


@dataclass
class _Connection:
    """One of them here.

    Attributes:
        ended: whether one direction has.
        incoming: data from the slot.
        held: bytes from the slot that the relay does not know to be passed on, `incoming` among them.
        over: whether no more comes from the slot.
        cut: whether that is no end of the data.
        sent: bytes to the slot that the relay has not passed on yet.
        room: set while the slot takes more.
        heard: set when data or its end has come.
    """

    writer: asyncio.StreamWriter | None = None
    ended: bool = False
    incoming: bytearray = field(default_factory=bytearray)
    held: int = 0
    over: bool = False
    cut: bool = False
    sent: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> bytes:
        """What has come from the slot, as soon as there is something; empty when no more comes."""
        while not self.incoming and not self.over:
            self.heard.clear()
            await self.heard.wait()
        data, self.incoming = bytes(self.incoming), bytearray()
        return data

    def hear(self, kind: bytes, data: bytes) -> None:
        """Take a frame of the relay's."""
        if kind == b"A":
            self.sent -= int.from_bytes(data)
            self.room.set()
            return
        if kind == b"D":
            self.incoming += data
            self.held += len(data)
            # The relay keeps the window; only a forged frame exceeds it.
            if self.held > WINDOW_BYTES:
                raise SandboxError(FORGED)
        elif not self.over:
            self.over, self.cut = True, kind != b"E"
        self.heard.set()

    def reset(self) -> None:
        """Abort it: its client must not take the data so far for all of it. Its tasks run to their ends."""
        self.incoming.clear()
        self.over = self.cut = True
        self.heard.set()
        self.sent = 0
        self.room.set()
        if self.writer is not None and not self.writer.is_closing():
            # A plain close would look like the end of the data.
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()


class PortForward:
    """Connections to one port go through to another until `aclose`, a snapshot of the slot, or the slot's end.

    Attributes:
        port: the listening one, on a loopback.
    """

    def __init__(self, process: Process, target: int | None) -> None:
        self.port = 0
        self._process = process
        self._target = target
        self._connections: dict[int, _Connection] = {}
        self._last = 0
        self._server: asyncio.Server | None = None
        self._listens = asyncio.Event()
        self._lost: SandboxError | OSError | None = None
        self._writes = asyncio.Semaphore(MAX_WRITES)
        self._tasks = Tasks("port forward")
        self._hearing = self._tasks.spawn(self._hear(), "frames")

    @classmethod
    @named_if_wrong
    async def to_slot(cls, slot: Slot, port: int, *, listen: int = 0) -> Self:
        """Forward a port of this machine's loopback to the slot's `port`, whether or not a service listens there yet.

        Args:
            slot: whose service it is.
            port: the slot's.
            listen: this machine's; 0: any free one.

        Raises:
            ConfigError: a port is none of TCP's.
            SandboxError: the slot is gone.
            OSError: the port can't be listened on.
        """
        _check_ports(port=port, listen=listen or 1)
        self = await cls._start(slot, "connect", port, None)
        try:
            self._server = await asyncio.start_server(self._accept, LOOPBACK, listen)
        except BaseException:
            await self.aclose()
            raise
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @classmethod
    @named_if_wrong
    async def from_slot(cls, slot: Slot, port: int, target: int) -> Self:
        """Forward a port of the slot's loopback to this machine's `target`, with the lease's network or without.

        Args:
            slot: whose programs connect.
            port: the slot's.
            target: this machine's.

        Raises:
            ConfigError: a port is none of TCP's.
            SandboxError: the slot is gone.
            OSError: the port is taken.
        """
        _check_ports(port=port, target=target)
        self = await cls._start(slot, "listen", port, target)
        self.port = port
        return self

    @classmethod
    async def _start(cls, slot: Slot, mode: Literal["listen", "connect"], port: int, target: int | None) -> Self:
        command = (*SLOT_PYTHON, "-c", PROGRAM, mode, str(port))
        # `hold`: a frame that falls out of the buffer would be missing in a connection.
        process = await slot.start(command, user="0:0", split=True, hold=True, buffer_bytes=BUFFER_BYTES)
        self = cls(process, target)
        try:
            await self._ready(port)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _ready(self, port: int) -> None:
        listens = self._tasks.spawn(self._listens.wait(), "start", awaited=True)
        await asyncio.wait((listens, self._hearing), return_when=asyncio.FIRST_COMPLETED)
        if not self._listens.is_set():
            if self._lost is not None:
                raise self._lost
            errors = self._process.errors
            reason = b"" if errors is None else await errors.read()
            raise OSError(f"port {port} of the slot: {reason.decode(errors='replace').strip().rpartition(chr(10))[2]}")

    @property
    def ended(self) -> bool:
        """Whether no connection goes through any more."""
        return self._hearing.done()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the port and reset its connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._tasks.cancel()
        self._reset(*self._connections)
        with contextlib.suppress(SandboxError, OSError):
            await self._process.kill()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._last += 1
        number = self._last
        connection = self._connections[number] = _Connection(writer)
        if self._hearing.done():  # while it waited to be accepted
            self._reset(number)
        await self._emit(b"O", number)
        # After the `O`: the relay drops data of a connection that it doesn't know.
        self._carry(number, connection, reader, writer)

    def _opened(self, number: int) -> None:
        """A program of the slot has connected to the port."""
        # The relay would not send it; programs of the slot can write to its output, as they are root there.
        if self._target is None or number in self._connections or len(self._connections) >= MAX_CONNECTIONS:
            raise SandboxError(FORGED)
        connection = self._connections[number] = _Connection()
        self._tasks.spawn(self._connect(number, connection, self._target), f"connection {number}")

    async def _connect(self, number: int, connection: _Connection, target: int) -> None:
        try:
            reader, connection.writer = await asyncio.open_connection(LOOPBACK, target)
        except OSError:
            await self._give_up(number)
        else:
            self._carry(number, connection, reader, connection.writer)

    def _carry(
        self, number: int, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._connections.get(number) is not connection:  # the forward has ended meanwhile
            connection.reset()
            return
        self._tasks.spawn(self._to_slot(number, connection, reader), f"connection {number} to the slot")
        self._tasks.spawn(self._from_slot(number, connection, writer), f"connection {number} from the slot")

    async def _to_slot(self, number: int, connection: _Connection, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(min(READ_BYTES, WINDOW_BYTES - connection.sent)):
                connection.sent += len(data)
                await self._emit(b"D", number, data)
                while connection.sent >= WINDOW_BYTES:
                    connection.room.clear()
                    await connection.room.wait()
        except ConnectionError:
            await self._give_up(number)
            return
        await self._emit(b"E", number)
        self._ended(number, connection)

    async def _from_slot(self, number: int, connection: _Connection, writer: asyncio.StreamWriter) -> None:
        passed = 0
        try:
            while data := await connection.receive():
                writer.write(data)
                await writer.drain()
                passed += len(data)
                if passed >= WINDOW_BYTES // 2:
                    connection.held -= passed
                    await self._emit(b"A", number, passed.to_bytes(4))
                    passed = 0
            if not connection.cut:
                writer.write_eof()
        except OSError:
            await self._give_up(number)
            return
        if connection.cut:
            self._reset(number)
        else:
            self._ended(number, connection)

    def _ended(self, number: int, connection: _Connection) -> None:
        """One direction has; after the second there is no connection."""
        if connection.ended and self._connections.pop(number, None) is not None and connection.writer is not None:
            connection.writer.close()
        # Both directions have to end: half-closed connections are usual (HTTP/1.0, `nc`).
        connection.ended = True

    async def _give_up(self, number: int) -> None:
        """Reset a connection that failed here, at both ends."""
        self._reset(number)
        await self._emit(b"C", number)

    def _reset(self, *numbers: int) -> None:
        for number in numbers:
            if (connection := self._connections.pop(number, None)) is not None:
                connection.reset()

    async def _emit(self, kind: bytes, number: int, data: bytes = b"") -> None:
        try:
            # Frames are operations of the lease: without a bound one connection would fill its lane.
            async with self._writes:
                await self._process.write(kind + number.to_bytes(4) + len(data).to_bytes(4) + data)
        except (SandboxError, OSError):
            self._hearing.cancel()  # what was lost is missing in a connection

    async def _hear(self) -> None:
        """Frames of the slot's end, until that is gone, or a program of the slot has forged one."""
        try:
            async for kind, number, data in _frames(self._process.output()):
                if kind == b"L":
                    self._listens.set()
                elif kind == b"O":
                    self._opened(number)
                elif (connection := self._connections.get(number)) is not None:
                    connection.hear(kind, data)
        except (SandboxError, OSError) as error:  # OSError: a snapshot has ended the slot's end
            self._lost = error
        finally:
            if self._server is not None:
                self._server.close()
            self._reset(*self._connections)


def _check_ports(**ports: int) -> None:
    for name, port in ports.items():
        if not 1 <= port <= MAX_PORT:
            raise ConfigError(f"{name}: {port} is no TCP port (1 to {MAX_PORT})")


async def _frames(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, int, bytes]]:
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        while len(waiting) >= HEAD_BYTES:
            end = HEAD_BYTES + int.from_bytes(waiting[5:9])
            # Before it is waited for: a forged length must not gather a gigabyte.
            if end > HEAD_BYTES + READ_BYTES:
                raise SandboxError(FORGED)
            if len(waiting) < end:
                break
            yield bytes(waiting[:1]), int.from_bytes(waiting[1:5]), bytes(waiting[HEAD_BYTES:end])
            del waiting[:end]
