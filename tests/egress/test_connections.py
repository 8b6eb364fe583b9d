"""Connections through the proxy itself, without slots: what counts as one, what counts as bytes, what the origin is
asked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from atropos.net.egress_policy import Address, Policy
from atropos.sandbox.programs.egress_proxy import LOOKUPS, Proxy
from tests.waiting import SLOWNESS, until

BIG = 8 << 20


class Anything(Policy):
    """Lets everything through, so that an origin may stand on this machine."""

    def judge_name(self, host: str, port: int) -> str:
        return host

    def judge_addresses(self, name: str, port: int, addresses: list[Address], own: frozenset[Address]) -> list[Address]:
        return addresses


@contextlib.asynccontextmanager
async def proxied(*, budget: int = 1 << 40, connections: int = 8) -> AsyncIterator[tuple[Proxy, int, str, list[bytes]]]:
    """A proxy, its port, an origin's address, and the request lines that the origin got."""
    asked: list[bytes] = []

    async def origin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b"\r\n")[0])
        if b"/too-large" in head:  # before it is all there
            writer.write(b"HTTP/1.1 413 Too large\r\nContent-Length: 2\r\n\r\nno")
            if b"/too-large-and-gone" not in head:
                await reader.read()
            writer.close()
            return
        with contextlib.suppress(OSError):
            size = BIG if b"/big" in head else 2
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            if b"/hang" not in head:
                writer.write(b"x" * size)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(origin, "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(Anything((), ()), slots=1)
    await proxy.serve(proxy.add(1, budget, connections), [listener])
    try:
        yield proxy, listener.getsockname()[1], f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        proxy.drop(1)
        server.close()


async def ask(port: int, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return reader, writer


async def upload(port: int, target: str, *, chunked: bool = False) -> bytes:
    """The answer to a request that is sent to its end before anything is read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {BIG}"
    writer.write(f"POST {target} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
    with contextlib.suppress(ConnectionError):
        for _ in range(BIG >> 16):
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n" if chunked else bytes(1 << 16))
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
    got = await answer(reader)
    writer.close()
    return got


async def answer(reader: asyncio.StreamReader) -> bytes:
    """All that came, also where the connection is reset after it."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            got += piece
    return got


async def test_an_unread_answer_counts():
    """A program that half-closes and does not read keeps its connection, and so its place."""
    async with proxied(connections=4) as (proxy, port, origin, _), asyncio.timeout(20):
        kept, before = [], asyncio.all_tasks()
        for _ in range(4):
            reader, writer = await ask(port, f"http://{origin}/big")
            await reader.readexactly(1)
            await asyncio.sleep(0.2)  # until it waits for this end to read on
            writer.write_eof()
            kept.append((reader, writer))
        await asyncio.sleep(0.2)
        refused, _ = await ask(port, f"http://{origin}/fifth")
        assert b"this slot has 4 connections open already" in await answer(refused)
        await answer(kept[0][0])
        again, _ = await ask(port, f"http://{origin}/again")
        assert (await answer(again)).endswith(b"xx")
        proxy.drop(1)
        await until(lambda: asyncio.all_tasks() <= before, "their end")


async def test_what_follows_is_counted():
    async with proxied(budget=1 << 20) as (_, port, origin, _), asyncio.timeout(20):
        reader, writer = await ask(port, f"http://{origin}/hang")
        with contextlib.suppress(OSError):
            for _ in range(64):
                writer.write(bytes(1 << 16))
                await writer.drain()
            await answer(reader)
        after, _ = await ask(port, f"http://{origin}/after")
        assert b"as many bytes as it may" in await answer(after)


@pytest.mark.parametrize("path", ["", "?q=1", "/", "//twice//there", "/a?", "/a?b?c", "/a;b", "/%2f%0a", "/a#no"])
async def test_origin_is_asked_as_written(path):
    async with proxied() as (_, port, origin, asked), asyncio.timeout(20):
        reader, _ = await ask(port, f"http://{origin}{path}")
        await answer(reader)
        wanted = path.partition("#")[0]
        assert asked == [f"GET {wanted if wanted.startswith('/') else '/' + wanted} HTTP/1.1".encode()]


async def test_failing_dns_refuses_nothing(monkeypatch):
    """Programs try a 502 again, and take a 403 for the last word."""

    def fails(_name: str, _port: int) -> list[Address]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("atropos.sandbox.programs.egress_proxy.look_up", fails)
    async with proxied() as (_, port, _, _), asyncio.timeout(20):
        reader, _ = await ask(port, "http://files.example.org/")
        said = (await answer(reader)).decode().splitlines()
    assert said[0].startswith("HTTP/1.1 502 egress: files.example.org has no address (Temporary failure")


async def test_failures_leave_room(monkeypatch):
    def full(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with proxied() as (_, port, origin, _), asyncio.timeout(20 * SLOWNESS):
        target = f"http://localhost:{origin.rpartition(':')[2]}/"
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(threading.Thread, "start", full)
            for _ in range(LOOKUPS + 1):
                reader, _ = await ask(port, target)
                assert b" 502 egress: localhost can't be looked up now" in await answer(reader)
        reader, _ = await ask(port, target)
        assert b" 200 OK" in await answer(reader)


@pytest.mark.parametrize("path", ["too-large", "too-large-and-gone"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_early_answers_are_read(path, chunked):
    async with proxied() as (_, port, origin, _), asyncio.timeout(20 * SLOWNESS):
        assert (await upload(port, f"http://{origin}/{path}", chunked=chunked)).startswith(b"HTTP/1.1 413 Too large")


async def test_refusal_of_upload_is_read():
    async with proxied() as (_, port, _, _), asyncio.timeout(20 * SLOWNESS):
        assert (await upload(port, "ftp://files.example.org/")).startswith(b"HTTP/1.1 403 egress refused")


async def test_answered_are_counted():
    async with proxied(budget=1 << 20) as (_, port, origin, _), asyncio.timeout(20 * SLOWNESS):
        await upload(port, f"http://{origin}/too-large")
        after, _ = await ask(port, f"http://{origin}/after")
        assert b"as many bytes as it may" in await answer(after)


async def test_waits_in_the_kernel():
    """A queue that is full drops them, and their kernel tries again after a second, three, and seven."""
    async with proxied(connections=64) as (_, port, _, _):
        with contextlib.ExitStack() as opened:
            for _ in range(64):  # meanwhile the proxy's loop does not run
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5 * SLOWNESS))
