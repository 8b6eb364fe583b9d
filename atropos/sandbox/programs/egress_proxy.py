"""The filtering proxy of a container: a process of its own, with a user of its own, that slots reach by their loopback.

The server hands it one listening socket a slot, made inside that slot's network namespace; so it knows which slot asks
by the socket alone, and no program in a slot can reach another's. HTTP requests and CONNECT are judged by
`egress_rules`; bytes and connections are bounded per slot. Every refusal is a readable HTTP answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from atropos.sandbox.linux import syscalls
from atropos.sandbox.programs.egress_rules import Address, Policy, Refused, literal, plain

HEAD_S, CONNECT_S, IDLE_S = 20.0, 10.0, 300.0
LOOKUPS = 4
"""Names that one slot may have looked up at once; its further requests wait."""
_MAX_RESOLVERS = 512
"""Threads that look names up, at most."""
_DENIED_S = 30.0
"""How often the addresses of denied names are looked up, in seconds."""
_SPARE_FILES = 64
"""Descriptors of the proxy that aren't for connections; the others are shared out among the slots."""
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
    lookups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOKUPS))

    def spend(self, count: int) -> None:
        """Count bytes.

        Raises:
            Spent: there are none left.
        """
        self.left -= count
        if self.left < 0:
            raise Spent


class Proxy:
    """Serves the slots' listening sockets."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy = policy
        self._accounts: dict[int, Account] = {}
        self._denied: dict[str, frozenset[Address]] = {}
        # as many threads as all slots together may use: one with a dead name server leaves the others theirs
        self._resolvers = ThreadPoolExecutor(min(_MAX_RESOLVERS, LOOKUPS * (slots + 1)), "resolve")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unbounded = files == resource.RLIM_INFINITY
        self._most = sys.maxsize if unbounded else max(1, (files - _SPARE_FILES) // (2 * slots + 2))

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
        self._accounts[number] = Account(server, budget, min(connections, self._most))

    def drop(self, number: int) -> None:
        """A slot has ended."""
        account = self._accounts.pop(number, None)
        if account is not None:
            account.server.close()
            for task in list(account.tasks):
                task.cancel()

    async def watch_denied(self) -> None:
        """Know the addresses of denied names, so that no other name leads there. A failed look-up keeps the last ones."""
        places = asyncio.Semaphore(LOOKUPS)
        while self.policy.denied_names:
            for name in self.policy.denied_names:
                with contextlib.suppress(Refused, TimeoutError):
                    self._denied[name] = frozenset(await self._resolve(places, name, 443))
            await asyncio.sleep(_DENIED_S)

    async def _resolve(self, places: asyncio.Semaphore, name: str, port: int) -> list[Address]:
        """A name's addresses. One of the asker's few places is taken until the thread is done, not until it is given up."""
        address = literal(name)
        if address is not None:
            return [address]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            await places.acquire()
            work = self._resolvers.submit(_addresses, name, port)
            work.add_done_callback(lambda _: loop.call_soon_threadsafe(places.release))
            try:
                return await asyncio.wrap_future(work)
            except socket.gaierror as error:
                raise Refused(f"{name} has no address ({error.strerror})") from None

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
            found = await self._resolve(account.lookups, name, port)
            addresses = self.policy.judge_addresses(name, found, own_addresses().union(*self._denied.values()))
            remote, upstream = await _connect(name, addresses, port)
            if request.method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                rest, _ = connection.trailing_data
                await _splice(account, reader, writer, remote, upstream, rest)
            else:
                authority = _authority(name, port)
                await _forward(account, connection, request, (target, authority), (reader, writer), (remote, upstream))
        except Refused as error:
            await _answer(connection, writer, 403, f"egress refused: {error}\n")
        except Spent:
            await _answer(connection, writer, 403, "egress refused: this slot has used up its bytes (egress_mib)\n")
        except (h11.ProtocolError, ValueError) as error:
            await _answer(connection, writer, 400, f"egress: not a proxy request: {error}\n")
        except TimeoutError:
            await _answer(connection, writer, 504, "egress: timed out\n")
        except OSError as error:
            await _answer(connection, writer, 502, f"egress: {error.strerror or error}\n")
        except asyncio.CancelledError:
            for stream in filter(None, (writer, upstream)):
                stream.transport.abort()  # the slot is gone: nobody reads what is left
            raise
        finally:
            await _hang_up(*filter(None, (writer, upstream)))


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
    # as it was written: put together again by `urllib`, `//a` becomes `////a` (Python 3.13) and `/a?` loses its mark
    path = text.partition("://")[2].partition("#")[0].removeprefix(parts.netloc)
    return parts.hostname, parts.port or 80, (path if path.startswith("/") else f"/{path}").encode("ascii")


def _addresses(name: str, port: int) -> list[Address]:
    """In a thread of its own: the C library's look-up can't be interrupted."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(plain(ipaddress.ip_address(str(item[4][0]).partition("%")[0])) for item in found))


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
    wanted: tuple[bytes, bytes],
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """One request and its answer; the connection ends with it. `wanted`: the path and the authority to ask for."""
    reader, writer = near
    remote, upstream = far
    origin = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
    target, authority = wanted
    # the origin is the one that was judged, whatever the program wrote into its own Host (RFC 9112, 3.2.2)
    kept = [pair for pair in _end_to_end(request.headers) if pair[0].lower() != b"host"]
    headers = [(b"host", authority), *kept, (b"connection", b"close")]

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
        while dropped := await reader.read(_CHUNK):
            account.spend(len(dropped))

    async def down() -> None:
        while True:
            event = origin.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(IDLE_S):
                    origin.receive_data(await remote.read(_CHUNK))
            elif isinstance(event, h11.Response):
                fields = [*_end_to_end(event.headers), (b"connection", b"close")]
                answer = h11.Response(status_code=event.status_code, reason=event.reason, headers=fields)
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
    dropped = _HOP_BY_HOP | named - {b"host", b"content-length", b"transfer-encoding"}
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        dropped = dropped | {
            b"content-length"
        }  # two lengths in one message is how requests are smuggled (RFC 9112, 6.1)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _authority(name: str, port: int) -> bytes:
    host = f"[{name}]" if ":" in name else name
    return (host if port == 80 else f"{host}:{port}").encode("ascii")


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


async def _hang_up(*streams: asyncio.StreamWriter) -> None:
    """Close, and wait until what was written has been read: meanwhile the connection counts as one of its slot's."""
    for stream in streams:
        stream.close()
    try:
        async with asyncio.timeout(IDLE_S):
            await asyncio.gather(*(stream.wait_closed() for stream in streams), return_exceptions=True)
    except TimeoutError:
        pass
    finally:
        for stream in streams:
            stream.transport.abort()


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
    slots = settings["slots"]
    assert isinstance(slots, int)
    proxy = Proxy(Policy.of(allow, deny), slots)
    loop = asyncio.get_running_loop()
    denied = loop.create_task(proxy.watch_denied())
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
    denied.cancel()


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
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=os.dup(0))
    settings = json.loads(sys.argv[2])
    asyncio.run(serve(control, settings))


if __name__ == "__main__":
    main()
