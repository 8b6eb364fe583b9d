"""The server's end of a file stream, without a slot behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from atropos.sandbox.server.calls.file_streams import FileStream, StreamGone


async def piece() -> AsyncIterator[bytes]:
    """The body of a request whose connection is silent from then on."""
    yield b"begun"
    await asyncio.Event().wait()


async def test_last_request_continues():
    stream = FileStream(lambda: None)
    first = asyncio.create_task(stream.receive(0, piece(), last=False))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(stream.receive(0, piece(), last=False)) for _ in range(2)]
    try:
        for over in (first, others[0]):
            await asyncio.wait([over], timeout=1)
            assert over.done()
            assert isinstance(over.exception(), StreamGone)
        assert not others[1].done()
        assert stream.received == len(b"begun")
    finally:
        stream.close()
        for each in (first, *others):
            each.cancel()
        await asyncio.gather(first, *others, return_exceptions=True)


async def test_surplus_bytes_end_stream():
    stream = FileStream(lambda: None, max_bytes=10)
    stream.far.sendall(b"0123456789")
    chunks = stream.chunks()
    try:
        assert await anext(chunks) == b"0123456789"
        stream.far.sendall(b"x")
        with pytest.raises(ConnectionResetError, match="more than was asked for"):
            await anext(chunks)
    finally:
        stream.close()
