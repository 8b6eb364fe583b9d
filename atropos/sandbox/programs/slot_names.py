"""Names in one slot: each that its programs look up gets an address of its own, which stands for it in connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import zlib
from collections.abc import Callable, Coroutine

from atropos.aio import Tasks
from atropos.net import dns
from atropos.net.egress_policy import Address, EgressRefused
from atropos.sandbox.programs import gateway

TTL_S = 30
"""How long programs, and the resolver itself, rely on an answer, in seconds."""
MOST_NAMES = 4096
"""Names that have an address; a new one takes that of the name which was used least recently."""
_MOST_WAITING = 512
"""Questions that wait for their answer; further ones are dropped, as by a busy name server."""
_IDLE_S = 10.0
_IP_PKTINFO, _IPV6_FREEBIND = 8, 78  # <linux/in.h>, <linux/in6.h>
_FIRST = int(ipaddress.IPv4Address(gateway.ADDRESS)) + 3
_COUNT = (1 << 17) - 8
"""Addresses of 198.18.0.0/15 but those of the gateway's own network."""
_PREFIX6 = int(ipaddress.IPv6Address(gateway.PREFIX6))


class FakeAddresses:
    """Which address stands for which name. A name has the same one in most slots: files of a snapshot may hold it."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._places: dict[str, int] = {}
        """The least recently used first."""

    def address_of(self, name: str) -> ipaddress.IPv4Address:
        """The address of a name, from now on."""
        # Taken out and put in again: a dict keeps the order of insertion, which is that of use here.
        place = self._places.pop(name, None)
        if place is None:
            if len(self._places) >= MOST_NAMES:
                del self._names[self._places.pop(next(iter(self._places)))]
            # By the name alone, so that it is the same in most slots, and after a restart of the proxy.
            place = zlib.crc32(name.encode()) % _COUNT
            while place in self._names:
                place = (place + 1) % _COUNT
            self._names[place] = name
        self._places[name] = place
        return ipaddress.IPv4Address(_FIRST + place)

    def name_of(self, address: Address) -> str | None:
        """The name that an address stands for; None: it is only itself."""
        number = int(address)
        if isinstance(address, ipaddress.IPv6Address):
            number -= _PREFIX6
        name = self._names.get(number - _FIRST)
        if name is not None:
            self._places[name] = self._places.pop(name)
        return name


class Resolver:
    """Answers the names that one slot's programs ask for.

    Args:
        sock: where they ask by UDP.
        find: the canonical form of a name that the slot may reach; raises EgressRefused or OSError.
    """

    def __init__(self, sock: socket.socket, find: Callable[[str], Coroutine[object, object, str]]) -> None:
        self._sock = sock
        self._find = find
        self.addresses = FakeAddresses()
        self._canonical: dict[str, asyncio.Future[str]] = {}
        """By the requested name: its canonical form, or the look-up of it, for `TTL_S`."""
        self._answers = Tasks("names of a slot")
        self._lookups = Tasks("names of a slot")
        self._ipv6 = sock.family == socket.AF_INET6
        # an answer leaves from the address that was asked
        if self._ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock, self._readable)

    def close(self) -> None:
        """Answer nothing more."""
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self.forget()

    def forget(self) -> None:
        """Ask anew for each name: what the slot may reach has changed."""
        # Answers that were judged by the old rules must not leave any more.
        self._answers.stop()
        self._lookups.stop()
        self._canonical.clear()

    def _readable(self) -> None:
        try:
            # The control message has the address that was asked; sent back with the answer, it becomes its source.
            data, control, _, client = self._sock.recvmsg(dns.MESSAGE_BYTES, socket.CMSG_SPACE(32))
        except OSError:  # no datagram, or the kernel's report that a client is gone
            return
        # Else dropped: a client asks again (RFC 1035, 4.2.1), and a flood takes no memory.
        if len(self._answers) < _MOST_WAITING:
            self._answers.spawn(self._answer_datagram(data, control, client), "answer")

    async def _answer_datagram(
        self, data: bytes, control: list[tuple[int, int, bytes]], client: tuple[object, ...]
    ) -> None:
        with contextlib.suppress(ValueError, OSError):
            self._sock.sendmsg([await self._answered(data)], control, 0, client)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what is asked on one TCP connection."""
        with contextlib.suppress(ValueError, OSError, EOFError):
            while True:
                async with asyncio.timeout(_IDLE_S):
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    answer = await self._answered(await reader.readexactly(size))
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()

    async def _answered(self, message: bytes) -> bytes:
        question = dns.Question.parse(message)
        if not question.kind:
            return question.answer(dns.NOT_IMPLEMENTED)
        try:
            name = await self._known(question.name.lower())
        except EgressRefused:
            # A refused name doesn't exist here: programs fail at once, instead of waiting for a connection.
            return question.answer(dns.NO_SUCH_NAME)
        except OSError as error:
            codes = {socket.EAI_NONAME: dns.NO_SUCH_NAME, socket.EAI_NODATA: dns.NO_ERROR}
            return question.answer(codes.get(error.errno or 0, dns.FAILED))
        # The name exists, but has no record of that kind (RFC 2308, "NODATA").
        if question.kind not in (dns.A, dns.AAAA):
            return question.answer(dns.NO_ERROR)
        address = self.addresses.address_of(name)
        if question.kind == dns.A:
            return question.answer(dns.NO_ERROR, address.packed, TTL_S)
        six = (_PREFIX6 + int(address)).to_bytes(16, "big") if self._ipv6 else b""
        return question.answer(dns.NO_ERROR, six, TTL_S)

    async def _known(self, asked: str) -> str:
        """As `find`, once for all that ask within `TTL_S`; what failed is tried again."""
        lookup = self._canonical.get(asked)
        if lookup is None:
            # Names that are looked up right now count as well, or a flood of new ones would have no bound.
            if len(self._canonical) >= MOST_NAMES:
                raise OSError("this slot asks for too many names")
            lookup = self._canonical[asked] = self._lookups.spawn(self._find(asked), "look-up", awaited=True)
            lookup.add_done_callback(lambda done: self._keep(asked, done))
        # Others ask for the same name; one that gives up ends only its own wait.
        return await asyncio.shield(lookup)

    def _keep(self, asked: str, lookup: asyncio.Future[str]) -> None:
        def drop() -> None:
            # `forget` may have been called since, and the name be asked for anew.
            if self._canonical.get(asked) is lookup:
                del self._canonical[asked]

        if lookup.cancelled() or lookup.exception() is not None:
            drop()
        else:
            asyncio.get_running_loop().call_later(TTL_S, drop)
