"""Connections through the proxy last while anything moves, and an error in the middle is never taken for their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from atropos.net import relay
from atropos.net.egress_policy import EgressRefused
from atropos.net.insertion import SlotSecrets
from atropos.net.secrets import HostSecret

pytestmark = pytest.mark.waits

IDLE_S = 4.0
"""Much longer than a busy machine keeps a process waiting: what moves every eighth of it is never idle."""


@contextlib.asynccontextmanager
async def through(
    origin, spend=lambda _: None, **settings
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a proxy before this origin."""

    async def answered(reader, writer):
        with contextlib.suppress(OSError):
            await origin(reader, writer)
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as there:

        async def dial(host, _):
            return host, *await asyncio.open_connection(*there.sockets[0].getsockname())

        async def proxied(reader, writer):
            await relay.relay(reader, writer, settings.pop("dial", dial), spend=spend, **settings)

        async with await asyncio.start_server(proxied, "127.0.0.1", 0) as proxy:
            reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
            try:
                yield reader, writer
            finally:
                writer.close()


async def tunnel(reader, writer) -> None:
    writer.write(b"CONNECT origin:443 HTTP/1.1\r\nHost: origin\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"


def budget(left: int):
    def spend(count):
        nonlocal left
        left -= count
        if left < 0:
            raise relay.OutOfBytes("none left")

    return spend


async def trickle(writer, pieces: int, data: bytes, every_s: float = IDLE_S / 8) -> None:
    for _ in range(pieces):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(every_s)


async def test_long_transfers_are_whole(monkeypatch):
    monkeypatch.setattr(relay, "IDLE_S", IDLE_S)

    async def download():
        async def origin(_, writer):
            await trickle(writer, 10, b"piece")

        async with through(origin) as (reader, writer):
            await tunnel(reader, writer)
            assert await reader.read() == b"piece" * 10

    async def upload():
        async def origin(reader, writer):
            await reader.readuntil(b"piece" * 10)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        async with through(origin) as (reader, writer):
            writer.write(b"POST http://origin/ HTTP/1.1\r\nHost: origin\r\nContent-Length: 50\r\n\r\n")
            await trickle(writer, 10, b"piece")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")

    await asyncio.gather(download(), upload())


async def test_an_idle_tunnel_is_reset(monkeypatch):
    monkeypatch.setattr(relay, "IDLE_S", IDLE_S / 2)

    async def origin(reader, _):
        await reader.read()

    async with through(origin) as (reader, writer), through(origin) as (idle, tunnelled):
        writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n\r\n")
        await tunnel(idle, tunnelled)
        assert (await reader.read()).startswith(b"HTTP/1.1 504 ")
        with pytest.raises(ConnectionResetError):
            await idle.read()


@pytest.mark.parametrize("then", ["reads", "leaves", "stalls"])
async def test_a_late_reader_gets_the_end(monkeypatch, then):
    """Its connection counts as one of its slot's for as long; that a reader goes away is no fault of the relay's."""
    if then == "stalls":
        monkeypatch.setattr(relay, "IDLE_S", IDLE_S / 2)
    hanging_up, ended = asyncio.Event(), asyncio.get_running_loop().create_future()
    hang_up, data = relay._hang_up, bytes(50_000)  # more than the sockets take, and little enough for the last write

    async def noted(*streams):
        hanging_up.set()
        await hang_up(*streams)

    async def origin(_, writer):
        writer.write(data)
        writer.close()

    async def dial(host, _):
        return host, *await asyncio.open_connection(*there.sockets[0].getsockname())

    async def proxied(reader, writer):
        ended.set_result(
            await asyncio.gather(relay.relay(reader, writer, dial, spend=lambda _: None), return_exceptions=True)
        )

    monkeypatch.setattr(relay, "_hang_up", noted)
    listener, client = socket.create_server(("127.0.0.1", 0)), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listener.getsockname())
    async with (
        await asyncio.start_server(origin, "127.0.0.1", 0) as there,
        await asyncio.start_server(proxied, sock=listener),
    ):
        reader, writer = await asyncio.open_connection(sock=client, limit=1000)
        await tunnel(reader, writer)
        writer.write_eof()
        await hanging_up.wait()
        if then == "reads":
            assert len(await reader.read()) == len(data)
        elif then == "stalls":
            await ended
            assert len(await reader.read()) < len(data)
        else:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        assert await ended == [None]
        writer.close()


