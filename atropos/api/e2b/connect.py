"""The Connect protocol as the SDK speaks it: JSON, alone or in a stream's envelopes (connectrpc.com/docs/protocol)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from atropos.api.gate import body_of, counted_body
from atropos.api.http import Refusal
from atropos.errors import AcquireTimeout, ConfigError, NotSupported, SandboxError

Json = dict[str, object]
"""A JSON object, as the protocol's messages are."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest message of a request."""
UNARY_S = 60.0
"""Timeout of a call with one answer."""
_HEAD = struct.Struct(">BI")
"""Before each message of a stream: flags, and its length."""
_END = 2
"""The flag of a stream's last message; the other one, 1, says that a message is compressed."""
# As the protocol has it; what it gives 500 is not listed.
_STATUS = {
    "invalid_argument": 400,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 429,
    "canceled": 499,
    "unavailable": 503,
    "out_of_range": 400,
    "deadline_exceeded": 504,
}
_OF_ERRNO = {
    errno.ENOENT: "not_found",
    errno.EACCES: "permission_denied",
    errno.EEXIST: "already_exists",
    errno.ENOTDIR: "invalid_argument",
    errno.EISDIR: "invalid_argument",
    errno.EINVAL: "invalid_argument",
    errno.ENOSPC: "resource_exhausted",
    errno.EDQUOT: "resource_exhausted",
    errno.EFBIG: "resource_exhausted",
}


class RpcError(Exception):
    """An error answer: a code of the protocol, and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = _STATUS.get(code, 500)

    @property
    def body(self) -> Json:
        """As JSON."""
        return {"code": self.code, "message": str(self)}


def rpc_error(error: Exception) -> RpcError:
    """The protocol's error for a failure; one of the infrastructure is `unavailable`, never a result.

    Raises:
        Exception: the error itself, where it is a bug.
    """
    match error:
        case RpcError():
            return error
        case Refusal():
            return RpcError("resource_exhausted" if error.status == 429 else "invalid_argument", error.message)
        case ClientDisconnect():
            return RpcError("canceled", "the client went away")
        # With a number it is the kernel's, from a file system or a socket, and no deadline of ours.
        case TimeoutError() if not error.errno:
            return RpcError("deadline_exceeded", "the call's deadline has passed")
        case OSError():
            return RpcError(_OF_ERRNO.get(error.errno or 0, "internal"), str(error))
        case AcquireTimeout():
            return RpcError("resource_exhausted", str(error))
        case NotSupported() | ConfigError():
            return RpcError("invalid_argument", str(error))
        case SandboxError():
            return RpcError("unavailable", f"the connection to the sandbox was lost: {error.code}: {error}")
        case _:
            raise error


def deadline_s(request: Request) -> float | None:
    """The client's deadline in seconds; None: it sets none."""
    header = request.headers.get("connect-timeout-ms", "")
    # Ten digits are what the protocol allows.
    return int(header) / 1000 if header.isdecimal() and len(header) <= 10 else None


async def messages(request: Request) -> AsyncGenerator[bytes]:
    """The messages of a client's stream, as they come.

    Raises:
        RpcError: one is too long, or compressed.
        Refusal: 429, as `body_of`.
    """
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        counted_body(request).resize(len(received))
        while len(received) >= _HEAD.size:
            flags, size = _HEAD.unpack_from(received)
            if size > MAX_MESSAGE_BYTES or flags & ~_END:
                raise RpcError("invalid_argument", "a message is too long, or compressed")
            if len(received) < _HEAD.size + size:
                break
            message = bytes(received[_HEAD.size : _HEAD.size + size])
            del received[: _HEAD.size + size]
            if not flags & _END:
                yield message


async def unary(request: Request, handler: Callable[[bytes], Awaitable[Json]]) -> Response:
    """Answer a call with one message."""
    try:
        async with asyncio.timeout(min(deadline_s(request) or UNARY_S, UNARY_S)):
            return JSONResponse(await handler(await body_of(request, MAX_MESSAGE_BYTES)))
    except Exception as error:
        refused = rpc_error(error)
        return JSONResponse(refused.body, refused.status)


async def first_message(request: Request) -> bytes:
    """The one message of a call that is answered with a stream.

    Raises:
        RpcError: there is none.
    """
    async for message in messages(request):
        return message
    raise RpcError("invalid_argument", "the message is missing")


def failed(error: Exception) -> Response:
    """Answer a call that would be answered with a stream."""
    # With status 200: the protocol has a stream's errors in its last message alone.
    end: Json = {"error": rpc_error(error).body}
    return Response(_enveloped(end, _END), media_type="application/connect+json")


async def one(message: Json) -> AsyncGenerator[Json]:
    """A stream of one message."""
    yield message


def stream(events: AsyncGenerator[Json]) -> Response:
    """Answer a call with a stream of messages; the last one carries the failure, if there is one."""

    async def body() -> AsyncGenerator[bytes]:
        end: Json = {}
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield _enveloped(event, 0)
        except Exception as error:
            end = {"error": rpc_error(error).body}
        yield _enveloped(end, _END)

    return StreamingResponse(body(), media_type="application/connect+json")


def _enveloped(message: Json, flags: int) -> bytes:
    data = json.dumps(message).encode()
    return _HEAD.pack(flags, len(data)) + data
