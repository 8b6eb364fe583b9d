"""One connection of a forward proxy: read the request, check and dial its destination, relay until it ends.

Each connection serves one request. Every refusal is a readable HTTP answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import ipaddress
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

import h11

from atropos.aio import task_group
from atropos.net.egress_policy import Address, EgressRefused, plain
from atropos.net.exchange import (
    CHUNK_BYTES,
    HEAD_S,
    MAX_HEAD,
    Forwarding,
    OutOfBytes,
    abort,
    answer,
    authority,
    head,
    hear_out,
    refusal,
    reset,
)
from atropos.net.insertion import NO_SECRETS, Insertion, SlotSecrets

CONNECT_S = 10.0
IDLE_S = 300.0
"""Longest time in which nothing moves in either direction, in seconds."""
Dial = Callable[[str, int], Awaitable[tuple[str, asyncio.StreamReader, asyncio.StreamWriter]]]
"""Connects to a host and port; returns the host's canonical form and the connection.

Raises EgressRefused, OSError or TimeoutError.
"""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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
    secrets: SlotSecrets = NO_SECRETS,
) -> None:
    """Serve one connection until both sides are closed.

    Args:
        reader: from the client.
        writer: to the client.
        dial: judges the destination and connects to it.
        spend: called with each number of bytes before they are moved; raises OutOfBytes.
        admit: called before anything is read; raises EgressRefused or OutOfBytes.
        credentials: the Proxy-Authorization that is required; None: none.
        secrets: those that are put into requests, by host.
    """
    upstream: asyncio.StreamWriter | None = None
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    try:
        # Before the head is read: a connection beyond the bound costs no memory for it.
        admit()
        request = await head(connection, reader)
        authorization = dict(request.headers).get(b"proxy-authorization", b"")
        # In constant time, so that how long it takes says nothing of how much was right.
        if credentials is not None and not hmac.compare_digest(authorization, credentials):
            await answer(connection, writer, 407, "the proxy needs its password\n")
            return
        host, port, target = _destination(request)
        # `name`, from here on: the canonical form that was judged, whatever the request calls it.
        name, remote, upstream = await dial(host, port)
        async with _while_it_moves(spend) as moved:
            if request.method == b"CONNECT":
                insertion = secrets.of(name, port, tls=True)
                rest = _accept_tunnel(connection, writer, held=insertion is not None)
                if insertion is not None:
                    await _serve_as_host(moved, (reader, writer), (remote, upstream), name, port, insertion)
                else:
                    await _splice(moved, reader, writer, remote, upstream, rest)
            else:
                insertion = secrets.of(name, port, tls=False)
                forwarding = Forwarding(moved, connection, reader, writer, remote, upstream, insertion)
                await forwarding.run(request, target, authority(name, port))
                await hear_out(connection, reader, writer, moved)
    except (EgressRefused, OutOfBytes, h11.ProtocolError, ValueError, OSError) as error:
        await answer(connection, writer, *refusal(error))
        await hear_out(connection, reader, writer, spend)
    except asyncio.CancelledError:
        abort(writer, upstream)  # nobody reads what is left
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
    secrets: SlotSecrets = NO_SECRETS,
) -> None:
    """Serve one connection of a program that believes it is connected to a host: all bytes, both ways, unread.

    Only what it sends to a host that has secrets is read, as a request. Where the host can't be reached, or no more
    bytes may be moved, the program's connection is reset. `writer` is held (`hold`), the others as in `relay`.
    """
    upstream: asyncio.StreamWriter | None = None
    try:
        admit()
        name, remote, upstream = await dial(host, port)
        insertion = secrets.of(name, port)
        async with _while_it_moves(spend) as moved:
            if insertion is not None:
                await _serve_as_host(moved, (reader, writer), (remote, upstream), name, port, insertion)
            else:
                _go_on(writer)
                await _splice(moved, reader, writer, remote, upstream, b"")
    except (EgressRefused, OutOfBytes, OSError):
        reset(writer)
    except asyncio.CancelledError:
        reset(writer)
        abort(upstream)
        raise
    finally:
        await _hang_up(*filter(None, (writer, upstream)))


def _accept_tunnel(connection: h11.Connection, writer: asyncio.StreamWriter, *, held: bool) -> bytes:
    """Answer CONNECT, and return what came behind it; with `held`, nothing more is read for now."""
    if held:
        hold(writer)
    accepted = h11.Response(status_code=200, reason=b"Connection established", headers=[])
    writer.write(connection.send(accepted))
    return connection.trailing_data[0]


async def _serve_as_host(
    spend: Callable[[int], None], client: Streams, origin: Streams, name: str, port: int, insertion: Insertion
) -> None:
    """Serve one request of a program that believes it is connected to the host, with the host's secrets in it."""
    (reader, writer), (remote, upstream) = client, origin
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    tls = insertion.authority is not None
    try:
        if insertion.authority is not None:
            # A program makes the certificate.
            shown = await asyncio.to_thread(insertion.authority.context, name)
            # The program first: one that doesn't trust the authority ends here, before the host sees anything.
            await writer.start_tls(shown, ssl_handshake_timeout=HEAD_S)
            await upstream.start_tls(_trusted(), server_hostname=name, ssl_handshake_timeout=HEAD_S)
        else:
            _go_on(writer)
        request = await head(connection, reader)
        if not request.target.startswith(b"/"):  # an origin takes the host of an absolute one (RFC 9112, 3.2.2)
            raise EgressRefused("only a path is requested of a host that has secrets")
        forwarding = Forwarding(spend, connection, reader, writer, remote, upstream, insertion)
        await forwarding.run(request, request.target, authority(name, port, tls=tls))
        await hear_out(connection, reader, writer, spend)
    except (EgressRefused, OutOfBytes, h11.ProtocolError, OSError) as error:
        await answer(connection, writer, *refusal(error))
        await hear_out(connection, reader, writer, spend)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Knows hosts by the authorities of this machine, or of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def hold(writer: asyncio.StreamWriter) -> None:
    """Read nothing of a connection until it is known who reads it: TLS takes up nothing that was read before it began.

    The first step of the task that serves a new connection is early enough.
    """
    cast("asyncio.Transport", writer.transport).pause_reading()


