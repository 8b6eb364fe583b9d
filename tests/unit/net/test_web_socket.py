"""Text frames that are written by hand arrive whole, of whatever length, at either end of an aiohttp connection."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from atropos.net import web_socket

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, 200_000)


@pytest.fixture
async def connection():
    """The client's end of a connection to a server that answers each text by an unmasked frame of it, twice.

    After `close` it ends.
    """

    async def twice(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            text = web_socket.text_of(message)
            assert isinstance(text, str)
            if text == "close":
                break
            request.transport.write(2 * web_socket.unmasked(text.encode()))
        return socket

    app = web.Application()
    app.router.add_get("/", twice)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    async with aiohttp.ClientSession() as session, session.ws_connect(f"http://{host}:{port}/", compress=0) as socket:
        yield socket
    await runner.cleanup()


@pytest.mark.parametrize("size", SIZES)
async def test_frames_of_any_size_arrive(connection: aiohttp.ClientWebSocketResponse, size: int) -> None:
    text = b"x" * size
    await web_socket.send(connection, text)
    web_socket.send_now(connection, text)
    assert [web_socket.text_of(await connection.receive()) for _ in range(4)] == [text.decode()] * 4


def test_lengths_take_the_fewest_bytes() -> None:
    heads = [len(web_socket.unmasked(b"x" * size)) - size for size in (0, 125, 126, 65_535, 65_536)]
    assert heads == [2, 2, 4, 4, 10]  # RFC 6455, 5.2: others are refused by stricter readers than aiohttp's


def test_a_batch_is_an_array() -> None:
    assert [web_socket.batch(each) for each in ((), (b"1",), (b"1", b"{}"))] == [b"[]", b"[1]", b"[1,{}]"]


async def test_the_end_is_no_text(connection: aiohttp.ClientWebSocketResponse) -> None:
    await web_socket.send(connection, b"close")
    assert web_socket.text_of(await connection.receive()) is None
    with pytest.raises(web_socket.SENDING_FAILURES):
        await web_socket.send(connection, b"[]")
