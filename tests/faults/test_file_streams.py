"""Files as streams, over connections that break: what arrives is what was sent, or the old file stays."""

# ruff: noqa: SIM117 (the client in the proxy)
from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator

import pytest

from atropos.errors import SandboxError
from atropos.sandbox.server.calls import file_streams as server_streams
from atropos.slots.client import SandboxClient, file_streams
from atropos.wire import Done, Exec, LeaseRequest, OpError, ReadStream, WriteStream
from tests.unit.server.fakes import TOKEN, FakeHost, serving
from tests.waiting import until

ids = itertools.count()


@contextlib.asynccontextmanager
async def brittle(port: int, lasts: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A proxy whose connections break after so many bytes in either direction; its URL and what each let through."""
    passed: list[int] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(passed)
        passed.append(0)
        with contextlib.suppress(OSError):
            while (data := await reader.read(65_536)) and passed[number] + len(data) <= lasts:
                passed[number] += len(data)
                writer.write(data)
                await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        tasks = [asyncio.create_task(copy(reader, far_writer)), asyncio.create_task(copy(far_reader, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, far_writer):
            each.transport.abort()
        await asyncio.wait(tasks)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", passed


def request() -> LeaseRequest:
    return LeaseRequest(lease_id=f"streams-{next(ids)}", client_id="tester")


def writing(path: str) -> WriteStream:
    return WriteStream(path=path, stream=f"stream-{next(ids):04}")


def pieces(data: bytes, size: int = 1 << 20) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


async def test_write_outlasts_breaks():
    data = os.urandom(12 << 20)
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running, brittle(running.server.port, 2_500_000) as (url, passed):
        async with SandboxClient(url, TOKEN, client_id="tester", reconnect_s=20) as client:
            lease = await client.acquire(request())
            result = await file_streams.send(client, lease, writing("f"), iter(pieces(data)))
            assert result == Done(count=len(data))
            assert sum(1 for each in passed if each > 1 << 20) > 3, "no connection broke"
            assert sum(passed) < 2 * len(data), "it began again"
            assert [s.files["f"] == data for s in host.started if "f" in s.files] == [True]


async def test_broken_read_says_how_far():
    data = os.urandom(4 << 20)
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running, brittle(running.server.port, 1_500_000) as (url, _):
        async with SandboxClient(url, TOKEN, client_id="tester", reconnect_s=20) as client:
            lease = await client.acquire(request())
            for sandbox in host.started:
                sandbox.files["f"] = data
            got = bytearray()
            result = None
            for _ in range(10):
                wanted = ReadStream(path="f", stream=f"read-{next(ids):05}", offset=len(got), max_bytes=1 << 30)
                result = await file_streams.receive(client, lease, wanted, got.extend)
                if result is not None:
                    break
            assert isinstance(result, Done)
            assert bytes(got) == data


def broken_source():
    yield bytes(1 << 20)
    yield bytes(1 << 20)
    raise OSError("the disk is gone")


async def test_failed_source_keeps_file():
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            with pytest.raises(OSError, match="the disk is gone"):
                await file_streams.send(client, lease, writing("f"), broken_source())
            assert not any("f" in sandbox.files for sandbox in host.started)
            assert (await asyncio.wait_for(client.call(lease, Exec(command="echo on")), 20)).output == b"on"


async def test_failed_source_ends_it():
    async with serving(FakeHost(), heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            with pytest.raises(OSError, match="the disk is gone"):
                await file_streams.send(client, lease, writing("f"), broken_source())
            ours = (file_streams.__file__, "coro=<SandboxClient.call()")
            assert not [task for task in asyncio.all_tasks() if any(part in repr(task) for part in ours)]


async def test_unsent_stream_is_fault(monkeypatch):
    monkeypatch.setattr(server_streams, "IDLE_S", 0.2)
    async with serving(FakeHost(), heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            with pytest.raises(SandboxError, match="broke off"):
                await asyncio.wait_for(client.call(lease, writing("f")), 20)


@pytest.mark.parametrize("size", [1000, 4 << 20])
async def test_stopped_reader_is_result(monkeypatch, size):
    """A program of the slot can do that: it may not turn what is asked of its slot into a fault of the infrastructure."""
    monkeypatch.setattr(server_streams, "IDLE_S", 1.0)  # in less, this process might not send its first byte
    async with serving(FakeHost(), heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            result = await asyncio.wait_for(
                file_streams.send(client, lease, writing("stopped"), iter(pieces(bytes(size)))), 20
            )
            assert isinstance(result, OpError) and result.error == "timeout", result
            wanted = ReadStream(path="stopped", stream=f"read-{next(ids):05}", max_bytes=1 << 30)
            result = await asyncio.wait_for(file_streams.receive(client, lease, wanted, bytearray().extend), 20)
            assert isinstance(result, OpError) and result.error == "timeout", result


async def test_abandoned_reads_close_their_stream():
    async with serving(FakeHost(), heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            lanes = running.core.state.runs[lease.lease_id].lanes
            for _ in range(server_streams.MAX_OPEN + 1):
                wanted = ReadStream(path="stopped", stream=f"read-{next(ids):05}", max_bytes=1 << 30)
                call = asyncio.create_task(client.call(lease, wanted))
                await until(lambda: lanes.queued)
                call.cancel()
                await asyncio.wait([call])
                assert call.cancelled(), call.exception()
                await until(lambda: not lanes.queued)


async def test_server_stop_is_not_idle(monkeypatch):
    monkeypatch.setattr(server_streams, "IDLE_S", 1.0)
    async with serving(FakeHost(), heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            operation = writing("f")
            call = asyncio.create_task(client.call(lease, operation))
            await client.put_piece(lease, operation.stream, 0, b"begun", last=False)
            asyncio.get_running_loop().call_soon(time.sleep, 2)
            await asyncio.sleep(0.1)
            assert not call.done()
            await client.put_piece(lease, operation.stream, 5, b" and ended", last=True)
            assert await asyncio.wait_for(call, 20) == Done(count=15)


async def test_small_files_arrive():
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running:
        async with SandboxClient(f"http://127.0.0.1:{running.server.port}", TOKEN, client_id="tester") as client:
            lease = await client.acquire(request())
            for data in (b"", b"x"):
                result = await file_streams.send(client, lease, writing("f"), iter(pieces(data)))
                assert result == Done(count=len(data))
                assert not isinstance(result, OpError)
