"""Peers without the token: they cost a server no memory and no time, and its clients nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import resource
import time
from pathlib import Path

import aiohttp
import pytest

from atropos.net.admission import MAX_UNAUTHENTICATED
from tests.unit.server.fakes import serving
from tests.unit.server.test_http import ECHO, HEADERS, Curl
from tests.unit.server.test_tls import still_open
from tests.waiting import SLOWNESS, until


@functools.cache
def bomb() -> bytes:
    """64 MiB, more than the server may grow by, in 64 KiB."""
    return gzip.compress(bytes(64 << 20), 9)


PAGE = resource.getpagesize()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture
async def server():
    async with serving() as running:
        yield running


async def post(port: int, path: str, body: bytes, *headers: str) -> bytes:
    """The answer to one request without token, of which the body is sent as fast as it is taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(head).encode() + body)
        return await reader.read()
    finally:
        writer.close()


async def test_gzip_bombs_cost_nothing(server):
    port = server.server.port
    async with aiohttp.ClientSession() as session:
        curl = Curl(server, session)
        lease = await curl.lease()
        before, most, slowest = resident_bytes(), 0, 0.0
        path = f"/v1/leases/{lease.lease_id}/calls"
        bombs = [asyncio.create_task(post(port, path, bomb(), "Content-Encoding: gzip")) for _ in range(40)]
        while not all(bomb.done() for bomb in bombs):
            began = time.process_time()  # what else the machine does is no delay of the server's
            assert (await curl("POST", path, ECHO))[0] == 200
            slowest = max(slowest, time.process_time() - began)
            most = max(most, resident_bytes())
    assert all(b" 401 " in bomb.result().split(b"\r\n")[0] for bomb in bombs)
    assert most - before < 48 * 1024 * 1024
    assert slowest < 1.0


async def test_no_body_is_unpacked(server):
    async with aiohttp.ClientSession() as session:
        headers = {**HEADERS, "Content-Encoding": "gzip"}
        status, _ = await Curl(server, session)("POST", "/v1/leases", data=gzip.compress(b"{}"), headers=headers)
    assert status == 415


@pytest.mark.alone("compares times")
@pytest.mark.parametrize("sent", [b"", b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nX: "], ids=["nothing", "half a head"])
async def test_half_open_keeps_no_client_out(server, sent):
    port = server.server.port
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def flood() -> None:
        for _ in range(1500):
            with contextlib.suppress(ConnectionError):
                opened.append(await asyncio.open_connection("127.0.0.1", port))
                opened[-1][1].write(sent)

    flooding = [asyncio.create_task(flood()) for _ in range(2)]
    rounds, slowest = 0, 0.0
    try:
        while rounds < 20 or not all(each.done() for each in flooding):
            began = time.monotonic()
            connector = aiohttp.TCPConnector(force_close=True)  # each request has to be admitted anew
            async with aiohttp.ClientSession(connector=connector) as session:
                curl = Curl(server, session)
                lease = await curl.lease(f"lease-{rounds:04}")
                assert (await curl("POST", f"/v1/leases/{lease.lease_id}/calls", ECHO))[0] == 200
                assert (await curl("DELETE", f"/v1/leases/{lease.lease_id}"))[0] == 200
            slowest = max(slowest, time.monotonic() - began)
            rounds += 1
        assert slowest < 3.0
        await until(lambda: still_open(opened) <= MAX_UNAUTHENTICATED, "the end of those above the bound")
    finally:
        for _, writer in opened:
            writer.close()


async def test_liveness_keeps_none(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    try:
        writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nConnection: keep-alive\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20 * SLOWNESS)
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"ok"' in answer
