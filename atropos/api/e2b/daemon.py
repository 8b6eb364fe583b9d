"""What E2B's daemon answers in a sandbox: its services for processes and files, and the upload and download of files."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from atropos.api.e2b import connect, files, messages, processes, watching
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.rest import problem
from atropos.api.e2b.sandbox import Sandbox
from atropos.api.e2b.sandboxes import FindSandboxes
from atropos.errors import SandboxError

MAX_UPLOAD_BYTES = 8 << 30
"""Longest body of an upload, on its way into a sandbox in pieces."""
PING_S = 30.0
"""Interval of keep-alive messages in a silent stream, if the client names none."""
MAX_USER_CHARS = 300
"""Longest name of a user that a slot is asked for."""

_log = logging.getLogger(__name__)


def routes(sandboxes: FindSandboxes) -> list[Route]:
    """Every route; the header `E2b-Sandbox-Id` names the sandbox."""

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
    return problem(502, f"The sandbox {sandbox_id[:100]} was not found")


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
        return problem(507, str(refused))
    if refused.code == "unavailable":
        return problem(502, str(refused))
    return problem(refused.status, str(refused))


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
