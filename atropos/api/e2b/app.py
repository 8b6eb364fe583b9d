"""The routes: E2B's REST API, and behind the header `E2b-Sandbox-Id` what its daemon answers in each sandbox."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import datetime

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos.api.e2b import connect, files, messages, processes, watching
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.sandbox import ENVD_VERSION, Sandbox
from atropos.api.e2b.sandboxes import NoCapacity, Sandboxes
from atropos.config import SlotLimits
from atropos.errors import ConfigError, ImageUnavailable, NotSupported, SandboxError
from atropos.net.admission import BearerToken

TOKEN_HEADERS = (b"x-api-key", b"x-access-token")
"""Where the SDK sends the token: to the API, and to sandboxes."""
MAX_API_BYTES = 1 << 20
MAX_UPLOAD_BYTES = 8 << 30
"""Longest body of an upload, on its way into a sandbox in pieces."""
PING_S = 30.0
"""Interval of keep-alive messages in a silent stream, if the client names none."""
PAGE = 100
"""Most sandboxes in one answer of a list."""
MAX_USER_CHARS = 300
"""Longest name of a user that a slot is asked for."""
_NO_TOKEN = "send this server's token as the API key (E2B_API_KEY)"

_log = logging.getLogger(__name__)

FindSandboxes = Callable[[], Sandboxes]


def create_e2b_app(sandboxes: FindSandboxes, token: str) -> ASGIApp:
    """The E2B API as an ASGI app that answers nothing without the token.

    Args:
        sandboxes: gives the running server's.
        token: the server's.
    """
    app = Starlette(routes=[*_RestApi(sandboxes).routes(), *_daemon(sandboxes)])
    app.add_exception_handler(HTTPException, _unknown)
    return _Gate(app, token)


class _Gate:
    """401 without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = BearerToken(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name in TOKEN_HEADERS]
            if len(given) != 1 or not self._token.is_token(given[0]):
                await _problem(401, _NO_TOKEN)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _problem(status: int, message: str, *, retry: bool = False) -> Response:
    headers = {"Retry-After": "1"} if retry else None
    return JSONResponse({"code": status, "message": message}, status, headers)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _problem(501, f"{request.method} {request.url.path[:200]} is not part of this server's E2B API")
    return _problem(error.status_code, error.detail)


# --------------------------------------------------------------------------------------------------------- REST API


class _RestApi:
    """Handlers of the REST API."""

    def __init__(self, sandboxes: FindSandboxes) -> None:
        self._sandboxes = sandboxes

    def routes(self) -> list[Route]:
        """Every route, in each version of the API that has it."""
        return [
            Route(f"{version}{path}", _answered(handler), methods=[method])
            for method, path, handler, versions in (
                ("POST", "/sandboxes", self._create, ("", "/v2")),
                ("GET", "/sandboxes", self._list, ("", "/v2")),
                ("GET", "/sandboxes/{sandbox_id}", self._info, ("",)),
                ("DELETE", "/sandboxes/{sandbox_id}", self._kill, ("",)),
                ("POST", "/sandboxes/{sandbox_id}/timeout", self._timeout, ("",)),
                ("POST", "/sandboxes/{sandbox_id}/connect", self._connect, ("", "/v2")),
                ("PUT", "/sandboxes/{sandbox_id}/network", self._network, ("",)),
            )
            for version in versions
        ]

    def _named(self, request: Request) -> Sandbox:
        sandbox_id = request.path_params["sandbox_id"]
        sandbox = self._sandboxes().find(sandbox_id)
        if sandbox is None:
            raise RpcError("not_found", f"sandbox {sandbox_id[:100]!r} was not found")
        return sandbox

    async def _create(self, request: Request) -> Response:
        wanted = messages.parse(messages.NewSandbox, await connect.body_of(request, MAX_API_BYTES))
        sandbox = await self._sandboxes().create(
            wanted.template_id,
            timeout_s=wanted.timeout,
            metadata=wanted.metadata,
            env=wanted.env_vars,
            hosts=wanted.network.hosts(internet=wanted.allow_internet_access),
        )
        if await request.is_disconnected():  # nobody would end it, and the wait for a slot or an image may be long
            await self._sandboxes().kill(sandbox.id)
            raise ClientDisconnect
        return JSONResponse(_opened(request, sandbox), 201)

    async def _connect(self, request: Request) -> Response:
        sandbox = self._named(request)
        wanted = messages.parse(messages.NewTimeout, await connect.body_of(request, MAX_API_BYTES))
        self._sandboxes().set_timeout(sandbox, wanted.timeout, later=True)
        return JSONResponse(_opened(request, sandbox))

    async def _list(self, request: Request) -> Response:
        sandboxes = self._sandboxes()
        return _page(request, sandboxes.list(), sandboxes.limits)

    async def _info(self, request: Request) -> Response:
        return JSONResponse(self._named(request).info(self._sandboxes().limits))

    async def _kill(self, request: Request) -> Response:
        await self._sandboxes().kill(self._named(request).id)
        return Response(status_code=204)

    async def _timeout(self, request: Request) -> Response:
        wanted = messages.parse(messages.NewTimeout, await connect.body_of(request, MAX_API_BYTES))
        self._sandboxes().set_timeout(self._named(request), wanted.timeout)
        return Response(status_code=204)

    async def _network(self, request: Request) -> Response:
        wanted = messages.parse(messages.Network, await connect.body_of(request, MAX_API_BYTES))
        slot, hosts = self._named(request).slot, wanted.hosts()
        if hosts != () and not slot.network:
            raise NotSupported("network: the sandbox was created without one")
        await slot.set_network(hosts)
        return Response(status_code=204)


