"""Peers without the token, at a ToolServer in its own process: the executor API listens through the same gate."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
import pytest

from atropos.net.admission import MAX_UNAUTHENTICATED
from tests.e2e.servers import OWN, TOKEN, running


@pytest.mark.alone("compares times")
async def test_half_open_keeps_none_out():
    opened: list[asyncio.StreamWriter] = []

    async def flood(port: int) -> None:
        for number in range(1500):
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                opened.append(writer)
                writer.write(b"POST /execute HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"")

    async with running("tool-server", *OWN) as server:
        before = server.rss_mb()
        flooding = asyncio.create_task(flood(server.port))
        rounds, slowest = 0, 0.0
        while rounds < 20 or not flooding.done():
            began = time.monotonic()
            headers = {"Authorization": f"Bearer {TOKEN}", "Connection": "close"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(server.url + "/tools") as answer,
            ):
                assert answer.status == 200
            slowest = max(slowest, time.monotonic() - began)
            rounds += 1
        await asyncio.sleep(0.2)
        assert slowest < 3.0
        assert server.descriptors() < MAX_UNAUTHENTICATED + 100
        assert server.rss_mb() - before < 64
        began = time.monotonic()
    assert time.monotonic() - began < 6  # the end waits for none of them
    for writer in opened:
        writer.close()


async def test_a_shells_limit_bounds_no_connections():
    """The soft limit of descriptors is 1,024 in most shells; a server takes 2,000 connections of each key."""
    within = ("sh", "-c", 'ulimit -Sn 128 && exec "$@"', "sh")
    async with running("tool-server", *OWN, within=within) as server:
        opened: list[asyncio.StreamWriter] = []
        for _ in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            opened.append(writer)
            writer.write(f"GET /stats HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200 ")
        for writer in opened:
            writer.close()


async def test_liveness_needs_no_token():
    async with running("tool-server", *OWN) as server, aiohttp.ClientSession(server.url) as session:
        for path, status in {"/health": 200, "/docs": 401, "/openapi.json": 401, "/stats": 401}.items():
            async with session.get(path) as answer:
                assert answer.status == status
                assert (answer.headers.get("WWW-Authenticate") == "Bearer") == (status == 401)
