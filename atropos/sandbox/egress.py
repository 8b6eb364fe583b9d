<<<<<<< HEAD
"""The only way out of a slot with a network: a filtering HTTP proxy, one listener a slot.

A slot has a loopback of its own and nothing else. PID 1 opens a listening socket there before any program runs and hands
it to the server, which answers on it: so no process inside takes part, and a name is resolved, judged and connected to
here, once, where a second DNS answer or a redirect can't change the judgement.
=======
"""The filtering proxy of a container: a process of its own, with a user of its own, that slots reach by their loopback.

The server hands it one listening socket a slot, made inside that slot's network namespace; so it knows which slot asks
by the socket alone, and no program in a slot can reach another's. HTTP requests and CONNECT are judged by
`egress_rules`; bytes and connections are bounded per slot. Every refusal is a readable HTTP answer.
>>>>>>> eddac40 (feat(sandbox): filtered egress through a proxy that listens inside each slot's own network)
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
<<<<<<< HEAD
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
=======
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from atropos.sandbox import syscalls
from atropos.sandbox.egress_rules import Address, Policy, Refused, literal

HEAD_S, CONNECT_S, IDLE_S = 20.0, 10.0, 300.0
_CHUNK = 1 << 16
_MAX_HEAD = 32_768
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
               b"trailer", b"upgrade"}  # fmt: skip
"""Headers that concern one connection alone (RFC 9110, 7.6.1)."""


class Spent(Exception):
    """The slot's byte budget is used up."""