def _answered(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A handler of the REST API whose failures are answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except (RpcError, ClientDisconnect) as error:
            refused = connect.rpc_error(error)
            return _problem(refused.status, str(refused))
        except (ConfigError, NotSupported, ImageUnavailable) as error:
            return _problem(400, str(error))
        except (NoCapacity, SandboxError) as error:
            return _problem(503, str(error), retry=True)

    return answered


def _opened(request: Request, sandbox: Sandbox) -> Json:
    return {
        "sandboxID": sandbox.id,
        "templateID": sandbox.template,
        "clientID": "atropos",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": request.headers.get("x-api-key"),
        "domain": None,
    }


def _page(request: Request, sandboxes: list[Sandbox], limits: SlotLimits) -> Response:
    """The sandboxes that a query asks for, a page at a time: each begins after the last one of the page before it."""
    query = request.query_params
    metadata = {
        urllib.parse.unquote(name): urllib.parse.unquote(value)
        for name, value in urllib.parse.parse_qsl(query.get("metadata", ""), keep_blank_values=True)
    }
    if query.get("state") and "running" not in ",".join(query.getlist("state")).split(","):
        sandboxes = []
    since, template = _moment(query.get("startedAfter")), query.get("template")
    last, ascending = query.get("nextToken"), query.get("order") == "asc"
    found = [
        sandbox
        for sandbox in sorted(sandboxes, key=lambda one: one.place, reverse=not ascending)
        if metadata.items() <= sandbox.metadata.items()
        and template in {None, sandbox.template}
        and sandbox.started >= since
        and (not last or (sandbox.place > last if ascending else sandbox.place < last))
    ]
    limit = query.get("limit", "")
    size = min(PAGE, int(limit)) if limit.isdecimal() and int(limit) else PAGE
    page = found[:size]
    headers = {"X-Next-Token": page[-1].place} if len(found) > size else None
    return JSONResponse([sandbox.info(limits) for sandbox in page], headers=headers)


def _moment(given: str | None) -> float:
    if not given:
        return 0.0
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError):
        raise RpcError("invalid_argument", f"startedAfter: {given[:100]!r} is no time") from None


# ----------------------------------------------------------------------------------------------- a sandbox's daemon