def _go_on(writer: asyncio.StreamWriter) -> None:
    cast("asyncio.Transport", writer.transport).resume_reading()


@contextlib.asynccontextmanager
async def _while_it_moves(spend: Callable[[int], None]) -> AsyncGenerator[Callable[[int], None]]:
    """End the body with `TimeoutError` once it has moved nothing for `IDLE_S`; it calls what it gets, as `spend`."""
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(IDLE_S) as idle:

        def moved(count: int) -> None:
            spend(count)
            # Rescheduling a timeout that has fired raises RuntimeError.
            if not idle.expired():
                idle.reschedule(clock() + IDLE_S)

        yield moved


def _destination(request: h11.Request) -> tuple[str, int, bytes]:
    """Host, port and the target of the request to the origin."""
    # Beyond ASCII the host could read as another name to the origin's parser than to this one.
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
    infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(plain(ipaddress.ip_address(str(item[4][0]).partition("%")[0])) for item in infos))


async def connect(
    name: str, addresses: Sequence[Address], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of these addresses that answers.

    Raises:
        OSError: none does.
    """
    problem: OSError = OSError(f"{name} can't be reached")
    # Four: a name may have dozens, and each that is silent takes `CONNECT_S`.
    for address in addresses[:4]:
        try:
            async with asyncio.timeout(CONNECT_S):
                # By address: a second look-up of the name could be answered otherwise (DNS rebinding).
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
            # Only this direction ends: the other side may go on sending (a half-closed connection).
            sink.write_eof()

    try:
        async with task_group() as tasks:
            tasks.create_task(pump(reader, upstream, first))
            tasks.create_task(pump(remote, writer))
    except BaseException:
        reset(upstream)  # an end would say that it has all that the program had to send
        raise


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
        abort(*streams)
