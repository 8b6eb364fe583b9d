"""The one gate in front of every listening port, with a small HTTP server behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest

from atropos.net.admission import MAX_HEAD_BYTES, Admission, BearerToken
from tests.waiting import SLOWNESS, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Http(asyncio.Protocol):
    """Keeps what it gets, and answers at once."""

    def __init__(self, seen: list[bytes]) -> None:
        self.seen = seen

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.seen.append(data)
        self.transport.write(OK)
        self.transport.close()


class Site:
    def __init__(self, admission: Admission) -> None:
        self.admission, self.seen, self.port = admission, [], 0

    async def send(self, *parts: bytes, then_eof: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.01)
            if then_eof:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 20 * SLOWNESS)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def site(**settings) -> AsyncIterator[Site]:
    made = Site(Admission(BearerToken("right"), ["/health"], b'{"code":"unauthorized"}', **settings))
    http = lambda: Http(made.seen)  # noqa: E731
    server = await asyncio.get_running_loop().create_server(lambda: made.admission.connection(http), "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.admission.close()
    assert not len(made.admission)


async def test_admits_byte_for_byte():
    parts = b"POST /x HTTP/1.1\r\nHost: x\r\nauthori", b"zation: bearer right\r\nContent-Length: 3\r\n\r", b"\nabc"
    async with site() as it:
        assert await it.send(*parts) == OK
    assert it.seen == [b"".join(parts)]


class Keys:
    """Every token is its holder's name."""

    def holder(self, value: bytes) -> str | None:
        return value.decode() or None


async def test_one_holder_leaves_room_for_others():
    class Open(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(b"in\n")

    admission = Admission(Keys(), (), b"{}", most_each=2)
    server = await asyncio.get_running_loop().create_server(lambda: admission.connection(Open), "127.0.0.1", 0)
    held: dict[str, list[asyncio.StreamWriter]] = {}

    async def enters(name: str, method: str = "GET") -> bool:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        held.setdefault(name, []).append(writer)
        writer.write(f"{method} / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {name}\r\n\r\n".encode())
        said = await asyncio.wait_for(reader.readline(), 20 * SLOWNESS)
        assert said == b"in\n" or said.startswith(b"HTTP/1.1 429 ")
        return said == b"in\n"

    try:
        assert [await enters(name) for name in ("a", "a", "a", "b")] == [True, True, False, True]
        assert not await enters("a", "HEAD")
        held["a"][0].close()
        async with asyncio.timeout(20 * SLOWNESS):
            while not await enters("a"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        for writer in (each for every in held.values() for each in every):
            writer.close()
        server.close()
        admission.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.1\r\nHost: x\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\nAuthorization: Bearer right\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n",
        b"GET /health/more HTTP/1.1\r\nHost: x\r\n",
    ],
)
async def test_anything_else_is_refused(head):
    async with site() as it:
        answer = await it.send(head + b"\r\nabcde")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nWWW-Authenticate: Bearer\r\n" in answer
    assert answer.endswith(b'{"code":"unauthorized"}')
    assert it.seen == []


async def test_refused_head_has_no_body():
    async with site() as it:
        answer = await it.send(b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (answer[:13], answer[-4:], it.seen) == (b"HTTP/1.1 401 ", b"\r\n\r\n", [])


async def test_long_bodies_are_answered():
    async with site() as it:
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n"
        assert (await it.send(head, *[bytes(5_000_000)] * 4)).startswith(b"HTTP/1.1 401 ")


async def test_open_requests_lose_body():
    async with site() as it:
        more = b"abcdGET /secret HTTP/1.1\r\nHost: x\r\n\r\n"
        assert await it.send(b"GET /health?x=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n" + more) == OK
    assert it.seen == [b"GET /health?x=1 HTTP/1.1\r\nhost: x\r\nConnection: close\r\n\r\n"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nX: " + bytes([65]) * MAX_HEAD_BYTES, b" 431 "),
    ],
)
async def test_no_request_is_refused(sent, status):
    async with site() as it:
        answer = await it.send(sent, then_eof=True)
    assert status in answer.split(b"\r\n")[0]
    assert answer.endswith(b'\r\n\r\n{"code":"bad_request","message":"this is not an HTTP request"}')
    assert it.seen == []


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_no_token_has_a_deadline(sent):
    async with site(head_s=0.3) as it:
        with contextlib.suppress(ConnectionError):
            await it.send(sent)  # until it is closed
        await until(lambda: not len(it.admission), "the end of the connection")


async def test_excess_closes_the_oldest():
    async with site(most=2) as it:
        first, second, third = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(3)]
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(first[0].read(), 20 * SLOWNESS) == b""
        for reader, writer in (second, third):
            writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\n\r\n")
            assert await asyncio.wait_for(reader.read(), 20 * SLOWNESS) == OK
        for _, writer in (first, second, third):
            writer.close()


async def test_who_leaves_is_not_counted():
    async with site(head_s=600) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        await until(lambda: len(it.admission) == 1, "the connection")
        writer.close()
        await until(lambda: not len(it.admission), "its end, long before its deadline")


async def test_one_other_header_may_have_the_token():
    async with site(token_headers=[b"x-key"]) as it:
        for sent, status in (("right", b" 200 "), ("wrong", b" 401 "), ("right\r\nX-Key: right", b" 401 ")):
            answer = await it.send(f"GET /x HTTP/1.1\r\nHost: x\r\nX-Key: {sent}\r\n\r\n".encode())
            assert status in answer.split(b"\r\n")[0]


async def test_an_open_request_s_server_hears_all():
    http, transport = Mock(spec=asyncio.Protocol), Mock(spec=asyncio.Transport)
    connection = Admission(BearerToken("right"), ["/health"], b"").connection(lambda: http)
    connection.connection_made(transport)
    connection.pause_writing()
    connection.data_received(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.pause_writing()
    connection.resume_writing()
    connection.connection_lost(None)
    heard = ["connection_made", "data_received", "pause_writing", "resume_writing", "connection_lost"]
    assert [name for name, *_ in http.method_calls] == heard


async def test_who_has_the_token_has_no_deadline():
    http, transport, admission = Mock(spec=asyncio.Protocol), Mock(spec=asyncio.Transport), Admission(None, None, b"")
    connection = admission.connection(lambda: http)
    connection.connection_made(transport)
    connection.data_received(b"GET /x HTTP/1.1\r\n")
    assert len(admission) == 1
    connection.data_received(b"Host: x\r\n\r\n")
    assert len(admission) == 0
    assert connection._deadline.cancelled()
    http.data_received.assert_called_once_with(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