def _daemon(sandboxes: FindSandboxes) -> list[Route]:
    def inside(handler: Callable[[Request, Sandbox], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            sandbox_id = request.headers.get("e2b-sandbox-id", "")
            sandbox = sandboxes().find(sandbox_id)
            return _gone(sandbox_id) if sandbox is None else await handler(request, sandbox)

        return answered

    async def health(_: Request, __: Sandbox) -> Response:
        return Response(status_code=204)

    unary: dict[str, tuple[type[messages.Message], Callable[..., Awaitable[Json]]]] = {
        "process.Process/List": (messages.Empty, processes.list_all),
        "process.Process/SendInput": (messages.SendInput, processes.send_input),
        "process.Process/CloseStdin": (messages.Selected, processes.close_stdin),
        "process.Process/SendSignal": (messages.SendSignal, processes.send_signal),
        "process.Process/Update": (messages.Update, processes.update),
    }
    at_path: dict[str, tuple[type[messages.Message], Callable[..., Awaitable[Json]]]] = {
        "Stat": (messages.AtPath, files.stat),
        "ListDir": (messages.ListDir, files.list_dir),
        "MakeDir": (messages.AtPath, files.make_dir),
        "Move": (messages.Move, files.move),
        "Remove": (messages.AtPath, files.remove),
        "CreateWatcher": (messages.Watch, watching.create_watcher),
        "GetWatcherEvents": (messages.OfWatcher, watching.get_watcher_events),
        "RemoveWatcher": (messages.OfWatcher, watching.remove_watcher),
    }
    return [
        Route("/health", inside(health), methods=["GET"]),
        Route("/files", inside(_download), methods=["GET"]),
        Route("/files", inside(_upload), methods=["POST"]),
        *(Route(f"/{name}", inside(_unary(*how)), methods=["POST"]) for name, how in unary.items()),
        *(
            Route(f"/filesystem.Filesystem/{name}", inside(_unary(*how, as_user=True)), methods=["POST"])
            for name, how in at_path.items()
        ),
        *(
            Route(f"/{name}", inside(_streamed(kind, handler, as_user=as_user)), methods=["POST"])
            for name, kind, handler, as_user in (
                ("process.Process/Start", messages.Start, processes.start, True),
                ("process.Process/Connect", messages.Selected, processes.connect, False),
                ("filesystem.Filesystem/WatchDir", messages.Watch, watching.watch_dir, True),
            )
        ),
        Route("/process.Process/StreamInput", inside(_stream_input), methods=["POST"]),
    ]


def _gone(sandbox_id: str) -> Response:
    """The SDK recognizes a sandbox that is gone by this text."""
    return _problem(502, f"The sandbox {sandbox_id[:100]} was not found")


def _user(name: str) -> str | None:
    """The slot's user of a name; None, its root, for E2B's default user.

    Raises:
        RpcError: no user is called that.
    """
    if len(name) > MAX_USER_CHARS:
        raise RpcError("invalid_argument", f"user: there is none with a name of {len(name)} characters")
    return None if name in {"", "user", "root"} else name


def _user_of(request: Request) -> str | None:
    """As the SDK sends it: the name of basic authentication without password."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        name = base64.b64decode(value, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("invalid_argument", "Authorization: the user can't be read") from None
    return _user(name)


def _unary(
    kind: type[messages.Message], handler: Callable[..., Awaitable[Json]], *, as_user: bool = False
) -> Callable[[Request, Sandbox], Awaitable[Response]]:
    async def answered(request: Request, sandbox: Sandbox) -> Response:
        async def handle(data: bytes) -> Json:
            message = messages.parse(kind, data)
            return await (handler(sandbox, message, _user_of(request)) if as_user else handler(sandbox, message))

        return await connect.unary(request, handle)

    return answered


def _ping_s(request: Request) -> float:
    given = request.headers.get("keepalive-ping-interval", "")
    return max(1.0, float(given)) if given.isdecimal() and len(given) < 6 else PING_S


def _streamed(
    kind: type[messages.Message], handler: Callable[..., AsyncGenerator[Json]], *, as_user: bool = False
) -> Callable[[Request, Sandbox], Awaitable[Response]]:
    async def answered(request: Request, sandbox: Sandbox) -> Response:
        try:
            message = messages.parse(kind, await connect.first_message(request))
            user = {"user": _user_of(request)} if as_user else {}
        except (RpcError, ClientDisconnect) as error:
            return connect.failed(error)
        times = {"deadline_s": connect.deadline_s(request), "ping_s": _ping_s(request)}
        return connect.stream(handler(sandbox, message, **user, **times))

    return answered


async def _stream_input(request: Request, sandbox: Sandbox) -> Response:
    try:
        async with asyncio.timeout(connect.deadline_s(request)):
            await processes.stream_input(sandbox, connect.messages(request))
    except Exception as error:
        return connect.failed(error)
    return connect.stream(connect.one({}))


# ---------------------------------------------------------------------------------------------- upload and download


def _file_problem(error: Exception, sandbox: Sandbox) -> Response:
    refused = connect.rpc_error(error)
    if sandbox.slot.lost is not None:
        return _gone(sandbox.id)
    if refused.code == "resource_exhausted":
        return _problem(507, str(refused))
    if refused.code == "unavailable":
        return _problem(502, str(refused))
    return _problem(refused.status, str(refused))


async def _download(request: Request, sandbox: Sandbox) -> Response:
    query = request.query_params
    try:
        pieces = files.read(sandbox, query.get("path", ""), _user(query.get("username", "")))
        first = await anext(pieces)
    except Exception as error:
        return _file_problem(error, sandbox)

    async def body() -> AsyncGenerator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return _Download(body(), media_type="application/octet-stream")


class _Download(StreamingResponse):
    """A file's pieces; where they end early, the connection breaks: a client can't take what came for the whole."""

    async def stream_response(self, send: Send) -> None:
        """Send them."""
        try:
            await super().stream_response(send)
        except (OSError, SandboxError) as error:
            _log.warning("a download broke off: %s", error)


async def _upload(request: Request, sandbox: Sandbox) -> Response:
    query = request.query_params
    path = query.get("path")
    kind = request.headers.get("content-type", "")
    body: AsyncIterator[bytes] = _bounded(request)
    if request.headers.get("content-encoding") == "gzip":
        body = files.unzipped(body)
    try:
        user = _user(query.get("username", ""))
        if kind.startswith("application/octet-stream"):
            if not path:
                raise RpcError("invalid_argument", "path is missing")
            return JSONResponse([await files.write(sandbox, path, body, user)])
        return JSONResponse(await files.write_parts(sandbox, kind, body, path, user))
    except Exception as error:
        return _file_problem(error, sandbox)


async def _bounded(request: Request) -> AsyncGenerator[bytes]:
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > MAX_UPLOAD_BYTES:
            raise RpcError("resource_exhausted", f"the body is longer than {MAX_UPLOAD_BYTES:,} bytes")
        yield chunk