@dataclass
class Account:
    """One slot's use of the network. `left`: bytes it may still move, both ways together."""

    server: asyncio.Server
    left: int
    connections: int
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
>>>>>>> eddac40 (feat(sandbox): filtered egress through a proxy that listens inside each slot's own network)

    def spend(self, count: int) -> None:
        """Count bytes.

        Raises:
<<<<<<< HEAD
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
=======
            Spent: there are none left.
        """
        self.left -= count
        if self.left < 0:
            raise Spent


class Proxy:
    """Serves the slots' listening sockets."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._accounts: dict[int, Account] = {}

    async def add(self, number: int, listener: socket.socket, budget: int, connections: int) -> None:
        """Serve a slot from now on."""
        listener.setblocking(False)

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(number, reader, writer))
            account = self._accounts.get(number)
            if account is not None:
                account.tasks.add(task)
                task.add_done_callback(account.tasks.discard)

        server = await asyncio.start_server(accepted, sock=listener, limit=_CHUNK, backlog=16)
        self._accounts[number] = Account(server, budget, connections)

    def drop(self, number: int) -> None:
        """A slot has ended."""
        account = self._accounts.pop(number, None)
        if account is not None:
            account.server.close()
            for task in list(account.tasks):
                task.cancel()

    # ------------------------------------------------------------------------------------------------------ one client

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        account = self._accounts.get(number)
        upstream: asyncio.StreamWriter | None = None
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        try:
            if account is None:
                return
            if len(account.tasks) > account.connections:
                raise Refused(f"this slot has {account.connections} connections open already; close some first")
            if account.left <= 0:
                raise Spent
            request = await _head(connection, reader)
            host, port, target = _wanted(request)
            name = self.policy.judge_name(host, port)
            addresses = self.policy.judge_addresses(name, await _resolve(name, port), own_addresses())
            remote, upstream = await _connect(name, addresses, port)
            if request.method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                rest, _ = connection.trailing_data
                await _splice(account, reader, writer, remote, upstream, rest)
            else:
                await _forward(account, connection, request, target, (reader, writer), (remote, upstream))
        except Refused as error:
            await _answer(connection, writer, 403, f"egress refused: {error}\n")
        except Spent:
            await _answer(connection, writer, 403, "egress refused: this slot has used up its bytes (egress_mib)\n")
        except (h11.RemoteProtocolError, ValueError) as error:
            await _answer(connection, writer, 400, f"egress: not a proxy request: {error}\n")
        except TimeoutError:
            await _answer(connection, writer, 504, "egress: timed out\n")
        except OSError as error:
            await _answer(connection, writer, 502, f"egress: {error.strerror or error}\n")
        finally:
            for stream in (writer, upstream):
                if stream is not None:
                    stream.close()


async def _head(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    async with asyncio.timeout(HEAD_S):
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("the client went away")
            data = await reader.read(_CHUNK)
            if not data:
                raise ConnectionResetError("the client went away")
            connection.receive_data(data)


def _wanted(request: h11.Request) -> tuple[str, int, bytes]:
    """Host, port and the target to ask the origin for."""
    text = request.target.decode("ascii", "strict")
    if request.method == b"CONNECT":
        host, colon, digits = text.rpartition(":")
        if not colon or not digits.isdecimal() or not 0 < int(digits) < 65_536:
            raise Refused(f"{text[:200]!r} is not HOST:PORT")
        return host, int(digits), b""
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname:
        raise Refused("only http:// addresses and CONNECT; is the proxy set in HTTP_PROXY and HTTPS_PROXY?")
    path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    return parts.hostname, parts.port or 80, path.encode("ascii")


async def _resolve(name: str, port: int) -> list[Address]:
    address = literal(name)
    if address is not None:
        return [address]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise Refused(f"{name} has no address ({error.strerror})") from None
    return list(dict.fromkeys(ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in found))


async def _connect(name: str, addresses: list[Address], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    problem: OSError = OSError(f"{name} can't be reached")
    for address in addresses[:4]:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(str(address), port, limit=_CHUNK)
        except TimeoutError:
            problem = OSError(f"{name} ({address}) did not answer within {CONNECT_S:g} s")
        except OSError as error:
            problem = OSError(f"{name} ({address}): {os.strerror(error.errno) if error.errno else error}")
    raise problem


async def _splice(
    account: Account,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    remote: asyncio.StreamReader,
    upstream: asyncio.StreamWriter,
    first: bytes,
) -> None:
    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, data: bytes = b"") -> None:
        while True:
            if data:
                account.spend(len(data))
                sink.write(data)
                await sink.drain()
            async with asyncio.timeout(IDLE_S):
                data = await source.read(_CHUNK)
            if not data:
                break
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()

    tasks = [
        asyncio.ensure_future(pump(reader, upstream, first)),
        asyncio.ensure_future(pump(remote, writer)),
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    account: Account,
    client: h11.Connection,
    request: h11.Request,
    target: bytes,
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """One request and its answer; the connection ends with it."""
    reader, writer = near
    remote, upstream = far
    origin = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
    headers = [*_end_to_end(request.headers), (b"connection", b"close")]

    async def sent(data: bytes | None, sink: asyncio.StreamWriter) -> None:
        if data:
            account.spend(len(data))
            sink.write(data)
            await sink.drain()

    async def up() -> None:
        await sent(origin.send(h11.Request(method=request.method, target=target, headers=headers)), upstream)
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                if client.they_are_waiting_for_100_continue:
                    await sent(client.send(h11.InformationalResponse(status_code=100, headers=[])), writer)
                async with asyncio.timeout(IDLE_S):
                    client.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, (h11.Data, h11.EndOfMessage)):
                await sent(origin.send(event), upstream)
                if isinstance(event, h11.EndOfMessage):
                    break
            else:
                break
        # a client that hangs up wants no answer any more; what it sends beyond its request is dropped
        while await reader.read(_CHUNK):
            pass

    async def down() -> None:
        while True:
            event = origin.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(IDLE_S):
                    origin.receive_data(await remote.read(_CHUNK))
            elif isinstance(event, h11.Response):
                kept = [*_end_to_end(event.headers), (b"connection", b"close")]
                answer = h11.Response(status_code=event.status_code, reason=event.reason, headers=kept)
                await sent(client.send(answer), writer)
            elif isinstance(event, h11.Data):
                await sent(client.send(event), writer)
            elif isinstance(event, h11.EndOfMessage):
                await sent(client.send(h11.EndOfMessage()), writer)
                return
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the origin closed the connection")

    tasks = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    headers = list(headers)
    named = {
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP | named]


async def _answer(connection: h11.Connection, writer: asyncio.StreamWriter, status: int, text: str) -> None:
    """Tell the program, where nothing else has been told to it yet."""
    if writer.is_closing() or connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        return
    body = text.encode()
    # in the reason, too: it is all that many programs show of a refused CONNECT
    reason = re.sub(r"[^ -~]", "?", text.strip())[:200]
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(HEAD_S):
            await writer.drain()


def own_addresses() -> frozenset[Address]:
    """The addresses of this network namespace's own interfaces, from the kernel's routing tables."""
    return frozenset((*_own_v4(), *_own_v6()))


def _own_v4() -> Iterator[Address]:
    with contextlib.suppress(OSError), open("/proc/net/fib_trie", encoding="ascii") as file:
        for found in re.finditer(r"\|-- (\S+)\s+/32 host LOCAL", file.read()):
            yield ipaddress.ip_address(found[1])


def _own_v6() -> Iterator[Address]:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            yield ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))


# ------------------------------------------------------------------------------------------------------------ process


async def serve(server: socket.socket, settings: dict[str, object]) -> None:
    """Take listening sockets from the server until it goes."""
    allow, deny = settings["allow"], settings["deny"]
    assert isinstance(allow, list)
    assert isinstance(deny, list)
    proxy = Proxy(Policy.of(allow, deny))
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    adding: set[asyncio.Task[None]] = set()

    def readable() -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(server, 4096, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                loop.remove_reader(server)
                gone.set()
                return
            order = json.loads(data)
            if "drop" in order:
                proxy.drop(order["drop"])
            elif fds:
                listener = socket.socket(fileno=fds[0])
                task = loop.create_task(proxy.add(order["add"], listener, order["budget"], order["connections"]))
                adding.add(task)
                task.add_done_callback(adding.discard)

    server.setblocking(False)
    loop.add_reader(server, readable)
    await gone.wait()


def main() -> None:
    """Leave every privilege, then serve. Started by the server: standard input is the socket to it."""
    parent = int(sys.argv[1])
    with contextlib.suppress(OSError):
        syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.set_capabilities(frozenset())
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    settings = json.loads(sys.argv[2])
    asyncio.run(serve(control, settings))


if __name__ == "__main__":
    main()
>>>>>>> eddac40 (feat(sandbox): filtered egress through a proxy that listens inside each slot's own network)