async def test_no_http_is_origin_s_fault():
    async def origin(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with through(origin) as (reader, writer):
        writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 502 egress: the origin's answer is not HTTP")


async def test_client_reset_is_passed_on():
    failed = []
    gc.collect()  # what other tests left may complain as it is collected
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    ended = asyncio.Event()

    async def origin(reader, _):
        with pytest.raises(ConnectionResetError):
            await reader.read()
        ended.set()

    async with through(origin) as (reader, writer):
        await tunnel(reader, writer)
        linger = struct.pack("ii", 1, 0)  # to close is to reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await ended.wait()
    gc.collect()
    await asyncio.sleep(0)
    assert failed == []


async def test_a_used_up_tunnel_is_reset():
    async def origin(_, writer):
        await trickle(writer, 10, b"piece", 0.1)

    async with through(origin, budget(20)) as (reader, writer):
        await tunnel(reader, writer)
        got = b""
        with pytest.raises(ConnectionResetError):
            while data := await reader.read(100):
                got += data
        assert got == b"piece" * 4


async def test_used_up_upload_is_no_whole_one():
    took = asyncio.get_running_loop().create_future()

    async def origin(reader, _):
        try:
            took.set_result(await reader.read())
        except ConnectionResetError:
            took.set_result("reset")

    async with through(origin, budget(20)) as (reader, writer):
        await tunnel(reader, writer)
        await trickle(writer, 5, b"piece", 0.1)
        assert await took == "reset"


async def exchanged(request: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """What an origin got of a program's request, and the program of the origin's answer."""
    got = asyncio.get_running_loop().create_future()

    async def origin(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        got.set_result(head + (await reader.readuntil(b"0\r\n\r\n") if b"chunked" in head else b""))
        writer.write(answer)

    async with through(origin) as (reader, writer):
        writer.write(request)
        answered = await reader.read()
        return await got, answered


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_a_message_has_one_length():
    request = (
        b"POST http://origin/ HTTP/1.1\r\nHost: origin\r\nContent-Length: 44\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nhi\r\n0\r\n\r\nGET http://origin/smuggled HTTP/1.1\r\n"
    )
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    got, answered = await exchanged(request, answer)
    for message, body in ((got, b"2\r\nhi\r\n0\r\n\r\n"), (answered, b"2\r\nok\r\n0\r\n\r\n")):
        assert b"transfer-encoding: chunked" in message.lower()
        assert b"content-length" not in message.lower()
        assert message.partition(b"\r\n\r\n")[2] == body


async def test_hop_by_hop_headers_stay():
    request = (
        b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\nConnection: X-One, Host,x-two\r\nX-One: 1\r\nX-Two: 2\r\nX-Three: 3\r\n"
        b"Proxy-Authorization: Basic x\r\nTE: trailers\r\n\r\n"
    )
    got, answered = await exchanged(
        request, OK.replace(b"Content", b"Keep-Alive: 5\r\nX-Atropos-Refused: mine\r\nContent")
    )
    head = got.lower()
    assert b"host: origin\r\n" in head
    assert b"x-three: 3" in head
    assert not any(name in head for name in (b"x-one", b"x-two", b"proxy-authorization", b"te: trailers"))
    assert b"keep-alive" not in answered.lower()
    assert b"x-atropos-refused" not in answered.lower()
    assert answered.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://origin/", "origin"),
        ("http://origin:81/", "origin:81"),
        ("http://[::1]/", "[::1]"),
        ("http://[::1]:81/", "[::1]:81"),
    ],
)
async def test_unusual_ports_are_named(url, host):
    got, _ = await exchanged(f"GET {url} HTTP/1.1\r\nHost: other\r\n\r\n".encode(), OK)
    assert f"host: {host}\r\n" in got.decode().lower()


async def test_a_gone_origin_is_at_fault():
    async def origin(reader, writer):
        await reader.readuntil(b"\r\n\r\n")

    async with through(origin) as (reader, writer):
        writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (EgressRefused("origin is denied"), 403, "egress refused: origin is denied"),
        (relay.OutOfBytes("none left"), 403, "egress refused: none left"),
        (TimeoutError(), 504, "egress: timed out"),
        (OSError(errno.ECONNREFUSED, "Connection refused"), 502, "egress: Connection refused"),
    ],
    ids=str,
)
async def test_a_refusal_says_why(error, status, words):
    async def refused(_host, _port):
        raise error

    async with through(None, dial=refused) as (reader, writer):
        writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n\r\n")
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    assert head.splitlines()[0] == f"HTTP/1.1 {status} {words}"
    assert f"x-atropos-refused: {words}" in head.splitlines()
    assert body == f"{words}\n"


