"""The only way out of a slot with a network: a filtering HTTP proxy, one listener a slot.

A slot has a loopback of its own and nothing else. PID 1 opens a listening socket there before any program runs and hands
it to the server, which answers on it: so no process inside takes part, and a name is resolved, judged and connected to
here, once, where a second DNS answer or a redirect can't change the judgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

PROXY_PORT = 3128
MAX_CONNECTIONS = 64
"""Connections one slot may have open at once."""
MAX_BYTES = 8 * 1024**3
"""Bytes one slot may send and receive in its life."""
CONNECT_DEADLINE_S = 15.0
IDLE_DEADLINE_S = 300.0
_MAX_HEAD = 32_768
_CHUNK = 65_536
_CONNECT = re.compile(rb"CONNECT ([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5}) HTTP/1\.[01]\r\n")
# IPv6 ranges in which an IPv4 address is wrapped: what it leads to can't be told from the address
_WRAPPING = tuple(
    ipaddress.ip_network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)
_HOP = frozenset(
    (
        "connection",
        "proxy-connection",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "proxy-authorization",
        "proxy-authenticate",
    )
)


class Refused(Exception):
    """The destination is not allowed; the message is for the program that asked."""


def environment() -> dict[str, str]:
    """What programs need to know to use the proxy."""
    url = f"http://127.0.0.1:{PROXY_PORT}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    local = "localhost,127.0.0.1,::1"
    return {**dict.fromkeys(names, url), "NO_PROXY": local, "no_proxy": local}


def public(text: str) -> bool:
    """Whether an address is one of the public Internet: not private, link-local, shared, this machine's, or wrapped."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif any(address in network for network in _WRAPPING):
            return False
    return address.is_global and not address.is_multicast and not _own(address)


def _own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is an address of this machine (then a socket can be bound to it): the server listens there."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


class Rules:
    """Which hosts may be reached."""

    def __init__(self, allow: Sequence[str]) -> None:
        self._all = "public" in allow
        self._names = frozenset(rule.lower().rstrip(".") for rule in allow if not rule.startswith("*."))
        self._suffixes = tuple(rule[1:].lower().rstrip(".") for rule in allow if rule.startswith("*."))

    async def addresses(self, host: str, port: int) -> list[tuple[int, str]]:
        """(family, address) to connect to.

        Raises:
            Refused: by name or by address, with the reason.
        """
        name = host.lower().strip("[]").rstrip(".")
        if not (self._all or name in self._names or name.endswith(self._suffixes)):
            raise Refused(f"{name} is not on this sandbox's list of allowed hosts")
        if not 0 < port < 65_536:
            raise Refused(f"{port} is not a port")
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError):
            raise Refused(f"{name} can't be resolved") from None
        allowed = [
            (int(family), str(where[0])) for family, _, _, _, where in found if public(str(where[0]).split("%")[0])
        ]
        if not allowed:
            raise Refused(f"{name} leads to a private or local address")
        return allowed


class _Resolver(AbstractResolver):
    """Gives aiohttp's client the judged addresses and no others: what is judged is what is connected to."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._rules.addresses(host, port or 80)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in found
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Nothing is held."""


