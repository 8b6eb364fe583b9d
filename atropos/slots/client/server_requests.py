"""HTTP requests to one sandbox server: sessions, tries again, and what refusals stand for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from atropos.aio import Backoff, set_within
from atropos.errors import BackendUnavailable, ConfigError, PoolFull, SandboxError, SlotLost, from_code
from atropos.net.tls import client_context
from atropos.resources import NOTHING
from atropos.slots.client.call_stream import CONNECT_S, PAUSE_S, ClientRefused
from atropos.wire import Lease, Problem

T = TypeVar("T", bound=BaseModel)
REQUEST_S = 60.0
"""Longest one HTTP request may take: a lease may wait for its sandbox, a release for its reset."""
MAX_REQUESTS = 100
"""HTTP requests under way at once; more wait for these."""
SLICE_BYTES = 1 << 18
"""Part of a body that the loop handles at once."""


class NotFound(SandboxError):
    """404: what was meant isn't there."""

    code = "not_found"
    retryable = False


class ServerRequests:
    """One server's HTTP API, with the token and the certificate that it wants.

    Args:
        url: `http://host:port`, or `https://host:port` with a `certificate`.
        token: the server's bearer token.
        certificate: in PEM, the only one that the server may show.
        patience_s: how long a request is tried again while connections fail.

    Attributes:
        lost: set when the server is gone for good: no request is sent any more.
        closed: why no request is sent any more; empty until then.
    """

    def __init__(self, url: str, token: str, *, certificate: str | None, patience_s: float) -> None:
        self.url = url.rstrip("/")
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self.closed = ""
        self._token = token
        self._tls = True if certificate is None else client_context(certificate)
        self._patience_s = patience_s
        self._short: aiohttp.ClientSession | None = None
        self._long: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        """Make the sessions, unless they are there. Returns the one for streams, whose requests are not counted."""
        if self._short is None or self._long is None:
            self._short = self._new_session(MAX_REQUESTS)
            # Connections of its own: requests that wait must not keep a stream that broke from coming back.
            self._long = self._new_session(0)
        return self._long

    def lose(self, reason: str) -> None:
        """Mark the server as lost."""
        self.lost_reason = reason
        self.lost.set()

    async def close_sessions(self) -> None:
        """Close the connections; `open` makes new ones."""
        sessions, self._short, self._long = (self._short, self._long), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    def _connected(self) -> aiohttp.ClientSession:
        if self._short is None:
            raise BackendUnavailable(self.closed or "this client is not connected")
        return self._short

    def _new_session(self, limit: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=60, ssl=self._tls),
            headers={"Authorization": f"Bearer {self._token}"},
            # `total` for all but streams: a server that accepts and never answers must not hold a caller for ever.
            timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S),
            auto_decompress=False,
        )

    @contextlib.asynccontextmanager
    async def stream(
        self, lease: Lease, stream: str, piece: bytes | None = None, **query: int
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The answer to a request that carries a file's bytes: a piece of them is sent, or all of them come.

        Raises:
            BackendUnavailable: it broke off, or was refused.
        """
        # not of the session for short requests, whose connections are counted: these may wait for one another
        if self._long is None:
            raise BackendUnavailable("this client is not connected")
        url = f"{self.url}/v1/leases/{lease.lease_id}/streams/{stream}"
        params = {"epoch": lease.epoch, **query}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=REQUEST_S)
        if piece is None:
            asking = self._long.get(url, params=params, timeout=timeout)
        else:
            length = {"Content-Length": str(len(piece))}
            asking = self._long.put(url, params=params, timeout=timeout, data=_slices(piece), headers=length)
        try:
            async with asking as response:
                try:
                    await _check(response)
                except SandboxError as error:
                    # Whatever was refused, the stream's call says why; here it is only that no bytes moved.
                    raise BackendUnavailable(str(error)) from None
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"stream {stream} of {self.url} broke off: {error!r}") from error

    async def put(self, path: str, query: dict[str, str], chunks: AsyncIterator[bytes]) -> bytes:
        """Send a body of any length, once. Returns the answer.

        Raises:
            SandboxError: it was refused, or broke off.
            ConfigError: raised by `chunks`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=None)
        try:
            async with self._connected().put(self.url + path, params=query, data=chunks, timeout=timeout) as response:
                await _check(response)
                return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            # aiohttp wraps what the body's iterator raises.
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise BackendUnavailable(f"{query} could not be sent to {self.url}: {error!r}") from error

    async def pipe(self, path: str, to: ServerRequests, query: dict[str, str], kind: str) -> bytes:
        """What one server gives at a path is put at the same path of another one. Returns the answer.

        Raises:
            SandboxError: one of the two refused.
            aiohttp.ClientError, OSError: it broke off.
        """
        source, target = self._connected(), to._connected()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=REQUEST_S)
        async with source.get(f"{self.url}{path}", timeout=timeout) as archive:
            await _check(archive)
            put = target.put(
                to.url + path.partition("?")[0],
                params=query,
                data=archive.content.iter_chunked(SLICE_BYTES),
                headers={"Content-Type": kind},
                timeout=timeout,
            )
            async with put as response:
                await _check(response)
                return await response.read()

    async def ask(
        self, method: str, path: str, kind: type[T] | None, body: BaseModel | None = None, *, patient: bool = False
    ) -> T:
        """One request, repeated while the connection fails: everything asked for here may be asked twice.

        A `patient` one is asked again when its answer takes longer than a request may take.

        Raises:
            SandboxError: it was refused, or the server can't be reached or is lost.
        """
        backoff = Backoff(*PAUSE_S)
        # Who only looks can be told soon that there is nothing to see.
        patience_s = self._patience_s if method != "GET" else 1.0
        until: float | None = None
        while True:
            # Taken before the attempt, so that it is known whether another one still fits in.
            pause = backoff.failed()
            if self.lost.is_set():
                raise SlotLost(self.lost_reason)
            try:
                return await self._ask_once(method, path, kind, body)
            except TimeoutError as error:
                if not patient:
                    if isinstance(error, aiohttp.ServerTimeoutError):  # no connection within CONNECT_S
                        raise BackendUnavailable(f"{self.url} can't be reached: {error}") from error
                    raise BackendUnavailable(f"{self.url}{path} did not answer within {REQUEST_S:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                # From the first failure on: an answer that took long to come, and was cut off, is asked for again as
                # well.
                until = until or time.monotonic() + patience_s
                if time.monotonic() + pause > until:
                    raise BackendUnavailable(f"{self.url} can't be reached: {error}") from error
            # Woken by the loss: no request waits for its pause then.
            await set_within(self.lost, pause)

    async def _ask_once(self, method: str, path: str, kind: type[T] | None, body: BaseModel | None) -> T:
        data = None if body is None else body.__pydantic_serializer__.to_json(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        async with self._connected().request(method, self.url + path, data=data, headers=headers) as response:
            await _check(response)
            raw = await response.read()
        return self.parsed(kind, raw, path) if kind is not None else None  # pyright: ignore[reportReturnType]

    def parsed(self, kind: type[T], raw: bytes, path: str) -> T:
        """What the server answered at a path.

        Raises:
            BackendUnavailable: something else than an answer of this kind.
        """
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            raise BackendUnavailable(f"{self.url}{path} sent an invalid answer: {error.errors()[:1]}") from None


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise what a refusal stands for."""
    if response.status < 300:
        return
    raw = await response.read()
    try:
        problem = Problem.model_validate_json(raw)
    except ValidationError:
        raise BackendUnavailable(f"the server answered {response.status}: {raw[:200]!r}") from None
    if response.status == 401:
        raise ClientRefused("the server refuses the token")
    if response.status == 404:
        raise NotFound(problem.message)
    if problem.code == PoolFull.code:
        raise PoolFull(problem.message, room=problem.room or NOTHING)
    raise from_code(problem.code, problem.message)


async def _slices(piece: bytes) -> AsyncGenerator[memoryview]:
    """A body in parts, so that the loop does other things between them."""
    view = memoryview(piece)
    for start in range(0, len(piece), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]
