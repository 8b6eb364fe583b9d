"""Hosts by sandbox, `PORT-ID.DOMAIN`: E2B's daemon in a sandbox, and the servers that its programs run."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from hmac import compare_digest
from http import HTTPStatus
from typing import NamedTuple, NoReturn

import aiohttp
import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from atropos.aio import Tasks, race
from atropos.api.e2b.sandbox import E2bSandbox
from atropos.api.e2b.sandboxes import Sandboxes
from atropos.api.http import header_of
from atropos.errors import SandboxError
from atropos.net.exchange import HOP_BY_HOP
from atropos.slots import PortForward

_log = logging.getLogger(__name__)
DAEMON_PORT = 49_983
"""Where E2B has its daemon."""
TRAFFIC_TOKEN = b"e2b-traffic-access-token"
"""Header of the token that a sandbox without public traffic asks for."""
_BYTES = 65_536
_NOT_PASSED_ON = HOP_BY_HOP | {b"transfer-encoding"}
"""Each side has its own."""
_SERVER = re.compile(r"(\d{1,5})-([a-z0-9]+)")


class SandboxServer(NamedTuple):
    """A port of a sandbox that a host names."""

    port: int
    sandbox_id: str


class ServerRefused(Exception):
    """A request that reaches no server of a sandbox's."""

    def __init__(self, status: int, message: str, server: SandboxServer) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"sandboxId": server.sandbox_id, "port": server.port, "message": message, "code": status}


