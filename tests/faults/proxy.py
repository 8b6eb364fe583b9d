"""A TCP proxy that breaks streams: cuts, half-opens, delays, and delivers late or twice what a client once sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What becomes of one stream.

    Attributes:
        up, down: bytes still let through in that direction before the fault strikes; None: never.
        kind: `cut` closes both ends, `half` goes silent and keeps them open, `late` cuts the client at once and
            delivers what it sent to the server `late_s` later.
        jitter_s: each piece is held up to this long.
    """

    up: int | None = None
    down: int | None = None
    kind: str = "cut"
    jitter_s: float = 0.0
    late_s: float = 0.0


@dataclass(eq=False)
class Link:
    """One stream through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    fault: Fault
    sent: bytearray = field(default_factory=bytearray)
    struck: bool = False
    stream: bool = False

    def cut(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class Proxy:
    """Passes everything but the stream through unharmed; the stream gets the fault that is set when it strikes.

    Args:
        port: the server's.
        seed: of what is random.
        strikes: how a stream's first request begins.
    """

    def __init__(self, port: int, *, seed: int = 0, strikes: bytes = b"GET /v1/stream") -> None:
        self._target, self._strikes = port, strikes
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.random = random.Random(seed)
        self.links: list[Link] = []
        self.streams = 0
        self.struck = 0
        self.recorded: list[bytes] = []
        self.next_fault = Fault()
        self._passing = asyncio.Event()
        self._passing.set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def strike(self, fault: Fault) -> None:
        """From now on, for the stream that is open."""
        for link in self.links:
            link.fault = fault

    @contextlib.asynccontextmanager
    async def partitioned(self) -> AsyncIterator[None]:
        """A network partition: nothing passes, on streams or new connections; what was sent arrives when it ends."""
        self._passing.clear()
        try:
            yield
        finally:
            self._passing.set()

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            first = await reader.read(65_536)
            if not first:
                return
            await self._passing.wait()
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
            return
        link = Link(writer, forth, Fault())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._up(link, reader, first))
                group.create_task(self._down(link, back))
        except* (ConnectionError, OSError):
            pass
        except* asyncio.CancelledError:
            pass
        finally:
            link.cut()
            if link.stream:
                self.links.remove(link)
                self.recorded.append(bytes(link.sent))

    async def _up(self, link: Link, reader: asyncio.StreamReader, data: bytes) -> None:
        while data:
            if not link.stream and data.startswith(self._strikes):  # maybe on a connection kept from other requests
                link.stream = True
                self.streams += 1
                link.fault, self.next_fault = self.next_fault, Fault()
                self.links.append(link)
            if link.stream:
                link.sent += data
                data = await self._apply(link, data, "up")
            await self._passing.wait()
            link.server.write(data)
            await link.server.drain()
            data = await reader.read(65_536)
        link.cut()

    async def _down(self, link: Link, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65_536):
            passed = await self._apply(link, data, "down") if link.stream else data
            await self._passing.wait()
            link.client.write(passed)
            await link.client.drain()
        link.cut()

    async def _apply(self, link: Link, data: bytes, direction: str) -> bytes:
        fault = link.fault
        if fault.jitter_s:
            await asyncio.sleep(self.random.random() * fault.jitter_s)
        left = getattr(fault, direction)
        if left is None:
            return data
        if len(data) <= left:
            setattr(fault, direction, left - len(data))
            return data
        if not link.struck:
            link.struck = True
            self.struck += 1
        writer = link.server if direction == "up" else link.client
        if fault.kind == "late":
            link.client.transport.abort()
            await asyncio.sleep(fault.late_s)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0.05)
        else:
            writer.write(data[:left])
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        if fault.kind == "half":
            await asyncio.sleep(3600)
        raise ConnectionError("cut")


@contextlib.asynccontextmanager
async def proxied(port: int, **options) -> AsyncIterator[Proxy]:
    proxy = Proxy(port, **options)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
