"""Names of a slot: which address stands for which, how often a name is looked up, and what is forgotten when."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator

from atropos.net import dns
from atropos.net.egress_policy import EgressRefused
from atropos.sandbox.programs import slot_names
from atropos.sandbox.programs.slot_names import MOST_NAMES, FakeAddresses, Resolver
from tests.unit.net.test_dns import message
from tests.waiting import until

MX = 15


def test_names_keep_their_address():
    one, other = FakeAddresses(), FakeAddresses()
    address = one.address_of("files.example.org")
    assert one.name_of(address) == "files.example.org"
    assert one.address_of("files.example.org") == address == other.address_of("files.example.org")
    six = ipaddress.IPv6Address(int(ipaddress.IPv6Address("fd61:7472:6f70:6f73::")) + int(address))
    assert one.name_of(six) == "files.example.org"


def test_others_are_themselves():
    found = FakeAddresses()
    found.address_of("files.example.org")
    for text in ("198.18.0.1", "198.18.0.2", "198.19.255.255", "8.8.8.8", "0.0.0.0", "fd61:7472:6f70:6f73::1", "::1"):
        assert found.name_of(ipaddress.ip_address(text)) is None


def test_least_used_goes_first():
    found = FakeAddresses()
    addresses = {name: found.address_of(name) for name in (f"{number}.example.org" for number in range(MOST_NAMES))}
    assert len(set(addresses.values())) == MOST_NAMES
    assert all(address in ipaddress.ip_network("198.18.0.0/15") for address in addresses.values())
    assert found.name_of(addresses["0.example.org"]) == "0.example.org", "used, so that the next one is the oldest"
    found.address_of("one.more")
    assert found.name_of(addresses["1.example.org"]) in (None, "one.more")
    assert found.name_of(addresses["0.example.org"]) == "0.example.org"


class Finder:
    """Finds every name but those that begin with `no`, and those that begin with `late` once it may."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()

    async def __call__(self, name: str) -> str:
        self.asked.append(name)
        if name.startswith("late"):
            await self.go.wait()
        if name.startswith("no"):
            raise EgressRefused(name)
        if name.startswith("missing"):
            raise OSError(socket.EAI_NONAME, "unknown")
        if name.startswith("failing"):
            raise TimeoutError
        return name.lower()


@contextlib.asynccontextmanager
async def resolver() -> AsyncIterator[tuple[Finder, Resolver, socket.socket]]:
    """What finds names, the resolver, and a client's socket."""
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.bind(("::1", 0))
    client = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    client.connect(sock.getsockname()[:2])
    client.setblocking(False)
    finder = Finder()
    made = Resolver(sock, finder)
    try:
        yield finder, made, client
    finally:
        made.close()
        client.close()


async def ask(client: socket.socket, name: str, kind: int = dns.A) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, message(name.split("."), kind))
    return await loop.sock_recv(client, 512)


async def test_answers_tell_of_the_name():
    async with resolver() as (_, _, client), asyncio.timeout(20):
        assert [(await ask(client, name))[3] & 15 for name in ("yes", "no", "missing", "failing")] == [0, 3, 3, 2]
        for name, code in {"yes": dns.NO_ERROR, "no": dns.NO_SUCH_NAME, "missing": dns.NO_SUCH_NAME}.items():
            mail = await ask(client, name, MX)
            assert (mail[3] & 15, mail[6:8]) == (code, b"\0\0"), "it exists, or not, and has no such record"
        four, six = await ask(client, "yes"), await ask(client, "YES", dns.AAAA)
        assert six.endswith(four[-4:])
        assert len(six) == len(four) + 12


async def test_look_ups_are_shared():
    async with resolver() as (finder, made, client), asyncio.timeout(20):
        waiting = asyncio.create_task(ask(client, "late"))
        for kind in (dns.A, dns.AAAA, dns.A):
            client.send(message(["late"], kind))
        await until(lambda: finder.asked)
        finder.go.set()
        await waiting
        for _ in range(3):
            await asyncio.get_running_loop().sock_recv(client, 512)
        for name in ("yes", "yes", "failing", "failing"):
            await ask(client, name)
        assert finder.asked == ["late", "yes", "failing", "failing"]
        made.forget()
        await ask(client, "yes")
        assert finder.asked[-1] == "yes"


async def test_waiting_is_bounded(monkeypatch):
    monkeypatch.setattr(slot_names, "_MOST_WAITING", 3)
    async with resolver() as (finder, _, client), asyncio.timeout(20):
        for number in range(3):
            client.send(message([f"late{number}"]))
        await until(lambda: len(finder.asked) == 3)
        client.send(message(["dropped"]))
        await asyncio.sleep(0.05)  # in which nothing happens
        finder.go.set()
        answers = [await asyncio.get_running_loop().sock_recv(client, 512) for _ in range(3)]
        assert len(answers) == 3
        assert finder.asked == ["late0", "late1", "late2"]
