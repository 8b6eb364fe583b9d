"""The proxy's supervisor: every slot is served again after a restart, and none that has ended."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
from collections import Counter

import pytest

from atropos.config import ServerConfig
from atropos.sandbox.host.egress_supervisor import EgressSupervisor
from tests.processes import descendants
from tests.waiting import until

SLOTS = 400
"""More orders than the socket to the proxy takes at once."""


@pytest.fixture
def _many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def proxy() -> int | None:
    """The process of the proxy that this one has started."""
    return next((pid for pid, line in descendants().items() if "atropos.sandbox.programs.egress_proxy" in line), None)


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    return listener


async def status(port: int) -> bytes:
    """The proxy's answer to a request for a private address."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET http://10.0.0.1/ HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line.split()[1]


async def statuses(ports: list[int]) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for first in range(0, len(ports), 50):
        found.update(await asyncio.gather(*map(status, ports[first : first + 50])))
    return found


@pytest.mark.usefixtures("_many_files")
async def test_restart_serves_every_slot():
    supervisor = EgressSupervisor(ServerConfig(token="-", slots=SLOTS, allow_network=True), None)
    supervisor.start()
    try:
        listeners = [listening() for _ in range(SLOTS)]
        ports = [each.getsockname()[1] for each in listeners]
        for each in listeners:
            supervisor.add([each])
        assert await statuses(ports) == {b"403": SLOTS}
        first = proxy()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: proxy() not in (first, None))
        assert await statuses(ports) == {b"403": SLOTS}
    finally:
        await supervisor.aclose()


async def test_failed_restart_is_retried(monkeypatch):
    started, fails = subprocess.Popen, iter([True])

    def starts(*arguments, **options):
        if next(fails, False):
            raise BlockingIOError("out of processes")
        return started(*arguments, **options)

    supervisor = EgressSupervisor(ServerConfig(token="-", slots=4, allow_network=True), None)
    supervisor.start()
    try:
        listener = listening()
        port = listener.getsockname()[1]
        supervisor.add([listener])
        assert await status(port) == b"403"
        first = proxy()
        assert first is not None
        monkeypatch.setattr("atropos.sandbox.host.egress_supervisor.subprocess.Popen", starts)
        os.kill(first, signal.SIGKILL)
        await until(lambda: proxy() not in (first, None))
        assert next(fails, None) is None
        assert await status(port) == b"403"
    finally:
        await supervisor.aclose()


async def test_ended_leave_no_socket():
    supervisor = EgressSupervisor(ServerConfig(token="-", slots=4, allow_network=True), None)
    supervisor.start()
    try:
        ports = []
        for _ in range(4):
            listener = listening()
            ports.append(listener.getsockname()[1])
            supervisor.drop(supervisor.add([listener]))
        kept = listening()
        supervisor.add([kept])
        assert await status(kept.getsockname()[1]) == b"403"
        await until(lambda: all(map(refuses, ports)))
    finally:
        await supervisor.aclose()


async def test_repeated_change_confirmed():
    supervisor = EgressSupervisor(ServerConfig(token="-", slots=4, allow_network=True), None)
    supervisor.start()
    try:
        listener = listening()
        number = supervisor.add([listener])
        assert await status(listener.getsockname()[1]) == b"403"
        frozen = proxy()
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        first, again = (asyncio.create_task(supervisor.narrow(number, ())) for _ in range(2))
        await asyncio.sleep(0)  # both have begun
        assert (first.done(), again.done()) == (False, False)
        os.kill(frozen, signal.SIGCONT)
        await asyncio.gather(first, again)
        await supervisor.narrow(number, ())
    finally:
        await supervisor.aclose()


def refuses(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
