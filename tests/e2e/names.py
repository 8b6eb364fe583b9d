"""A name server that says what a test wants, and the resolver settings of a process that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import struct
import subprocess
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import cast

ADDRESS = "127.53.0.1"
A, AAAA = 1, 28


class Names(asyncio.DatagramProtocol):
    """Answers every question by what `answers(name, kind)` gives: addresses, none of them remembered by anybody."""

    def __init__(self, answers: Callable[[str, int], list[str]]) -> None:
        self.asked: list[str] = []
        self._answers = answers
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        labels: list[str] = []
        at = 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        kind = struct.unpack_from(">H", data, at + 1)[0]
        name = ".".join(labels)
        self.asked.append(name)
        found = [ipaddress.ip_address(one).packed for one in self._answers(name, kind)] if kind in {A, AAAA} else []
        head = data[:2] + struct.pack(">HHHHH", 0x8180, 1, len(found), 0, 0)
        rows = b"".join(struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(one)) + one for one in found)
        assert self._transport is not None
        self._transport.sendto(head + data[12 : at + 5] + rows, addr)


@contextlib.asynccontextmanager
async def serving(answers: Callable[[str, int], list[str]]) -> AsyncGenerator[Names, None]:
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Names(answers), local_addr=(ADDRESS, 53)
    )
    try:
        yield names
    finally:
        transport.close()


def asking_us(folder: Path) -> tuple[str, ...]:
    """The start of a command line: what follows it asks our name server, and nobody else notices."""
    settings = folder / "resolv.conf"
    settings.write_text(f"nameserver {ADDRESS}\noptions timeout:10 attempts:3\n")
    script = f'mount --bind {settings} /etc/resolv.conf && exec "$@"'
    return ("unshare", "-m", "--propagation", "private", "bash", "-c", script, "bash")


def missing() -> str:
    """Why a name server and a resolver of one's own can't be had here; empty when they can."""
    if os.getuid() != 0:
        return "a resolver of one's own (a mount namespace) and port 53 need root"
    done = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True, text=True)
    return done.stderr.strip()