class Egress:
    """The proxy of one slot, on the listening socket that its PID 1 opened."""

    def __init__(self, listener: socket.socket, allow: Sequence[str]) -> None:
        self._rules = Rules(allow)
        self._listener = listener
        self._left = MAX_BYTES
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._http = web.Server(self._forward, access_log=None)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Answer from now on."""
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self._rules), use_dns_cache=False, limit=MAX_CONNECTIONS, force_close=True
        )
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_DEADLINE_S, sock_read=IDLE_DEADLINE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._listener.setblocking(False)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Front(self), sock=self._listener, backlog=64
        )

    async def aclose(self) -> None:
        """End every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.shutdown(1)
        if self._session is not None:
            await self._session.close()
        self._listener.close()

    @property
    def full(self) -> bool:
        """Whether one more connection is too many."""
        return len(self._tasks) + len(self._http.connections) >= MAX_CONNECTIONS

    def http(self) -> asyncio.Protocol:
        """A protocol for one connection with plain requests on it."""
        return self._http()

    def spend(self, count: int) -> None:
        """Count bytes.

        Raises:
            Refused: the slot has had its share.
        """
        self._left -= count
        if self._left < 0:
            raise Refused(f"this sandbox has used up its {MAX_BYTES} bytes of network traffic")

    # ------------------------------------------------------------------------------------------------- plain requests

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        url = request.raw_path if hasattr(request, "raw_path") else str(request.url)
        if not url.lower().startswith("http://"):
            return _refusal(400, "this is a proxy: ask for http://HOST/PATH, or CONNECT")
        assert self._session is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
        try:
            host, port = request.url.host or "", request.url.port or 80
            if _literal(host):  # an address needs no resolver, so nobody else would judge it
                await self._rules.addresses(host, port)
            data = self._counted(request.content) if request.body_exists else None
            async with self._session.request(
                request.method, request.url, headers=headers, data=data, allow_redirects=False
            ) as answer:
                return await self._return(request, answer)
        except Refused as error:
            return _refusal(403, str(error))
        except aiohttp.ClientError as error:
            cause = error.__cause__ or error.__context__
            if isinstance(cause, Refused):
                return _refusal(403, str(cause))
            return _refusal(502, f"the host did not answer: {type(error).__name__}")
        except TimeoutError:
            return _refusal(504, "the host did not answer in time")

    async def _counted(self, body: aiohttp.StreamReader) -> Any:
        async for piece in body.iter_chunked(_CHUNK):
            self.spend(len(piece))
            yield piece

    async def _return(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP:
                response.headers.add(name, value)
        await response.prepare(request)
        async for piece in answer.content.iter_chunked(_CHUNK):
            self.spend(len(piece))
            await response.write(piece)
        await response.write_eof()
        return response

    # -------------------------------------------------------------------------------------------------------- tunnels

    def tunnel(self, transport: asyncio.Transport, protocol: _Front, host: str, port: int, first: bytes) -> None:
        """Connect and pass bytes both ways, in a task of its own."""
        task = asyncio.get_running_loop().create_task(
            self._tunnel(transport, protocol, host, port, first), name="egress"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tunnel(self, transport: asyncio.Transport, protocol: _Front, host: str, port: int, first: bytes) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._connect(host, port)
            transport.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            outward = asyncio.ensure_future(self._outward(protocol, writer, first))
            try:
                await self._inward(reader, transport, protocol)
            finally:
                outward.cancel()
                await asyncio.gather(outward, return_exceptions=True)
        except Refused as error:
            transport.write(_raw_refusal(403, str(error)))
        except (OSError, TimeoutError):
            transport.write(_raw_refusal(502, f"{host}:{port} did not answer"))
        finally:
            transport.close()
            if writer is not None:
                writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        failure: Exception = Refused(f"{host} has no address")
        for family, address in (await self._rules.addresses(host, port))[:4]:
            try:
                async with asyncio.timeout(CONNECT_DEADLINE_S):
                    return await asyncio.open_connection(address, port, family=family)
            except (OSError, TimeoutError) as error:
                failure = error
        raise failure

    async def _outward(self, protocol: _Front, writer: asyncio.StreamWriter, first: bytes) -> None:
        data = first or await protocol.next()
        while data:
            self.spend(len(data))
            writer.write(data)
            await writer.drain()
            data = await protocol.next()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _inward(self, reader: asyncio.StreamReader, transport: asyncio.Transport, protocol: _Front) -> None:
        while True:
            async with asyncio.timeout(IDLE_DEADLINE_S):
                data = await reader.read(_CHUNK)
            if not data or transport.is_closing():
                return
            self.spend(len(data))
            transport.write(data)
            await protocol.writable.wait()


class _Front(asyncio.Protocol):
    """One connection from inside: reads the first head, then is a tunnel or hands over to the HTTP server."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._tunnelled = False
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._egress.full:
            transport.write(_raw_refusal(429, f"more than {MAX_CONNECTIONS} connections at once"))
            transport.close()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        if self._tunnelled:
            self._pieces.put_nowait(data)
            transport.pause_reading()
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _MAX_HEAD:
                transport.write(_raw_refusal(431, "the request's head is too long"))
                transport.close()
            return
        if not self._head.startswith(b"CONNECT"):
            protocol = self._egress.http()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            protocol.data_received(bytes(self._head))
            return
        match = _CONNECT.match(self._head)
        if match is None:
            transport.write(_raw_refusal(400, "CONNECT takes HOST:PORT"))
            transport.close()
            return
        self._tunnelled = True
        first = bytes(self._head[end + 4 :])
        self._egress.tunnel(transport, self, match[1].decode("ascii"), int(match[2]), first)

    async def next(self) -> bytes:
        """The next piece from inside; empty at its end."""
        data = await self._pieces.get()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return data

    def eof_received(self) -> bool:
        self._pieces.put_nowait(b"")
        return self._tunnelled  # the answer may still come

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._pieces.put_nowait(b"")
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()


def _literal(host: str) -> bool:
    """Whether the client takes it for an address and asks no resolver: such as 127.1 or 2130706433 too."""
    return ":" in host or not any(letter.isalpha() for letter in host)


def _refusal(status: int, why: str) -> web.Response:
    text = f"atropos: network access refused: {why}\n" if status == 403 else f"atropos: {why}\n"
    response = web.Response(status=status, text=text)
    response.force_close()
    return response


def _raw_refusal(status: int, why: str) -> bytes:
    body = f"atropos: network access refused: {why}\n".encode()
    reason = "".join(ch for ch in why if ch.isprintable() and ch.isascii())[:150]
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