class SandboxHosts:
    """The hosts below a domain.

    Args:
        domain: `api.DOMAIN` is the API, `PORT-ID.DOMAIN` a sandbox's server; None: there are no hosts.
        everybodys: the sandboxes of all keys.
    """

    def __init__(self, domain: str | None, everybodys: Callable[[], Iterable[Sandboxes]]) -> None:
        self.domain = domain
        self._everybodys = everybodys
        self._http: aiohttp.ClientSession | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        """The client of sandboxes' servers.

        Each request has a connection of its own, since the port that led to one sandbox may lead to another next.
        """
        if self._http is None:
            self._http = aiohttp.ClientSession(
                auto_decompress=False,  # bytes go on as they came
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                # All servers are at 127.0.0.1: one sandbox's cookies would go to another's.
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._http

    async def aclose(self) -> None:
        """End all requests to sandboxes' servers."""
        if self._http is not None:
            await self._http.close()

    def name_in(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The part of a request's host before the domain; None: it is another host."""
        hosts = [value for name, value in headers if name == b"host"]
        host = hosts[0].decode("latin-1").lower().partition(":")[0] if len(hosts) == 1 else ""
        if self.domain is None or not host.endswith(end := f".{self.domain}"):
            return None
        return host.removesuffix(end)

    def server_in(self, headers: Iterable[tuple[bytes, bytes]]) -> SandboxServer | None:
        """The server that a request's host names; None: it names none."""
        match = _SERVER.fullmatch(self.name_in(headers) or "")
        return None if match is None else SandboxServer(int(match[1]), match[2])

    def needs_no_token(self, request: h11.Request) -> bool:
        """Whether a request is for a server in a sandbox, which decides itself whom it answers."""
        server = self.server_in(request.headers)
        return server is not None and server.port != DAEMON_PORT and self._owner(server) is not None

    def _owner(self, server: SandboxServer) -> Sandboxes | None:
        return next((each for each in self._everybodys() if each.known(server.sandbox_id) is not None), None)

    async def port_of(self, server: SandboxServer, given: bytes) -> int:
        """The port of this machine's loopback that leads to a server. `given`: the token of its traffic.

        Raises:
            ServerRefused: there is none.
        """
        try:
            owner = self._owner(server)
            known = None if owner is None else owner.known(server.sandbox_id)
            token = None if known is None else known.traffic_token
            if token is not None and not compare_digest(given, token.encode()):
                raise ServerRefused(403, f"send the sandbox's trafficAccessToken as {TRAFFIC_TOKEN.decode()}", server)
            sandbox = None if owner is None else await owner.awake(server.sandbox_id)
            if sandbox is None:
                raise ServerRefused(502, "The sandbox was not found", server)
            return await _forwarded(sandbox, server)
        except (SandboxError, OSError, ValueError) as error:
            raise ServerRefused(502, str(error), server) from error


async def _forwarded(sandbox: E2bSandbox, server: SandboxServer) -> int:
    async with sandbox.forwarding:
        forward = sandbox.forwards.get(server.port)
        if forward is None or forward.ended:
            forward = sandbox.forwards[server.port] = await PortForward.to_slot(sandbox.slot, server.port)
        return forward.port


class HostRoutes:
    """ASGI middleware: requests to the domain's hosts go where these lead; all others pass."""

    def __init__(self, app: ASGIApp, hosts: SandboxHosts, root_path: str) -> None:
        self._app = app
        self._hosts = hosts
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the app answer it."""
        if scope["type"] == "http" and (name := self._hosts.name_in(scope["headers"])) is not None:
            server = self._hosts.server_in(scope["headers"])
            if server is not None and server.port != DAEMON_PORT:
                answer = await self._passed_on(Request(scope, receive), server)
                await answer(scope, receive, send)
                return
            if server is not None:
                named = [(b"e2b-sandbox-id", server.sandbox_id.encode())]
                others = [each for each in scope["headers"] if each[0] != b"e2b-sandbox-id"]
                scope = {**scope, "headers": [*others, *named]}
            if (server is not None or name in {"api", "sandbox"}) and not scope["path"].startswith(self._root_path):
                path = f"{self._root_path}{scope['path']}"
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    async def _passed_on(self, request: Request, server: SandboxServer) -> Response:
        """What a sandbox's server answers."""
        try:
            if not request.scope["raw_path"].startswith(b"/"):  # `@elsewhere` or `http://elsewhere`: this is no proxy
                raise ServerRefused(400, "the request names no path", server)
            port = await self._hosts.port_of(server, header_of(request.scope, TRAFFIC_TOKEN))
        except ServerRefused as refused:
            return JSONResponse(refused.body, refused.status)
        headers = [each for each in request.scope["headers"] if each[0] not in _NOT_PASSED_ON]
        sent = asyncio.Event() if {"content-length", "transfer-encoding"} & set(request.headers) else None

        async def answered_by() -> aiohttp.ClientResponse:
            return await self._hosts.http.request(
                request.method,
                _target(request, port),
                headers=[(name.decode("latin-1"), _text(value)) for name, value in headers],
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                data=None if sent is None else _body(request, sent),
                allow_redirects=False,
            )

        try:
            answer = await race(answered_by(), _gone(request, sent))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except (aiohttp.ClientError, OSError):
            refused = ServerRefused(502, f"no server answers on port {server.port} of the sandbox", server)
            return JSONResponse(refused.body, refused.status)

        passed = StreamingResponse(_content(answer), answer.status)
        answered = [(name.lower(), value) for name, value in answer.raw_headers]
        passed.raw_headers = [each for each in answered if each[0] not in _NOT_PASSED_ON]
        return passed


def _target(request: Request, port: int) -> URL:
    """Where a request goes: its bytes are the client's, `..` and `%7e` among them."""
    return URL.build(
        scheme="http",
        host="127.0.0.1",
        port=port,
        path=request.scope["raw_path"].decode("latin-1"),
        query_string=request.scope["query_string"].decode("latin-1"),
        encoded=True,
    )


async def _content(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for piece in answer.content.iter_any():
            yield piece


def _text(value: bytes) -> str:
    """A header's value as text, which aiohttp writes as UTF-8; what was none is taken for Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def _body(request: Request, sent: asyncio.Event) -> AsyncIterator[bytes]:
    """A request's body; `sent` is set at its end."""
    async for piece in request.stream():
        yield piece
    sent.set()


async def _gone(request: Request, sent: asyncio.Event | None) -> NoReturn:
    """Wait until the client of a request leaves; `sent`: set once its body was read, None where it has none.

    Raises:
        ClientDisconnect: it has.
    """
    if sent is not None:
        await sent.wait()
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class UpgradeRelay(asyncio.Protocol):
    """A connection that asks for another protocol, as WebSocket: its bytes go to a sandbox's server, and back.

    uvicorn makes one for each such request and hands the connection over with the request's head.
    """

    def __init__(self, hosts: SandboxHosts) -> None:
        self._hosts = hosts
        self._reader = asyncio.StreamReader()
        self._client = asyncio.StreamReaderProtocol(self._reader)
        self._tasks = Tasks("upgraded connection")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read."""
        self._client.connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        writer = asyncio.StreamWriter(transport, self._client, self._reader, asyncio.get_running_loop())
        self._tasks.spawn(self._relay(writer), "relay")

    def data_received(self, data: bytes) -> None:
        """Pass on what comes."""
        self._client.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._client.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._client.connection_lost(exc)
        self._tasks.stop()

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self._client.pause_writing()

    def resume_writing(self) -> None:
        """The client reads on."""
        self._client.resume_writing()

    async def _relay(self, client: asyncio.StreamWriter) -> None:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            request = h11.Connection(h11.SERVER)
            request.receive_data(head)
            event = request.next_event()
            server = self._hosts.server_in(event.headers) if isinstance(event, h11.Request) else None
            if not isinstance(event, h11.Request) or server is None or server.port == DAEMON_PORT:
                raise ServerRefused(400, "no WebSocket is answered here", server or SandboxServer(0, ""))
            port = await self._hosts.port_of(server, dict(event.headers).get(TRAFFIC_TOKEN, b""))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head)
                if await _upgraded(request, event, server, reader, client):
                    await race(_copy(self._reader, writer), _copy(reader, client))
            finally:
                writer.close()
        except ServerRefused as refused:
            answer = JSONResponse(refused.body, refused.status)
            size = f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
            client.write(f"HTTP/1.1 {refused.status} Refused\r\n{size}".encode() + bytes(answer.body))
        except (OSError, EOFError, asyncio.LimitOverrunError, h11.ProtocolError) as error:
            _log.debug("an upgraded connection ended: %s", error)
        finally:
            client.close()


async def _upgraded(
    request: h11.Connection,
    asked: h11.Request,
    server: SandboxServer,
    reader: asyncio.StreamReader,
    client: asyncio.StreamWriter,
) -> bool:
    """Pass on what a server answers to a request for another protocol; whether it agrees.

    Otherwise the connection ends with its answer. If it went on, a proxy in front would send the next request on it,
    perhaps another key's, and that server would read it.

    Raises:
        ServerRefused: it doesn't answer.
        h11.ProtocolError: what it sends is no answer, or not the whole of one.
    """
    origin = h11.Connection(h11.CLIENT)
    origin.send(asked)
    while True:
        try:
            event = origin.next_event()
        except h11.RemoteProtocolError:
            event = h11.ConnectionClosed()
        if event is h11.NEED_DATA:
            origin.receive_data(await reader.read(_BYTES))
        elif isinstance(event, h11.InformationalResponse):
            if event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                client.write((request.send(event) or b"") + origin.trailing_data[0])
                return True
        elif isinstance(event, h11.Response):
            passed = [each for each in event.headers if each[0] not in HOP_BY_HOP]
            headers = [*passed, (b"connection", b"close")]
            last = h11.Response(status_code=event.status_code, reason=event.reason, headers=headers)
            client.write(request.send(last) or b"")
        elif isinstance(event, h11.Data):
            client.write(request.send(h11.Data(data=event.data)) or b"")
            await client.drain()
        elif isinstance(event, h11.EndOfMessage):
            client.write(request.send(h11.EndOfMessage()) or b"")
            return False
        elif request.our_state is h11.SEND_RESPONSE:
            raise ServerRefused(502, f"no server answers on port {server.port} of the sandbox", server)
        else:
            raise h11.RemoteProtocolError("the answer breaks off")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BYTES):
        writer.write(data)
        await writer.drain()
