"""What E2B's daemon answers in a sandbox: the routes of its services for processes and files."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from atropos.api.e2b import connect, files, messages, processes, transfers, watching
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.rest import gone, problem
from atropos.api.e2b.sandbox import E2bSandbox, user_named
from atropos.api.e2b.sandboxes import sandboxes_of
from atropos.api.http import Refusal
from atropos.errors import SandboxError

PING_S = 30.0
"""Interval of keep-alive messages in a silent stream, if the client names none."""


_Handler = Callable[[Request, E2bSandbox], Awaitable[Response]]
_UNARY: dict[str, tuple[type[messages.ConnectMessage], Callable[..., Awaitable[Json]], bool]] = {
    "process.Process/List": (messages.Empty, processes.list_all, False),
    "process.Process/SendInput": (messages.SendInput, processes.send_input, False),
    "process.Process/CloseStdin": (messages.Selected, processes.close_stdin, False),
    "process.Process/SendSignal": (messages.SendSignal, processes.send_signal, False),
    "process.Process/Update": (messages.Update, processes.update, False),
    "filesystem.Filesystem/Stat": (messages.AtPath, files.stat, True),
    "filesystem.Filesystem/ListDir": (messages.ListDir, files.list_dir, True),
    "filesystem.Filesystem/MakeDir": (messages.AtPath, files.make_dir, True),
    "filesystem.Filesystem/Move": (messages.Move, files.move, True),
    "filesystem.Filesystem/Remove": (messages.AtPath, files.remove, True),
    "filesystem.Filesystem/CreateWatcher": (messages.Watch, watching.create_watcher, True),
    "filesystem.Filesystem/GetWatcherEvents": (messages.OfWatcher, watching.get_watcher_events, False),
    "filesystem.Filesystem/RemoveWatcher": (messages.OfWatcher, watching.remove_watcher, False),
}
"""Calls with one answer: the message, who answers it, and whether as a user."""
_STREAMS: dict[str, tuple[type[messages.ConnectMessage], Callable[..., AsyncGenerator[Json]], bool]] = {
    "process.Process/Start": (messages.Start, processes.start, True),
    "process.Process/Connect": (messages.Selected, processes.connect, False),
    "filesystem.Filesystem/WatchDir": (messages.Watch, watching.watch_dir, True),
}
"""Calls that are answered with a stream."""
_AUDITED = {
    "filesystem.Filesystem/MakeDir": "make_dir",
    "filesystem.Filesystem/Move": "move",
    "filesystem.Filesystem/Remove": "remove",
}
"""Calls of `_UNARY` that the audit log has, by their names there; commands have an event of their own, looks none."""


def _inside(path: str, handler: _Handler, method: str = "POST", *, audited: str | None = None) -> Route:
    """A route of the sandbox that the header `E2b-Sandbox-Id` names, or the access token.

    In old versions the SDK's `connect` by an id sends the token alone. `audited`: what the audit log calls it.
    """

    async def answered(request: Request) -> Response:
        _, named, in_token = request.headers.get("x-access-token", "").rpartition(".")
        sandbox_id = request.headers.get("e2b-sandbox-id") or (in_token if named else "")
        try:
            sandbox = await sandboxes_of(request).awake(sandbox_id)
        except SandboxError as error:
            return problem(503, str(error), retry=True)
        if sandbox is None:
            return gone(sandbox_id)
        if audited is None:
            return await handler(request, sandbox)
        outcome = "cancelled"
        try:
            response = await handler(request, sandbox)
            outcome = "ok" if response.status_code < HTTPStatus.BAD_REQUEST else "error"
            return response
        finally:
            sandbox.account.note("file", sandbox.id, tool=audited, outcome=outcome)

    return Route(path, answered, methods=[method])


async def _health(_: Request, __: E2bSandbox) -> Response:
    return Response(status_code=204)


def _user_of(request: Request) -> str | None:
    """As the SDK sends it: the name of basic authentication without password."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        name = base64.b64decode(value, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("invalid_argument", "Authorization: the user can't be read") from None
    return user_named(name)


def _unary(kind: type[messages.ConnectMessage], handler: Callable[..., Awaitable[Json]], as_user: bool) -> _Handler:
    async def answered(request: Request, sandbox: E2bSandbox) -> Response:
        async def handle(data: bytes) -> Json:
            message = messages.parse(kind, data)
            return await (handler(sandbox, message, _user_of(request)) if as_user else handler(sandbox, message))

        return await connect.unary(request, handle)

    return answered


def _ping_s(request: Request) -> float:
    header = request.headers.get("keepalive-ping-interval", "")
    # Never more often than once a second: each ping is a message to write, for as long as the client likes.
    return max(1.0, float(header)) if header.isdecimal() and len(header) < 6 else PING_S


def _streamed(
    kind: type[messages.ConnectMessage], handler: Callable[..., AsyncGenerator[Json]], as_user: bool
) -> _Handler:
    async def answered(request: Request, sandbox: E2bSandbox) -> Response:
        try:
            message = messages.parse(kind, await connect.first_message(request))
            user = {"user": _user_of(request)} if as_user else {}
        except (RpcError, Refusal, ClientDisconnect) as error:
            return connect.failed(error)
        times = {"deadline_s": connect.deadline_s(request), "ping_s": _ping_s(request)}
        return connect.stream(handler(sandbox, message, **user, **times))

    return answered


async def _stream_input(request: Request, sandbox: E2bSandbox) -> Response:
    try:
        async with asyncio.timeout(connect.deadline_s(request)):
            await processes.stream_input(sandbox, connect.messages(request))
    except Exception as error:
        return connect.failed(error)
    return connect.stream(connect.one({}))


ROUTES = [
    _inside("/health", _health, "GET"),
    _inside("/files", transfers.download, "GET", audited="read"),
    _inside("/files", transfers.upload, audited="write"),
    *(_inside(f"/{name}", _unary(*how), audited=_AUDITED.get(name)) for name, how in _UNARY.items()),
    *(_inside(f"/{name}", _streamed(*how)) for name, how in _STREAMS.items()),
    _inside("/process.Process/StreamInput", _stream_input),
]
