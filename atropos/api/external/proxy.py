"""The only way out for the browser: a forward proxy on loopback that dials what the guard allows.

Whatever a page does (redirects, sub-resources, scripts, WebSockets, names that resolve to private addresses), its
connections come here. Every browser request takes a connection of its own, so that none is reused for another host.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from atropos.api.external.guard import Forbidden, Guard

REFUSED_HEADER = "x-atropos-refused"
"""On an answer that the proxy itself gave instead of the site."""
_HEAD_BYTES = 64 * 1024
_HEAD_S = 30.0
_CONNECT_S = 15.0
_IDLE_S = 300.0
_MAX_CONNECTIONS = 1000
_HOP = {b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"upgrade", b"te", b"trailer"}

Headers = list[tuple[bytes, bytes]]


class _Refused(Exception):
    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _parse(head: bytes) -> tuple[bytes, Headers]:
    first, *lines = head.split(b"\r\n")
    headers: Headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            headers.append((name.strip(), value.strip()))
    return first, headers


def _join(first: bytes, headers: Headers) -> bytes:
    kept = [(name, value) for name, value in headers if name.lower() not in _HOP]
    kept.append((b"Connection", b"close"))
    return b"\r\n".join([first, *(name + b": " + value for name, value in kept)]) + b"\r\n\r\n"


class GuardedProxy:
    """One a ToolServer; needs the user name and password that it made up."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.username = "atropos"
        self.password = secrets.token_urlsafe(24)
        self._basic = b"Basic " + base64.b64encode(f"{self.username}:{self.password}".encode())
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._tasks)

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)

    async def aclose(self) -> None:
        """Stop listening and cut what is open."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= _MAX_CONNECTIONS:
                await self._served(reader, writer)
        except asyncio.CancelledError:
            if not self._closing:
                raise
            # the end of this task: asyncio's streams would log its cancellation
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except* (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError):
            pass  # either side went away or talks nonsense: the browser shows its own error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            first, headers = _parse((await reader.readuntil(b"\r\n\r\n"))[:-4])
        try:
            given = next((value for name, value in headers if name.lower() == b"proxy-authorization"), b"")
            if not hmac.compare_digest(given, self._basic):
                raise _Refused("407 Proxy Authentication Required", "the proxy needs its password")
            method, target, _ = first.split(b" ", 2)
            if method == b"CONNECT":
                await self._tunnel(target.decode("ascii"), reader, writer)
            else:
                await self._forward(method, target.decode("ascii"), headers, reader, writer)
        except _Refused as refused:
            body = str(refused).encode()
            extra = b"Proxy-Authenticate: Basic realm=atropos\r\n" if refused.status.startswith("407") else b""
            writer.write(
                b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
                b"X-Atropos-Refused: %b\r\n%bConnection: close\r\n\r\n%b"
                % (refused.status.encode(), len(body), body.replace(b"\n", b" "), extra, body)
            )
            await writer.drain()

    async def _dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            addresses: Sequence[str] = await self._guard.addresses(host, port)
        except Forbidden as error:
            raise _Refused("403 Forbidden", str(error)) from None
        except OSError as error:
            raise _Refused("502 Bad Gateway", f"{host} does not resolve: {error.strerror or error}") from None
        last = ""
        for address in addresses:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, port, limit=_HEAD_BYTES)
            except (OSError, TimeoutError) as error:
                last = str(error) or type(error).__name__
        raise _Refused("502 Bad Gateway", f"{host}:{port} can't be reached: {last}")

    async def _tunnel(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        upstream_reader, upstream_writer = await self._dial(host.strip("[]"), int(port))
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with asyncio.TaskGroup() as group:
                up = group.create_task(_pump(reader, upstream_writer))
                down = group.create_task(_pump(upstream_reader, writer))
                await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
                if down.done():
                    up.cancel()
        finally:
            upstream_writer.close()

    async def _forward(
        self,
        method: bytes,
        target: str,
        headers: Headers,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname:
            raise _Refused("400 Bad Request", "only http:// addresses are forwarded")
        if any(name.lower() == b"transfer-encoding" for name, _ in headers):
            raise _Refused("411 Length Required", "a request body needs a length")
        length = int(next((value for name, value in headers if name.lower() == b"content-length"), b"0"))
        upstream_reader, upstream_writer = await self._dial(parts.hostname, parts.port or 80)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            upstream_writer.write(_join(method + b" " + path.encode("ascii") + b" HTTP/1.1", headers))
            async with asyncio.TaskGroup() as group:
                body = group.create_task(_copy(reader, upstream_writer, length))
                try:
                    await _answer(upstream_reader, writer)
                finally:
                    body.cancel()
        finally:
            upstream_writer.close()


async def _answer(upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Relay one answer, marked as the connection's last whatever the site says."""
    while True:
        async with asyncio.timeout(_IDLE_S):
            head = await upstream.readuntil(b"\r\n\r\n")
        first, headers = _parse(head[:-4])
        interim = first.split(b" ")[1:2] in ([b"100"], [b"102"], [b"103"])
        if interim:
            continue
        writer.write(_join(first, [(n, v) for n, v in headers if n.lower().decode("latin-1") != REFUSED_HEADER]))
        break
    length = next((value for name, value in headers if name.lower() == b"content-length"), None)
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    if length is not None and not chunked and length.isdigit():
        await _copy(upstream, writer, int(length))
    else:
        await _pump(upstream, writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int) -> None:
    while length > 0:
        async with asyncio.timeout(_IDLE_S):
            chunk = await reader.read(min(65_536, length))
        if not chunk:
            return
        length -= len(chunk)
        writer.write(chunk)
        await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(_IDLE_S):
                chunk = await reader.read(65_536)
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
