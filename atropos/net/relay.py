"""One connection of a forward proxy: read the request, check and dial its destination, relay until it ends.

h11 reads and writes every message, both ways, so that nothing reaches an origin but one well-formed request, and no
answer but its own reaches the client. Each connection serves one request. Every refusal is a readable HTTP answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import ipaddress
import os
import re
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from atropos.aio import cancel_and_wait
from atropos.net.egress_policy import Address, EgressRefused, plain

HEAD_S, CONNECT_S = 20.0, 10.0
IDLE_S = 300.0
"""Longest time in which nothing moves in either direction, in seconds."""
REFUSED_HEADER = "x-atropos-refused"
"""On an answer that the proxy gave itself, with the reason; an origin's header of this name is dropped."""
CHUNK_BYTES = 1 << 16
_MAX_HEAD = 32_768
_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: to close is to reset."""
Dial = Callable[[str, int], Awaitable[tuple[str, asyncio.StreamReader, asyncio.StreamWriter]]]
"""Connects to a host and port; returns the host's canonical form and the connection.

Raises EgressRefused, OSError or TimeoutError.
"""
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
               b"trailer", b"upgrade", REFUSED_HEADER.encode()}  # fmt: skip
"""Headers that concern one connection alone (RFC 9110, 7.6.1)."""


class OutOfBytes(Exception):
    """The byte budget is used up."""


def basic_credentials(username: str, password: str) -> bytes:
    """The value of a Proxy-Authorization header."""
    return b"Basic " + base64.b64encode(f"{username}:{password}".encode())


async def relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    dial: Dial,
    *,
    spend: Callable[[int], None] = lambda _: None,
    admit: Callable[[], None] = lambda: None,
    credentials: bytes | None = None,
) -> None:
    """Serve one connection until both sides are closed.

    Args:
        reader: from the client.
        writer: to the client.
        dial: judges the destination and connects to it.
        spend: called with each number of bytes before they are moved; raises OutOfBytes.
        admit: called before anything is read; raises EgressRefused or OutOfBytes.
        credentials: the Proxy-Authorization that is required; None: none.
    """
    upstream: asyncio.StreamWriter | None = None
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
    try:
        admit()
        request = await _head(connection, reader)
        given = dict(request.headers).get(b"proxy-authorization", b"")
        if credentials is not None and not hmac.compare_digest(given, credentials):
            await _answer(connection, writer, 407, "the proxy needs its password\n")
            return
        host, port, target = _destination(request)
        name, remote, upstream = await dial(host, port)
        async with _while_it_moves(spend) as moved:
            if request.method == b"CONNECT":
                accepted = h11.Response(status_code=200, reason=b"Connection established", headers=[])
                writer.write(connection.send(accepted))
                rest, _ = connection.trailing_data
                await _splice(moved, reader, writer, remote, upstream, rest)
            else:
                forwarding = _Forwarding(moved, connection, reader, writer, remote, upstream)
                await forwarding.run(request, target, _authority(name, port))
                await _hear_out(connection, reader, writer, moved)
    except (EgressRefused, OutOfBytes, h11.ProtocolError, ValueError, OSError) as error:
        await _answer(connection, writer, *_refusal(error))
        await _hear_out(connection, reader, writer, spend)
    except asyncio.CancelledError:
        for stream in filter(None, (writer, upstream)):
            stream.transport.abort()  # nobody reads what is left
        raise
    finally:
        await _hang_up(*filter(None, (writer, upstream)))


async def tunnel(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    dial: Dial,
    host: str,
    port: int,
    *,
    spend: Callable[[int], None],
    admit: Callable[[], None],
) -> None:
    """Serve one connection of a program that believes it is connected to a host: all bytes, both ways, unread.

    Where the host can't be reached, or no more bytes may be moved, the program's connection is reset. `dial`, `spend`
    and `admit` as in `relay`.
    """
    upstream: asyncio.StreamWriter | None = None
    try:
        admit()
        _, remote, upstream = await dial(host, port)
        async with _while_it_moves(spend) as moved:
            await _splice(moved, reader, writer, remote, upstream, b"")
    except (EgressRefused, OutOfBytes, OSError):
        _reset(writer)
    except asyncio.CancelledError:
        _reset(writer)
        if upstream is not None:
            upstream.transport.abort()
        raise
    finally:
        await _hang_up(*filter(None, (writer, upstream)))


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that its other end can't take that for the end of an answer."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()


@contextlib.asynccontextmanager
async def _while_it_moves(spend: Callable[[int], None]) -> AsyncGenerator[Callable[[int], None]]:
    """End the body with `TimeoutError` once it has moved nothing for `IDLE_S`; it calls what it gets, as `spend`."""
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(IDLE_S) as idle:

        def moved(count: int) -> None:
            spend(count)
            if not idle.expired():
                idle.reschedule(clock() + IDLE_S)

        yield moved


def _refusal(error: Exception) -> tuple[int, str]:
    """Status and text of the answer to a request that failed."""
    if isinstance(error, EgressRefused | OutOfBytes):
        return 403, f"egress refused: {error}\n"
    if isinstance(error, TimeoutError):
        return 504, "egress: timed out\n"
    if isinstance(error, OSError):
        return 502, f"egress: {error.strerror or error}\n"
    return 400, f"egress: not a proxy request: {error}\n"


async def _head(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    async with asyncio.timeout(HEAD_S):
        while (event := connection.next_event()) is h11.NEED_DATA and (data := await reader.read(CHUNK_BYTES)):
            connection.receive_data(data)
    if not isinstance(event, h11.Request):
        raise ConnectionResetError("the client went away")
    return event


def _destination(request: h11.Request) -> tuple[str, int, bytes]:
    """Host, port and the target of the request to the origin."""
    text = request.target.decode("ascii", "strict")
    if request.method == b"CONNECT":
        host, colon, digits = text.rpartition(":")
        if not colon or not digits.isdecimal() or not 0 < int(digits) < 65_536:
            raise EgressRefused(f"{text[:200]!r} is not HOST:PORT")
        return host, int(digits), b""
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname:
        raise EgressRefused("only http:// addresses and CONNECT; is the proxy set in HTTP_PROXY and HTTPS_PROXY?")
    # cut from the text: `urllib` would turn `//a` into `////a` (Python 3.13) and `/a?` into `/a`
    path = text.partition("://")[2].partition("#")[0].removeprefix(parts.netloc)
    return parts.hostname, parts.port or 80, (path if path.startswith("/") else f"/{path}").encode("ascii")


def look_up(name: str, port: int) -> list[Address]:
    """A name's addresses. For a thread of the caller's own: the C library's look-up can't be interrupted.

    It also reads the odd spellings of addresses (127.1, 0x7f000001, 2130706433).

    Raises:
        OSError: there is none.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(plain(ipaddress.ip_address(str(item[4][0]).partition("%")[0])) for item in found))


