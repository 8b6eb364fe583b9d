"""The port relay by itself, and what a program of the slot can do by writing into its output, which it may: both run as
the
slot's root."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys

import pytest

from atropos.errors import ConfigError, SandboxError
from atropos.slots.slot.ports import PROGRAM, READ_BYTES, PortForward
from tests.waiting import SLOWNESS, until


class Relay:
    """A relay whose output a hostile program writes."""

    errors = None

    def __init__(self, *output: bytes) -> None:
        self.says: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.hears = b""
        self.killed = self.refuses = False
        for piece in output:
            self.says.put_nowait(piece)

    async def output(self):
        while (piece := await self.says.get()) is not None:
            yield piece

    async def write(self, data: bytes) -> None:
        if self.refuses:
            raise SandboxError("1024 calls wait in this lease already; it was not run")
        self.hears += data

    async def kill(self) -> None:
        self.killed = True


class OneRelay:
    """As much of a slot as a forward needs."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay

    async def start(self, *_: object, **__: object) -> Relay:
        return self.relay


def frame(kind: bytes, number: int, data: bytes = b"") -> bytes:
    return kind + number.to_bytes(4) + len(data).to_bytes(4) + data


LISTENS = frame(b"L", 0)


@contextlib.asynccontextmanager
async def service():
    """A service of this machine's loopback, and how many have connected to it."""
    visits: list[object] = []

    def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer)

    async with await asyncio.start_server(visited, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], visits
        for writer in visits:
            writer.close()


async def ended(forward: PortForward) -> None:
    async with asyncio.timeout(10 * SLOWNESS):
        with contextlib.suppress(OSError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", forward.port)
                writer.close()
                await asyncio.sleep(0.01)


async def test_invalid_port_is_refused():
    slot = OneRelay(Relay(LISTENS))
    for port, listen, says in ((70_000, 0, "port: 70000"), (0, 0, "port: 0"), (80, 70_000, "listen: 70000")):
        with pytest.raises(ConfigError, match=f"{says} is no TCP port"):
            await PortForward.to_slot(slot, port, listen=listen)
    with pytest.raises(ConfigError, match="target: 70000 is no TCP port"):
        await PortForward.from_slot(slot, 80, 70_000)


async def test_forward_in_leads_in_only():
    async with service() as (port, visits):
        relay = Relay(LISTENS)
        async with await PortForward.to_slot(OneRelay(relay), port) as forward:
            relay.says.put_nowait(frame(b"O", 1))
            await ended(forward)
            await asyncio.sleep(0.1)
        assert not visits


async def test_forward_out_one_target():
    async with service() as (port, visits):
        relay = Relay(LISTENS, frame(b"O", 1))
        async with await PortForward.from_slot(OneRelay(relay), 9, port):
            await until(lambda: visits)
            relay.says.put_nowait(frame(b"O", 1))
            relay.says.put_nowait(frame(b"O", 2))
            await asyncio.sleep(0.1)
        assert len(visits) == 1


async def test_long_frame_ends_forward():
    relay = Relay(LISTENS)
    async with await PortForward.to_slot(OneRelay(relay), 9) as forward:
        relay.says.put_nowait(b"D" + bytes(4) + (READ_BYTES + 1).to_bytes(4))
        await ended(forward)


async def test_full_holds_up_no_other():
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=1) as service, contextlib.ExitStack() as taken:
        service.setblocking(False)
        command = (sys.executable, "-c", PROGRAM, "connect", str(service.getsockname()[1]))
        relay = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
        said = set[bytes]()
        try:
            async with asyncio.timeout(20 * SLOWNESS):
                for kind in (b"O", b"D"):
                    relay.stdin.write(b"".join(frame(kind, n, b"%d" % n if kind == b"D" else b"") for n in range(8)))
                for _ in range(8):
                    peer = taken.enter_context((await loop.sock_accept(service))[0])
                    said.add(await loop.sock_recv(peer, 10))
        finally:
            relay.kill()
            await relay.communicate()
    assert said == {b"%d" % n for n in range(8)}


async def test_connections_are_bounded():
    loop = asyncio.get_running_loop()
    program = PROGRAM.replace("\nMAX_CONNECTIONS = 1024\n", "\nMAX_CONNECTIONS = 4\n")
    assert program != PROGRAM
    with socket.create_server(("127.0.0.1", 0)) as service, contextlib.ExitStack() as taken:
        service.setblocking(False)
        command = (sys.executable, "-c", program, "connect", str(service.getsockname()[1]))
        relay = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
        try:
            async with asyncio.timeout(20 * SLOWNESS):
                relay.stdin.write(b"".join(frame(b"O", number) for number in range(6)))
                said = await relay.stdout.readexactly(3 * len(LISTENS))
                assert said == LISTENS + frame(b"C", 4) + frame(b"C", 5)
                peers = [taken.enter_context((await loop.sock_accept(service))[0]) for _ in range(4)]
                for number, peer in enumerate(peers):
                    relay.stdin.write(frame(b"D", number, b"as before"))
                    assert await loop.sock_recv(peer, 10) == b"as before"
                relay.stdin.write(frame(b"C", 2) + frame(b"O", 6) + frame(b"D", 6, b"in its place"))
                later = taken.enter_context((await loop.sock_accept(service))[0])
                assert await loop.sock_recv(later, 20) == b"in its place"
        finally:
            relay.kill()
            await relay.communicate()


async def test_two_pieces_need_no_ack():
    """Which Linux delays by 40 ms: a client's head and body, sent apart, arrive as two frames."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.setblocking(False)
        command = (sys.executable, "-c", PROGRAM, "connect", str(service.getsockname()[1]))
        relay = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
        try:
            async with asyncio.timeout(20 * SLOWNESS):
                relay.stdin.write(frame(b"O", 1))
                (await loop.sock_accept(service))[0].close()
                (theirs,) = sockets_of(relay.pid)
                with theirs:
                    assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            relay.kill()
            await relay.communicate()


def sockets_of(pid: int) -> list[socket.socket]:
    """A process's TCP sockets, duplicated."""
    pidfd_getfd, found = 438, []
    process = os.pidfd_open(pid)
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:"):
                each = socket.socket(fileno=ctypes.CDLL(None).syscall(pidfd_getfd, process, int(fd), 0))
                found += [each] if each.family == socket.AF_INET else []
    os.close(process)
    return found


async def test_unsent_frame_ends_it():
    """Else it would be missing in the middle of what its connection carries."""
    relay = Relay(LISTENS)
    async with await PortForward.to_slot(OneRelay(relay), 9) as forward, asyncio.timeout(10 * SLOWNESS):
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
        await until(lambda: relay.hears)
        relay.refuses = True
        writer.write(b"lost")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await ended(forward)


async def test_connections_end_together():
    async with service() as (port, visits):
        relay = Relay(LISTENS)
        async with await PortForward.from_slot(OneRelay(relay), 9, port):
            relay.says.put_nowait(frame(b"O", 1))
            relay.says.put_nowait(None)
            await until(lambda: visits and visits[0].transport.is_closing())
