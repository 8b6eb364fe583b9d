"""Upload and download: files of a sandbox on their way in and out."""

from __future__ import annotations

import logging
import posixpath
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

from python_multipart import MultipartParser
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from atropos import wire
from atropos.api.e2b import connect
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.files import path_of
from atropos.api.e2b.rest import gone, problem
from atropos.api.e2b.sandbox import E2bSandbox, user_named
from atropos.api.gate import counted_body
from atropos.api.http import Refusal
from atropos.errors import SandboxError
from atropos.slots.slot.results import answered, file_error

MAX_UPLOAD_BYTES = 8 << 30
"""Longest body of an upload, on its way into a sandbox in pieces."""
PIECE_BYTES = 1 << 20
"""Size of the pieces in which files are sent, both ways."""
PartPiece = str | bytes | None
"""Of a part of a multipart body: first the name of its file, perhaps empty, then its bytes, at last None."""
_GZIP = 16 + zlib.MAX_WBITS
_log = logging.getLogger(__name__)


def _file_problem(error: Exception, sandbox: E2bSandbox) -> Response:
    if isinstance(error, Refusal):
        return problem(error.status, error.message, retry=error.status == 429)
    refused = connect.rpc_error(error)
    if sandbox.slot.lost is not None:
        return gone(sandbox.id)
    if refused.code == "resource_exhausted":
        return problem(507, str(refused))
    if refused.code == "unavailable":
        return problem(502, str(refused))
    return problem(refused.status, str(refused))


async def download(request: Request, sandbox: E2bSandbox) -> Response:
    """`GET /files`: a file's content."""
    query = request.query_params
    try:
        pieces = read(sandbox, query.get("path", ""), user_named(query.get("username", "")))
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


async def upload(request: Request, sandbox: E2bSandbox) -> Response:
    """`POST /files`: a file as the body, or several as a multipart form."""
    query = request.query_params
    path = query.get("path")
    kind = request.headers.get("content-type", "")
    body: AsyncIterator[bytes] = _bounded(request)
    if request.headers.get("content-encoding") == "gzip":
        body = unzipped(body)
    try:
        user = user_named(query.get("username", ""))
        if kind.startswith("application/octet-stream"):
            if not path:
                raise RpcError("invalid_argument", "path is missing")
            return JSONResponse([await write(sandbox, path, body, user)])
        return JSONResponse(await write_parts(sandbox, kind, body, path, user))
    except Exception as error:
        return _file_problem(error, sandbox)


async def _bounded(request: Request) -> AsyncGenerator[bytes]:
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > MAX_UPLOAD_BYTES:
            raise RpcError("resource_exhausted", f"the body is longer than {MAX_UPLOAD_BYTES:,} bytes")
        counted_body(request).resize(min(total, 2 * PIECE_BYTES))  # a piece, and what has come of the next
        yield chunk


async def read(sandbox: E2bSandbox, path: str, user: str | None) -> AsyncGenerator[bytes]:
    """A file's content in pieces, each read when the last one has gone.

    Raises:
        OSError: it can't be read.
    """
    path, offset = path_of(sandbox, path), 0
    while True:
        operation = wire.ReadFile(path=path, offset=offset, max_bytes=PIECE_BYTES, user=user)
        result = answered(await sandbox.slot.run(operation), wire.FileResult, path)
        yield result.data
        if len(result.data) < PIECE_BYTES:
            return
        offset += len(result.data)


async def write(sandbox: E2bSandbox, path: str, content: AsyncIterable[bytes], user: str | None) -> Json:
    """Write a file as its content comes, making its parents.

    Raises:
        OSError: it can't be written.
    """
    path = path_of(sandbox, path)
    append, piece = False, bytearray()

    async def put() -> None:
        result = await sandbox.slot.run(wire.WriteFile(path=path, data=bytes(piece), append=append, user=user))
        if isinstance(result, wire.OpError):
            raise file_error(result, path)
        piece.clear()

    async for chunk in content:
        piece += chunk
        if len(piece) >= PIECE_BYTES:
            await put()
            append = True
    if piece or not append:
        await put()
    return {"name": posixpath.basename(path), "type": "file", "path": path}


async def unzipped(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """What a gzip stream of one member or several holds, in pieces of bounded size.

    Raises:
        RpcError: it is none.
    """
    stream = zlib.decompressobj(wbits=_GZIP)
    try:
        async for chunk in content:
            while chunk:
                if stream.eof:
                    stream = zlib.decompressobj(wbits=_GZIP)
                yield stream.decompress(chunk, PIECE_BYTES)
                chunk = stream.unconsumed_tail or stream.unused_data  # noqa: PLW2901
        yield stream.flush()
        if not stream.eof:
            raise RpcError("invalid_argument", "the body is cut off: its gzip stream has no end")
    except zlib.error as error:
        raise RpcError("invalid_argument", f"the body is no gzip: {error}") from None


async def write_parts(
    sandbox: E2bSandbox, content_type: str, body: AsyncIterator[bytes], path: str | None, user: str | None
) -> list[Json]:
    """Write the files of a multipart body as it comes: each at its filename, or at `path`.

    Raises:
        OSError: one can't be written.
        RpcError: the body is no multipart form, or a part of it has no name to be written at.
    """
    parts = _parts(content_type, body)
    written: list[Json] = []
    async for name in parts:
        if isinstance(name, str):
            if not (target := path or name):
                raise RpcError("invalid_argument", "a part of the form has no filename")
            written.append(await write(sandbox, target, _content(parts), user))
    return written


async def _content(parts: AsyncIterator[PartPiece]) -> AsyncGenerator[bytes]:
    """What the part holds that has just begun."""
    async for piece in parts:
        if piece is None:
            return
        if isinstance(piece, bytes):
            yield piece
    raise RpcError("invalid_argument", "the body ends within a file")


async def _parts(content_type: str, body: AsyncIterable[bytes]) -> AsyncGenerator[PartPiece]:
    """Of each part of a multipart body what `PartPiece` says."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise RpcError("invalid_argument", "the body is neither application/octet-stream nor multipart/form-data")
    reader = _PartReader(boundary)
    async for chunk in body:
        try:
            pieces = reader.read(chunk)
        except ValueError as error:
            raise RpcError("invalid_argument", f"the body is no multipart form: {error}") from None
        for piece in pieces:
            yield piece


class _PartReader:
    """A parser of multipart bodies, whose callbacks collect what it found."""

    def __init__(self, boundary: bytes) -> None:
        self._pieces: list[PartPiece] = []
        self._header, self._value, self._name = bytearray(), bytearray(), ""
        callbacks = {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": lambda: self._pieces.append(self._name),
            "on_part_data": self._part_data,
            "on_part_end": lambda: self._pieces.append(None),
        }
        self._parser = MultipartParser(boundary, callbacks)  # pyright: ignore[reportArgumentType] (a TypedDict)

    def read(self, chunk: bytes) -> list[PartPiece]:
        """What the next piece of the body holds.

        Raises:
            ValueError: it belongs to no multipart body.
        """
        self._pieces = []
        self._parser.write(chunk)
        return self._pieces

    def _part_begin(self) -> None:
        self._name = ""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def _header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            options = parse_options_header(bytes(self._value))[1]
            self._name = options.get(b"filename", b"").decode("utf-8", "replace").replace("%22", '"')
        self._header.clear()
        self._value.clear()