async def connect(
    name: str, addresses: Sequence[Address], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of these addresses that answers.

    Raises:
        OSError: none does.
    """
    problem: OSError = OSError(f"{name} can't be reached")
    for address in addresses[:4]:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(str(address), port, limit=CHUNK_BYTES)
        except TimeoutError:
            problem = OSError(f"{name} ({address}) did not answer within {CONNECT_S:g} s")
        except OSError as error:
            problem = OSError(f"{name} ({address}): {os.strerror(error.errno) if error.errno else error}")
    raise problem


async def _splice(
    spend: Callable[[int], None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    remote: asyncio.StreamReader,
    upstream: asyncio.StreamWriter,
    first: bytes,
) -> None:
    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, data: bytes = b"") -> None:
        while True:
            if data:
                spend(len(data))
                sink.write(data)
                await sink.drain()
            data = await source.read(CHUNK_BYTES)
            if not data:
                break
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()

    tasks = [
        asyncio.ensure_future(pump(reader, upstream, first)),
        asyncio.ensure_future(pump(remote, writer)),
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


@dataclass(frozen=True)
class _Forwarding:
    """One request and its answer; the connection ends with it.

    `spend` as in `relay`, `remote` and `upstream` the origin's.
    """

    spend: Callable[[int], None]
    client: h11.Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    remote: asyncio.StreamReader
    upstream: asyncio.StreamWriter
    origin: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
    )

    async def run(self, request: h11.Request, target: bytes, authority: bytes) -> None:
        """Forward the request to the origin, and its answer to the client."""
        # the origin is the one that was judged, whatever the program wrote into its own Host (RFC 9112, 3.2.2)
        kept = [pair for pair in _end_to_end(request.headers) if pair[0] != b"host"]
        headers = [(b"host", authority), *kept, (b"connection", b"close")]
        asked = h11.Request(method=request.method, target=target, headers=headers)
        tasks = [asyncio.ensure_future(self._up(asked)), asyncio.ensure_future(self._down())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancel_and_wait(tasks)

    async def _send(self, data: bytes | None, sink: asyncio.StreamWriter) -> None:
        if data:
            self.spend(len(data))
            sink.write(data)
            await sink.drain()

    async def _offer(self, data: bytes) -> None:
        """Send the origin more of the request. One that takes no more has perhaps answered: `_down` sees it."""
        self.spend(len(data))
        with contextlib.suppress(OSError):
            if not self.upstream.is_closing():
                self.upstream.write(data)
                await self.upstream.drain()

    async def _up(self, asked: h11.Request) -> None:
        client, origin = self.client, self.origin
        await self._send(origin.send(asked), self.upstream)
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                if client.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    await self._send(client.send(go_on), self.writer)
                client.receive_data(await self.reader.read(CHUNK_BYTES))
            elif isinstance(event, (h11.Data, h11.EndOfMessage)):
                await self._offer(origin.send(event) or b"")
                if isinstance(event, h11.EndOfMessage):
                    break
            else:
                break
        # ends when the client hangs up; what it sends beyond its request is dropped
        while dropped := await self.reader.read(CHUNK_BYTES):
            self.spend(len(dropped))

    async def _down(self) -> None:
        client, origin = self.client, self.origin
        while True:
            try:
                event = origin.next_event()
            except h11.RemoteProtocolError as error:
                raise ConnectionResetError(f"the origin's answer is not HTTP: {error}") from None
            if event is h11.NEED_DATA:
                origin.receive_data(await self.remote.read(CHUNK_BYTES))
            elif isinstance(event, h11.Response):
                fields = [*_end_to_end(event.headers), (b"connection", b"close")]
                answer = h11.Response(status_code=event.status_code, reason=event.reason, headers=fields)
                await self._send(client.send(answer), self.writer)
            elif isinstance(event, h11.Data):
                await self._send(client.send(event), self.writer)
            elif isinstance(event, h11.EndOfMessage):
                await self._send(client.send(h11.EndOfMessage()), self.writer)
                return
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the origin closed the connection")


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that travel on. h11 gives their names in lower case."""
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    dropped = _HOP_BY_HOP | named - {b"host", b"content-length", b"transfer-encoding"}
    if any(name == b"transfer-encoding" for name, _ in headers):
        dropped.add(b"content-length")  # two lengths in one message is how requests are smuggled (RFC 9112, 6.1)
    return [(name, value) for name, value in headers if name not in dropped]


def _authority(name: str, port: int) -> bytes:
    host = f"[{name}]" if ":" in name else name
    return (host if port == 80 else f"{host}:{port}").encode("ascii")


async def _answer(connection: h11.Connection, writer: asyncio.StreamWriter, status: int, text: str) -> None:
    """Answer the program with an error.

    In the middle of an answer or a tunnel, reset: an end would look like theirs.
    """
    if writer.is_closing():
        return
    if connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        _reset(writer)
        return
    body = text.encode()
    # in the reason, too: it is all that many programs show of a refused CONNECT
    reason = re.sub(r"[^ -~]", "?", text.strip())[:200]
    head = [f"HTTP/1.1 {status} {reason}", "content-type: text/plain; charset=utf-8", f"content-length: {len(body)}"]
    head += [f"{REFUSED_HEADER}: {reason}", *(["proxy-authenticate: Basic realm=atropos"] if status == 407 else [])]
    writer.write("\r\n".join([*head, "connection: close", "", ""]).encode() + body)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(HEAD_S):
            await writer.drain()


async def _hear_out(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spend: Callable[[int], None]
) -> None:
    """Read the rest of a request that was answered before its end.

    To close with unread data is to reset, which takes the answer from a client that still sends (RFC 9112, 9.6).
    """
    if writer.is_closing() or connection.they_are_waiting_for_100_continue:
        return
    with contextlib.suppress(OSError, OutOfBytes, h11.ProtocolError):
        async with asyncio.timeout(HEAD_S):
            while connection.their_state is h11.SEND_BODY:
                if connection.next_event() is h11.NEED_DATA:
                    writer.write_eof()
                    data = await reader.read(CHUNK_BYTES)
                    spend(len(data))
                    connection.receive_data(data)


async def _hang_up(*streams: asyncio.StreamWriter) -> None:
    """Close, and wait until what was written has been read: meanwhile the connection counts as one of its slot's."""
    for stream in streams:
        stream.close()
    try:
        async with asyncio.timeout(IDLE_S):
            await asyncio.gather(*(stream.wait_closed() for stream in streams), return_exceptions=True)
    except TimeoutError:
        pass
    finally:
        for stream in streams:
            stream.transport.abort()
