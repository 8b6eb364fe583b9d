"""The server's HTTP routes. Every answer is a model of `wire`; everything but liveness needs the bearer token."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ValidationError

from atropos.aio import RECEIVE_BYTES, receive_small
from atropos.errors import PoolFull, SandboxError
from atropos.metrics import CONTENT_TYPE
from atropos.net.admission import BearerToken
from atropos.resources import Resources
from atropos.sandbox.server.calls.file_streams import FileStreams
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.http.status import metrics_text, status_of
from atropos.sandbox.server.http.stream import Stream
from atropos.sandbox.server.snapshots.layer_tar import COPY_BYTES
from atropos.sandbox.server.snapshots.snapshot_transfer import IncomingSnapshot
from atropos.sandbox.server.state.snapshot_store import StoredSnapshot
from atropos.wire import (
    MAX_FRAME_BYTES,
    CallRequest,
    Capabilities,
    DrainRequest,
    Fault,
    Health,
    ImageRequest,
    KeepRequest,
    LackingRequest,
    LayerOffer,
    LeaseRequest,
    MountRequest,
    Problem,
    SnapshotRequest,
    StreamState,
    ViewRequest,
)

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
M = TypeVar("M", bound=BaseModel)
OPEN_PATHS = frozenset({"/v1/health"})
"""Paths that need no token."""
NO_TOKEN = "send the server's token: Authorization: Bearer …"
MAX_SMALL_BODY = 65_536
"""Largest body of anything but a call, in bytes."""
STATUS = {
    "invalid_snapshot": 400,
    "full": 409,
    "no_stream": 409,
    "lease_expired": 410,
    "slot_lost": 410,
    "not_supported": 422,
    "outcome_unknown": 500,
    "backend_unavailable": 503,
    "image_unavailable": 422,
}


class Routes:
    """All handlers of one server; `drain` starts its shutdown."""

    def __init__(
        self,
        core: Core,
        token: BearerToken,
        capabilities: Capabilities,
        drain: Callable[[float | None], None],
    ) -> None:
        self._core = core
        self._token = token
        self._capabilities = capabilities
        self._drain = drain

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_FRAME_BYTES)
        app.router.add_get("/v1/health", self.health)
        app.router.add_get("/v1/capabilities", self.capabilities)
        app.router.add_get("/v1/status", self.status)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/leases", self.acquire)
        app.router.add_post("/v1/leases/{id}/renew", self.renew)
        app.router.add_delete("/v1/leases/{id}", self.release)
        app.router.add_post("/v1/leases/{id}/calls", self.call)
        app.router.add_put("/v1/leases/{id}/streams/{stream}", self.write_stream)
        app.router.add_get("/v1/leases/{id}/streams/{stream}", self.read_stream)
        app.router.add_post("/v1/leases/{id}/snapshot", self.snapshot)
        app.router.add_post("/v1/leases/{id}/view", self.view)
        app.router.add_post("/v1/leases/{id}/mounts", self.mount)
        app.router.add_get("/v1/snapshots/{id}", self.get_snapshot)
        app.router.add_delete("/v1/snapshots/{id}", self.drop_snapshot)
        app.router.add_get("/v1/snapshots/{id}/archive", self.export)
        app.router.add_put("/v1/snapshots/{id}/archive", self.receive)
        app.router.add_post("/v1/snapshots/{id}/image", self.keep)
        app.router.add_post("/v1/images", self.prepare)
        app.router.add_put("/v1/images/archive", self.receive_image)
        app.router.add_post("/v1/images/lacking", self.lacking)
        app.router.add_get("/v1/images/{id}/layers", self.give)
        app.router.add_put("/v1/images/{id}/layers", self.take)
        app.router.add_get("/v1/images/{key}/layer", self.export_layer)
        app.router.add_put("/v1/images/{key}/layer", self.receive_layer)
        app.router.add_post("/v1/drain", self.drain)
        app.router.add_get("/v1/stream", self.stream)
        return app

    # ------------------------------------------------------------------------------------------------------ the guard

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token first, then every failure as a `Problem`."""
        # Asked again although `Admission` has: a connection may carry further requests without the token.
        header = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path not in OPEN_PATHS and not self._token.matches(header):
            return problem(401, "unauthorized", NO_TOKEN)
        # aiohttp would unpack a body without a bound: a kilobyte may become a gigabyte.
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return problem(415, "not_supported", "Content-Encoding: send the body as it is")
        try:
            return await handler(request)
        except SandboxError as error:
            room = error.room if isinstance(error, PoolFull) else None
            return problem(STATUS.get(error.code, 500), error.code, str(error), room)
        except web.HTTPException as error:
            names = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
            return problem(error.status, names.get(error.status, "bad_request"), error.text or error.reason)
        # The client has gone: there is nobody to answer.
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            resource = request.match_info.route.resource  # the path itself has the lease's id, a secret
            log.exception("%s %s failed", request.method, resource and resource.canonical)
            return problem(500, SandboxError.code, f"the server failed: {error!r}")

    # ---------------------------------------------------------------------------------------------------------- status

    async def health(self, _: web.Request) -> web.Response:
        """GET /v1/health."""
        state, broken = self._core.state, self._core.leasing.broken
        if broken:
            return answer(Health(status="broken", boot_id=state.boot_id, detail=broken), status=503)
        draining = state.table.draining
        return answer(Health(status="draining" if draining else "ok", boot_id=state.boot_id, detail=draining))

    async def capabilities(self, _: web.Request) -> web.Response:
        """GET /v1/capabilities."""
        return answer(self._capabilities)

    async def status(self, _: web.Request) -> web.Response:
        """GET /v1/status."""
        return answer(status_of(self._core))

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics, in Prometheus' text format."""
        return web.Response(body=metrics_text(self._core).encode(), headers={"Content-Type": CONTENT_TYPE})

    # --------------------------------------------------------------------------------------------------------- leasing

    async def acquire(self, request: web.Request) -> web.Response:
        """POST /v1/leases."""
        return answer(await self._core.leasing.acquire(await _body(request, LeaseRequest)))

    async def renew(self, request: web.Request) -> web.Response:
        """POST /v1/leases/{id}/renew."""
        return answer(self._core.leasing.renew(request.match_info["id"], _number(request, "epoch")))

    async def release(self, request: web.Request) -> web.Response:
        """DELETE /v1/leases/{id}."""
        return answer(await self._core.leasing.release(request.match_info["id"], _number(request, "epoch")))

    async def call(self, request: web.Request) -> web.Response:
        """POST /v1/leases/{id}/calls."""
        result = await self._core.calls.call(request.match_info["id"], await _body(request, CallRequest, large=True))
        if isinstance(result, Fault):
            return problem(STATUS.get(result.code, 500), result.code, result.message)
        return answer(result)

    async def write_stream(self, request: web.Request) -> web.Response:
        """PUT /v1/leases/{id}/streams/{stream}?offset=N[&last=1]: a piece of what a `write_stream` writes."""
        stream = await self._streams(request).find(request.match_info["stream"])
        offset, last = _number(request, "offset") or 0, request.query.get("last") == "1"
        receive_small(request.transport)
        # not joined: larger buffers are mapped anew
        await stream.receive(offset, _chunks(request, RECEIVE_BYTES), last=last)
        return answer(StreamState(received=stream.received))

    async def read_stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/leases/{id}/streams/{stream}: what a `read_stream` reads, once."""
        streams, stream_id = self._streams(request), request.match_info["stream"]
        stream = await streams.find(stream_id)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        try:
            await response.prepare(request)
            async for chunk in stream.chunks():
                await response.write(chunk)
            # Not reached after an error: the client must not take a part of the file for all of it.
            await response.write_eof()
        finally:
            streams.end(stream_id)
        return response

    def _streams(self, request: web.Request) -> FileStreams:
        return self._core.calls.streams_of(request.match_info["id"], _number(request, "epoch"))

    async def snapshot(self, request: web.Request) -> web.Response:
        """POST /v1/leases/{id}/snapshot."""
        body = await _body(request, SnapshotRequest)
        return answer(
            await self._core.workspaces.snapshot(
                request.match_info["id"], body.snapshot_id, body.epoch, beside=body.beside
            )
        )

    async def view(self, request: web.Request) -> web.Response:
        """POST /v1/leases/{id}/view."""
        body = await _body(request, ViewRequest)
        return answer(await self._core.workspaces.view(request.match_info["id"], body.folders, body.epoch))

    async def mount(self, request: web.Request) -> web.Response:
        """POST /v1/leases/{id}/mounts."""
        body = await _body(request, MountRequest)
        return answer(await self._core.workspaces.mount(request.match_info["id"], body))

    def _snapshot(self, request: web.Request) -> StoredSnapshot:
        snapshot = self._core.state.snapshots.by_id.get(request.match_info["id"])
        if snapshot is None:
            raise web.HTTPNotFound(text=f"snapshot {request.match_info['id']!r} is not on this server")
        return snapshot

    async def get_snapshot(self, request: web.Request) -> web.Response:
        """GET /v1/snapshots/{id}."""
        return answer(self._snapshot(request).info)

    async def drop_snapshot(self, request: web.Request) -> web.Response:
        """DELETE /v1/snapshots/{id}; leases on it keep it."""
        self._core.layers.drop_snapshot(self._snapshot(request).id)
        return web.Response(status=204)

    async def keep(self, request: web.Request) -> web.Response:
        """POST /v1/snapshots/{id}/image: keep a snapshot as an image of the host's store."""
        body = await _body(request, KeepRequest)
        return answer(await self._core.images.keep(request.match_info["id"], body))

    async def export(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/snapshots/{id}/archive[?zstd=1]: its layers as a (zstd) tar."""
        snapshot = self._snapshot(request)
        compress = request.query.get("zstd") == "1"
        kind = "application/zstd" if compress else "application/x-tar"
        response = web.StreamResponse(headers={"Content-Type": kind})
        async with self._core.transfer.exported(snapshot, compress=compress) as chunks:
            return await _streamed(request, response, chunks)

    async def receive(self, request: web.Request) -> web.Response:
        """PUT /v1/snapshots/{id}/archive?layers=N[&base=NAME]: a snapshot that another server exported."""
        layers = _number(request, "layers")
        snapshot = IncomingSnapshot(
            snapshot_id=request.match_info["id"],
            layers=1 if layers is None else layers,
            base=request.query.get("base"),
            owner=request.query.get("client_id", "import"),
            compressed=request.content_type == "application/zstd",
        )
        return answer(await self._core.transfer.receive(snapshot, _chunks(request)))

    async def prepare(self, request: web.Request) -> web.Response:
        """POST /v1/images: prepare an image; repeated requests return the progress."""
        body = await _body(request, ImageRequest)
        return answer(await self._core.images.prepare(body.source, body.wait_s, pull=body.pull))

    async def receive_image(self, request: web.Request) -> web.Response:
        """PUT /v1/images/archive?source=oci-archive:…: an image that only the client can read, as a tar."""
        return answer(await self._core.images.receive(request.query.get("source", ""), _chunks(request)))

    async def lacking(self, request: web.Request) -> web.Response:
        """POST /v1/images/lacking."""
        return answer(self._core.images.lacking(await _body(request, LackingRequest)))

    async def give(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/images/{id}/layers?wanted=0,3: an image for another server, with the layers that are wanted."""
        try:
            numbers = [int(each) for each in filter(None, request.query.get("wanted", "").split(","))]
        except ValueError:
            raise web.HTTPBadRequest(text="wanted: numbers, separated by commas, are needed") from None
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        async with self._core.state.host.store.give(request.match_info["id"], numbers) as chunks:
            return await _streamed(request, response, chunks)

    async def take(self, request: web.Request) -> web.Response:
        """PUT /v1/images/{id}/layers?source=NAME: an image that another server gives."""
        source = request.query.get("source", "")
        return answer(await self._core.images.take(source, request.match_info["id"], _chunks(request)))

    async def export_layer(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/images/{key}/layer: a built image's own layer as a tar."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
        async with self._core.images.layer(request.match_info["key"]) as chunks:
            return await _streamed(request, response, chunks)

    async def receive_layer(self, request: web.Request) -> web.Response:
        """PUT /v1/images/{key}/layer?parent=…&parent_source=…&bytes=N: a built image from another server."""
        try:
            offer = LayerOffer.model_validate(dict(request.query))
        except ValidationError as error:
            raise web.HTTPBadRequest(text=str(error.errors()[0]["msg"])) from None
        return answer(await self._core.images.receive_layer(request.match_info["key"], offer, _chunks(request)))

    async def drain(self, request: web.Request) -> web.Response:
        """POST /v1/drain."""
        body = await _body(request, DrainRequest)
        self._drain(body.deadline_s)
        return answer(status_of(self._core))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/stream, the WebSocket."""
        socket = web.WebSocketResponse(compress=False, max_msg_size=MAX_FRAME_BYTES + 1, timeout=1.0)
        if not socket.can_prepare(request).ok:
            return problem(426, "bad_request", "this is a WebSocket: send an Upgrade")
        await socket.prepare(request)
        transport = request.transport
        if isinstance(transport, asyncio.Transport):
            receive_small(transport)
            await Stream(self._core, socket, transport).run()
        return socket


def answer(model: BaseModel, status: int = 200) -> web.Response:
    """A wire model as the body."""
    return web.Response(
        body=model.__pydantic_serializer__.to_json(model), status=status, content_type="application/json"
    )


def problem(status: int, code: str, message: str, room: Resources | None = None) -> web.Response:
    """A refusal."""
    return answer(Problem(code=code, message=message, room=room), status)


async def _body(request: web.Request, kind: type[M], *, large: bool = False) -> M:
    length = request.content_length
    limit = MAX_FRAME_BYTES if large else MAX_SMALL_BODY
    if length is not None and length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    # Checked again below: a chunked body has no Content-Length.
    raw = await request.read()
    if len(raw) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, len(raw))
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        # Without the input, which may hold a secret.
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise web.HTTPBadRequest(text=f"{where or 'body'}: {first['msg']}") from None


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name}: {text[:40]!r} is not a number") from None


async def _chunks(request: web.Request, most: int = COPY_BYTES) -> AsyncIterator[bytes]:
    """The body of a request, in pieces of at most so many bytes.

    Raises:
        ConnectionResetError: it is not complete.
    """
    try:
        async for chunk in request.content.iter_chunked(most):
            yield chunk
    except (web.RequestPayloadError, web.PayloadAccessError, HttpProcessingError) as error:
        raise ConnectionResetError(errno.ECONNRESET, f"the body of the request is not complete: {error!r}") from error


async def _streamed(
    request: web.Request, response: web.StreamResponse, chunks: AsyncIterator[bytes]
) -> web.StreamResponse:
    """Answer with an archive; where it fails, the connection is closed before the last chunk."""
    await response.prepare(request)
    try:
        async for chunk in chunks:
            await response.write(chunk)
    except SandboxError as error:
        log.warning("%s", error)
        response.force_close()
        if request.transport is not None:
            request.transport.close()  # without the last chunk, so that it isn't taken for complete
        return response
    await response.write_eof()
    return response