async def test_no_request_is_the_client_s_fault():
    async with through(None) as (reader, writer):
        writer.write(b"no request\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 egress: not a proxy request")
    async with through(None) as (reader, writer):
        writer.write(b"GET http://origin/ HTTP/1.1\r\n")
        writer.write_eof()
        assert (await reader.read()).startswith(b"HTTP/1.1 502 egress: the client went away")


@pytest.mark.parametrize(
    "request_line",
    [
        *("CONNECT 443", "CONNECT origin", "CONNECT origin:", "CONNECT origin:x", "CONNECT origin:0"),
        *("CONNECT origin:65536", "GET https://origin/", "GET http:///path", "GET /"),
    ],
)
async def test_no_destination_is_refused(request_line):
    async def silent(_reader, _writer):
        """Ends at once."""

    async with through(silent) as (reader, writer):
        writer.write(f"{request_line} HTTP/1.1\r\nHost: origin\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 403 egress refused: ")


async def test_a_proxy_may_have_a_password():
    password = relay.basic_credentials("me", "secret")
    for sent in (b"", b"Proxy-Authorization: Basic x\r\n"):
        async with through(None, credentials=password) as (reader, writer):
            writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n" + sent + b"\r\n")
            head = (await reader.read()).partition(b"\r\n\r\n")[0]
        assert head.startswith(b"HTTP/1.1 407 ")
        assert b"proxy-authenticate: Basic realm=atropos" in head.split(b"\r\n")

    async def origin(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)

    # "me:secret" as RFC 7617 has it
    sent = b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n"
    async with through(origin, credentials=password) as (reader, writer):
        writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n" + sent + b"\r\n")
        assert (await reader.read()).endswith(b"ok")


async def test_what_begins_as_a_secret_arrives():
    """It is held back until more comes, or the end."""
    body = b"it ends with tok-1234"

    async def origin(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    secrets = SlotSecrets([HostSecret.of(["origin:80"], "x-key", "tok-12345678-abcdef", tls=False)])
    async with through(origin, secrets=secrets) as (reader, writer):
        writer.write(b"GET http://origin/ HTTP/1.1\r\nHost: origin\r\n\r\n")
        assert (await reader.read()).endswith(body)


@contextlib.asynccontextmanager
async def believed(dial, **settings) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of a program that believes it is connected to port 80 of a host."""

    async def proxied(reader, writer):
        relay.hold(writer)
        await relay.tunnel(reader, writer, dial, "origin", 80, spend=lambda _: None, admit=lambda: None, **settings)

    async with await asyncio.start_server(proxied, "127.0.0.1", 0) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()


async def test_an_unreached_host_resets():
    async def dial(*_):
        raise EgressRefused("nowhere")

    async with believed(dial) as (reader, _):
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_host_with_secrets_gets_paths_alone():
    heads = []

    async def origin(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)
        writer.close()

    async with await asyncio.start_server(origin, "127.0.0.1", 0) as there:

        async def dial(host, _):
            return host, *await asyncio.open_connection(*there.sockets[0].getsockname())

        secrets = SlotSecrets([HostSecret.of(["origin:80"], "x-key", "tok-12345678", tls=False)])
        for target, status in ((b"/a", b"200"), (b"http://other/a", b"403")):
            async with asyncio.timeout(30), believed(dial, secrets=secrets) as (reader, writer):
                writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: origin\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
    (head,) = heads
    assert b"x-key: tok-12345678" in head.lower()
