"""Many connections over one port forward: none holds up another, and none that is cut looks like one that is over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from atropos.errors import SandboxError
from atropos.slots import PortForward, Slot, SlotPool
from tests.backends import Engine
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICE = """
import os, socket, struct, threading
def serve(peer):
    asked = peer.recv(1)
    if asked == b"p":
        peer.sendall(b"pong")
    elif asked == b"s":  # never reads on
        threading.Event().wait()
    elif asked == b"d":
        peer.settimeout(1)
        try:
            while True: peer.sendall(bytes(65536))
        except TimeoutError:
            print("stuck", flush=True)
            peer.settimeout(None)
            peer.sendall(bytes(65536))
    elif asked == b"r":
        peer.sendall(b"some")
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif asked == b"c":
        print("taken", flush=True)
        try: print("end" if not peer.recv(1) else "data", flush=True)
        except ConnectionResetError: print("reset", flush=True)
    peer.close()
listener = socket.create_server(("127.0.0.1", 4712), backlog=200)
print("listens", flush=True)
while True: threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    async with SlotPool(Engine("local").config(slots_per_container=1)) as running:
        yield running


@asynccontextmanager
async def forwarded(pool: SlotPool) -> AsyncGenerator[tuple[Slot, PortForward, asyncio.Queue[str]]]:
    """A slot with the service, its forward, and what it prints."""
    says: asyncio.Queue[str] = asyncio.Queue()

    async def follow() -> None:
        with contextlib.suppress(SandboxError):  # the end of the lease
            async for piece in service.output():
                for word in piece.decode().split():
                    says.put_nowait(word)

    async with pool.lease("a") as slot:
        service = await slot.start(["python3", "-c", SERVICE])
        following = asyncio.create_task(follow())
        async with asyncio.timeout(120 * SLOWNESS):
            assert await says.get() == "listens"
            async with await PortForward.to_slot(slot, 4712) as forward:
                yield slot, forward, says
        following.cancel()


async def ask(forward: PortForward, what: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
    writer.write(what)
    return reader, writer


async def ping(forward: PortForward) -> None:
    reader, writer = await ask(forward, b"p")
    assert await reader.read() == b"pong"
    writer.close()


def carrying() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "port forward: connection" in task.get_name()]


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_unread_blocks_no_other(pool: SlotPool):
    async with forwarded(pool) as (_, forward, _):
        uploads = [(await ask(forward, b"s"))[1] for _ in range(12)]
        for upload in uploads:
            upload.write(bytes(8 << 20))
        left = None
        while left != (left := sum(upload.transport.get_write_buffer_size() for upload in uploads)):
            for _ in range(10):
                await ping(forward)
        assert left
        for upload in uploads:
            reset(upload)


async def test_slow_holds_up_no_other(pool: SlotPool):
    async with forwarded(pool) as (_, forward, says):
        _, download = await ask(forward, b"d")
        assert await says.get() == "stuck"
        await ping(forward)
        reset(download)


async def test_resets_pass_to_other_end(pool: SlotPool):
    async with forwarded(pool) as (_, forward, says):
        reader, writer = await ask(forward, b"r")
        assert await reader.readexactly(4) == b"some"
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        _, writer = await ask(forward, b"c")
        assert await says.get() == "taken"
        reset(writer)
        assert await says.get() == "reset"


@pytest.mark.parametrize("end", ["release", "aclose"])
async def test_a_cut_download_does_not_look_whole(pool: SlotPool, end: str):
    async with forwarded(pool) as (slot, forward, _):
        reader, _ = await ask(forward, b"d")
        await reader.readexactly(1 << 20)
        await (slot.release() if end == "release" else forward.aclose())
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_resets_leave_nothing(pool: SlotPool):
    async with forwarded(pool) as (_, forward, _):
        for _ in range(8):
            for what in (b"s", b"d"):
                _, writer = await ask(forward, what)
                await ping(forward)
                reset(writer)
        await until(lambda: not carrying(), "the end of every connection's tasks")
