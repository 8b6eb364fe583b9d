"""The gate of both services: no request without a token, and a bound on what its holder's bodies take of the memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos.api.http import OPEN_PATHS, Door, Refusal, header_of
from atropos.net.admission import bearer_of

MAX_HELD_BYTES = 512 << 20
"""Bodies that one holder of a token may have in memory at once."""


class Bodies:
    """What the requests of one holder of a token have in memory."""

    def __init__(self) -> None:
        self.held = 0

    @contextlib.contextmanager
    def counted(self, scope: Scope) -> Generator[None]:
        """Around the work on a request, whose body counts until the end of the block at least."""
        body = scope["atropos.body"] = Body(self)
        try:
            yield
        finally:
            body.release()


class Body:
    """What one request has in memory."""

    def __init__(self, of: Bodies) -> None:
        self._of = of
        self._bytes = 0
        self._users = 1

    def resize(self, size: int) -> None:
        """Count so many bytes from now on.

        Raises:
            Refusal: 429, its holder has too many.
        """
        if size > self._bytes and self._of.held + size - self._bytes > MAX_HELD_BYTES:
            under_way = f"{self._of.held:,} of {MAX_HELD_BYTES:,} bytes"
            text = f"requests with this key have bodies of {under_way} under way: send fewer at once"
            raise Refusal(429, "full", text, retry_after_s=1)
        self._of.held += size - self._bytes
        self._bytes = size

    def count_until(self, task: asyncio.Task[object]) -> None:
        """Count it until a task that it was read for has ended, too."""
        self._users += 1
        task.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        """One of those that need it doesn't any more."""
        self._users -= 1
        if not self._users:
            self.resize(0)


def counted_body(request: Request) -> Body:
    """Where the bytes of a request are counted."""
    return request.scope["atropos.body"]


async def body_of(request: Request, most: int) -> bytes:
    """A request's body.

    Raises:
        Refusal: 413, it is longer than `most`; 429, its holder has too much under way.
        ClientDisconnect: it does not come.
    """
    too_long = Refusal(413, "too_large", f"the request is longer than {most:,} bytes")
    declared = dict(request.scope["headers"]).get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > most:
        raise too_long
    counted, body = counted_body(request), bytearray()
    # Before it comes: of many that come slowly, each would find room when it begins, and all of them fill the memory.
    counted.resize(int(declared))
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_long
        counted.resize(max(len(body), int(declared)))
    return bytes(body)


class Gate:
    """ASGI middleware: 401 without the right token, 413 for a long body, before anything else runs.

    Paths below `own_gate` pass: the app that is mounted there checks the token itself. The door may note the holder's
    `Bodies` in the scope as `atropos.bodies`; else all requests share the gate's own.
    """

    def __init__(self, app: ASGIApp, *, door: Door, max_body_bytes: int, own_gate: tuple[str, ...] = ()) -> None:
        self._app = app
        self._own_gate = own_gate
        self._door = door
        self._max = max_body_bytes
        self._bodies = Bodies()

    def _refused(self, scope: Scope) -> Refusal | None:
        if scope["path"] in OPEN_PATHS:
            return None
        return self._door(scope, bearer_of(header_of(scope, b"authorization")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "websocket":  # neither service has one; without an answer, the client would wait
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"].startswith(self._own_gate):
            await self._app(scope, receive, send)
            return
        if (refused := self._refused(scope)) is not None:
            await refused.response()(scope, receive, send)
            return
        bodies: Bodies = scope.get("atropos.bodies", self._bodies)
        with bodies.counted(scope):
            try:
                body = await body_of(Request(scope, receive), self._max)
            except Refusal as refusal:
                await refusal.response()(scope, receive, send)
                return
            except ClientDisconnect:
                return
            await self._app(scope, _replay(body, receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give an app a body that has been read, then what comes after it."""
    whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal whole
        if whole is None:
            return await receive()
        message, whole = whole, None
        return message

    return replayed
