"""The server's side of the process that slots are forked from."""

from __future__ import annotations

import errno
import marshal
import os
import socket
import subprocess
import sys

import pytest

from atropos.errors import SandboxError
from atropos.sandbox.contract import HostBroken
from atropos.sandbox.host.process.spawner_client import SpawnerClient
from atropos.sandbox.programs import spawner


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        yield process


async def test_start_without_room_fails(monkeypatch, process):
    """The kernel counts them per user: where the server shares its user with slots, one of them can hold all."""

    def full(*_):
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    client = SpawnerClient(process, ours)
    try:
        before, _ = await client.start({}, [])
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", full)
            with pytest.raises(SandboxError, match="in flight"):
                await client.start({}, [])
        after, _ = await client.start({}, [])
        for pid in (41, 42):
            number = marshal.loads(theirs.recv(1 << 16))["id"]
            theirs.send(marshal.dumps({"id": number, "pid": pid}))
        assert (await before, await after) == (41, 42)
    finally:
        await client.aclose()
        theirs.close()


async def test_gone_spawner_starts_none(process):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    client = SpawnerClient(process, ours)
    try:
        started, _ = await client.start({}, [])
        theirs.close()
        with pytest.raises(HostBroken, match="is gone"):
            await started
        with pytest.raises(HostBroken, match="is gone"):
            await client.start({}, [])
    finally:
        await client.aclose()


def test_orphan_ends_quietly():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        command = [sys.executable, "-I", "-S", spawner.__file__]
        ended = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
