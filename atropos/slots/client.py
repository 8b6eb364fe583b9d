"""The client of one sandbox server: leases over HTTP, calls over one stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, SecretStr, ValidationError

from atropos.errors import (
    BackendUnavailable,
    ImageUnavailable,
    LeaseExpired,
    NotSupported,
    PoolFull,
    SandboxError,
    SlotLost,
    from_code,
)
from atropos.net.tls import client_context
from atropos.slots.call_stream import CallStream, ClientRefused, FrameLimit, StreamEvents
from atropos.wire import (
    Call,
    Capabilities,
    Health,
    ImageInfo,
    ImageRequest,
    ImageState,
    KeepRequest,
    Lease,
    LeaseEnded,
    LeaseRequest,
    Operation,
    OpResult,
    Problem,
    ReleaseResult,
    SnapshotInfo,
    SnapshotRequest,
    Status,
    ViewRequest,
)

log = logging.getLogger(__name__)
T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")
REQUEST_S = 60.0
"""Longest one HTTP request may take: a lease may wait for its sandbox, a release for its reset."""
MAX_REQUESTS = 100
"""HTTP requests under way at once; more wait for these."""
CONNECT_S = 5.0
CLOSE_S = 2.0
"""Longest `close` waits for what is under way."""
COPY_TRIES = 3
"""Attempts to copy a snapshot while connections break."""
SLICE_BYTES = 1 << 18
MAX_ENDED = 10_000
"""Leases remembered as over, so that a late call is refused without asking."""


class SandboxClient:
    """Talks to one container's sandbox server. Made and used within one event loop.

    Args:
        url: `http://host:port`, or `https://host:port` with a `certificate`.
        token: the server's bearer token.
        client_id: names the leases' holder; unique to the process that uses them.
        frames: most calls in a frame. No call waits on purpose to be batched: it is sent as soon as the connection can
            take it.
        on_lease_ended: called when the server ended a lease that this client holds.
        on_capacity: called with the number of free slots when one came free after an acquire was refused.
        reconnect_s: how long a lost connection is tried for before the client is `lost`.
        certificate: in PEM, the only one that the server may show.

    Attributes:
        boot_id: the server's, once connected.
        lost: set when the server is gone for good: every lease is over.
    """

    def __init__(
        self,
        url: str,
        token: str | SecretStr,
        *,
        client_id: str,
        frames: FrameLimit | None = None,
        on_lease_ended: Callable[[LeaseEnded], None] | None = None,
        on_capacity: Callable[[int], None] | None = None,
        reconnect_s: float = 15.0,
        certificate: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token.get_secret_value() if isinstance(token, SecretStr) else token
        self._client_id = client_id
        self._frames = frames or FrameLimit()
        self._on_lease_ended = on_lease_ended
        self._on_capacity = on_capacity
        self._reconnect_s = reconnect_s
        self._tls = True if certificate is None else client_context(certificate)
        self._session: aiohttp.ClientSession | None = None
        self._stream_session: aiohttp.ClientSession | None = None
        self._stream: CallStream | None = None
        self._held: dict[str, Lease] = {}
        self._asking: set[str] = set()
        self._archives: dict[str, Callable[[], AsyncIterator[bytes]]] = {}
        self._ended: OrderedDict[str, SandboxError] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prefix = uuid.uuid4().hex[:12]
        self._count = itertools.count(1)
        self._closed = False
        self.boot_id: str | None = None
        self.lost = asyncio.Event()
        self.lost_reason = ""

    def __repr__(self) -> str:
        stream = self._stream
        state = "closed" if self._closed else "lost" if self.lost.is_set() else "new" if stream is None else "open"
        return f"<SandboxClient {self._url} {state}, {len(self._held)} leases>"

    # ----------------------------------------------------------------------------------------------------------- life

    async def connect(self) -> None:
        """Open the stream. May be tried again after a failure.

        Raises:
            BackendUnavailable: the server can't be reached, refuses the token, or speaks another version.
        """
        if self._closed:
            raise BackendUnavailable("this client is closed")
        if self._session is None:
            self._session = self._new_session(MAX_REQUESTS)
            # Connections of its own: requests that wait must not keep a stream that broke from coming back.
            self._stream_session = self._new_session(0)
        if self._stream is not None:
            return
        assert self._stream_session is not None
        events = StreamEvents(self._lease_ended, self._capacity, self._lose, self._holds, self._beat_s)
        stream = CallStream(
            self._stream_session,
            f"{self._url}/v1/stream",
            self._client_id,
            events,
            frames=self._frames,
            reconnect_s=self._reconnect_s,
        )
        try:
            await stream.open()
        except BaseException:
            if not self._tasks:
                await self._close_session()
            raise
        self._stream = stream
        self.boot_id = stream.boot_id

    async def close(self) -> None:
        """End the stream and everything that waits on it, within `CLOSE_S` and a bit. Leases are not released."""
        if self._closed:
            return
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._stream is not None:
            await self._stream.close("the client was closed")
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        await self._close_session()

    def _new_session(self, limit: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=60, ssl=self._tls),
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S),
            auto_decompress=False,
        )

    async def _close_session(self) -> None:
        sessions, self._session, self._stream_session = (self._session, self._stream_session), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --------------------------------------------------------------------------------------------------------- leasing

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Lease a slot; asking again with the same `lease_id` gives the same lease. Cancelled, it leaks nothing.

        Raises:
            PoolFull: no slot is free there now.
            NotSupported: the server doesn't do what is asked for.
            SlotLost: the server is gone.
            BackendUnavailable: it could not be asked, or gives no leases.
        """
        if request.client_id != self._client_id:
            request = request.model_copy(update={"client_id": self._client_id})
        name = request.lease_id
        if self._stream is None:
            raise BackendUnavailable("this client is not connected")
        # Not while a new connection is being made: its hello would not name this lease, and so end it.
        await self._stream.up.wait()
        self._asking.add(name)
        self._ended.pop(name, None)
        try:
            try:
                lease = await self._ask("POST", "/v1/leases", Lease, request)
            except ImageUnavailable:  # prepared elsewhere, or removed for others since
                if request.image is None:
                    raise
                await self.prepare(request.image)
                lease = await self._ask("POST", "/v1/leases", Lease, request)
            if self.lost.is_set() or lease.boot_id != self.boot_id:
                raise SlotLost(self.lost_reason or "the sandbox server was restarted meanwhile")
            if (over := self._ended.get(name)) is not None:
                raise over
        except (PoolFull, LeaseExpired):
            raise
        except BaseException:
            # Whether it was granted is not known; by its id it can be given back without knowing.
            self._give_back(name)
            raise
        finally:
            self._asking.discard(name)
        self._held[name] = lease
        self._stream.beat_soon()
        return lease

    def _give_back(self, lease_id: str) -> None:
        if self._closed or self.lost.is_set():
            return

        async def work() -> None:
            with contextlib.suppress(SandboxError):
                await self._ask("DELETE", f"/v1/leases/{lease_id}", ReleaseResult)

        self._spawn(work())

    async def release(self, lease: Lease) -> ReleaseResult:
        """Give a slot back; returns when it is reset. What runs in it ends as `LeaseExpired`.

        Raises:
            SlotLost: the server is gone, and the slot with it.
            BackendUnavailable: the server could not be asked.
        """
        name = lease.lease_id
        self._held.pop(name, None)
        self._end(name, LeaseExpired(f"lease {name} was released"))
        self._asking.add(name)  # until the server confirms, a new connection must not make it end the lease by itself
        try:
            return await self._ask("DELETE", f"/v1/leases/{name}?epoch={lease.epoch}", ReleaseResult)
        except LeaseExpired:
            return ReleaseResult(released=False)
        finally:
            self._asking.discard(name)

    async def renew(self, lease: Lease) -> Lease:
        """Renew one lease by hand; the stream's heartbeats do it for all."""
        return await self._ask("POST", f"/v1/leases/{lease.lease_id}/renew?epoch={lease.epoch}", Lease)

    # ----------------------------------------------------------------------------------------------------------- calls

    async def call(self, lease: Lease, operation: Operation, *, call_id: str | None = None) -> OpResult:
        """Run one operation in a leased slot; calls of one lease run in the order given.

        Args:
            lease: where.
            operation: what.
            call_id: the idempotency key within the lease; None: a new one. While a call of this id runs, the same call
                again waits for the same result; afterwards it ends as `OutcomeUnknown` and is not run again.

        Raises:
            LeaseExpired: the lease is over; the call was not run, or was ended with it.
            SlotLost: the slot is gone; the call was not run, or its effects are gone too.
            OutcomeUnknown: it may have run; it was not run again.
        """
        over = self._ended.get(lease.lease_id)
        if over is not None:
            raise type(over)(*over.args)
        stream = self._stream
        if stream is None or self._closed:
            raise SlotLost("this client is closed" if self._closed else "this client is not connected")
        if call_id is None:
            name = f"{self._prefix}.{next(self._count)}"
        else:
            name = f"{lease.lease_id}/{call_id}"
            if len(name) > 200:
                name = f"{lease.lease_id}/{uuid.uuid5(uuid.NAMESPACE_OID, call_id).hex}"
        call = Call(call_id=name, lease_id=lease.lease_id, epoch=lease.epoch, operation=operation)
        return await stream.call(call)

    # ---------------------------------------------------------------------------------------------------- file streams

    async def put_piece(self, lease: Lease, stream: str, offset: int, piece: bytes, *, last: bool) -> None:
        """Send a piece of a stream once; one that came already is skipped there.

        Raises:
            BackendUnavailable: it may not have come as a whole: send it again.
        """
        query = {"epoch": str(lease.epoch), "offset": str(offset), "last": str(int(last))}
        length = {"Content-Length": str(len(piece))}
        async with self._file_stream(
            "PUT", lease, stream, params=query, data=_slices(piece), headers=length
        ) as response:
            await response.read()

    async def get_stream(self, lease: Lease, stream: str) -> AsyncGenerator[bytes]:
        """What a stream brings, in chunks, once.

        Raises:
            BackendUnavailable: it broke off.
        """
        async with self._file_stream("GET", lease, stream, params={"epoch": str(lease.epoch)}) as response:
            async for chunk in response.content.iter_any():
                yield chunk

    @contextlib.asynccontextmanager
    async def _file_stream(
        self, method: str, lease: Lease, stream: str, **arguments: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        # not of the session for short requests, whose connections are counted: these may wait for one another
        if self._stream_session is None:
            raise BackendUnavailable("this client is not connected")
        url = f"{self._url}/v1/leases/{lease.lease_id}/streams/{stream}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=REQUEST_S)
        try:
            async with self._stream_session.request(method, url, timeout=timeout, **arguments) as response:
                if response.status != 200:
                    raise BackendUnavailable(str(_problem(response.status, await response.read())))
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"stream {stream} of {self._url} broke off: {error!r}") from error

    # ------------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self, lease: Lease) -> SnapshotInfo:
        """Freeze a slot's workspace; the lease goes on above it, without its background processes.

        Raises:
            LeaseExpired: the lease is over.
            SlotLost: the workspace was lost by the attempt, or the server is gone.
            NotSupported, PoolFull: too deep, or too many.
        """
        request = SnapshotRequest(snapshot_id=f"snap-{uuid.uuid4().hex}", epoch=lease.epoch)
        path = f"/v1/leases/{lease.lease_id}/snapshot"
        return await self._ask("POST", path, SnapshotInfo, request, patient=True)  # the calls before it may take long

    async def keep(self, snapshot_id: str, key: str) -> ImageInfo:
        """Keep a snapshot as an image of the server's host, named `atropos-build:KEY`.

        Raises:
            ImageUnavailable: there is no room.
            NotSupported: it has several layers.
        """
        path = f"/v1/snapshots/{snapshot_id}/image"
        return await self._ask("POST", path, ImageInfo, KeepRequest(key=key), patient=True)

    async def find_image(self, source: str) -> ImageInfo | None:
        """What a source means on the server's host, where that is known without preparing anything.

        Args:
            source: of the server's own: `atropos-base:NAME` or `atropos-build:KEY`.
        """
        try:
            return (await self._ask("POST", "/v1/images", ImageState, ImageRequest(source=source))).image
        except (NotSupported, ImageUnavailable):
            return None

    async def view(self, lease: Lease, folders: Sequence[str]) -> None:
        """Run a lease's later calls in a view of its slot.

        Raises:
            LeaseExpired: the lease is over.
            NotSupported: a folder can't be shown; the lease goes on as before.
            SlotLost: the server is gone.
        """
        request = ViewRequest(folders=tuple(folders), epoch=lease.epoch)
        await self._ask("POST", f"/v1/leases/{lease.lease_id}/view", Lease, request, patient=True)

    async def copy_image(self, image: ImageInfo, to: SandboxClient) -> ImageInfo:
        """Bring a built image, whose parent is there already, to another server.

        Raises:
            SandboxError: it is not here, doesn't fit there, or the transfer broke; nothing is left there then.
        """
        query = {
            "parent": image.parent or "",
            "parent_source": image.parent_source or "",
            "bytes": str(image.bytes),
        }
        raw = await self._piped(f"/v1/images/{image.id}/layer", to, query, "application/x-tar")
        return ImageInfo.model_validate_json(raw)

    async def prepare(
        self,
        source: str,
        *,
        progress: Callable[[ImageState], None] | None = None,
        archive: Callable[[], AsyncIterator[bytes]] | None = None,
    ) -> ImageInfo:
        """Have the server pull and unpack an image, unless its host has it.

        Args:
            source: where it comes from; see `atropos.images.reference`.
            progress: called with each state that the server reports.
            archive: makes the stream of an archive's bytes, for a source that only this process can read.

        Raises:
            ImageUnavailable: it can't be prepared; the message names the phase and the cause.
        """
        if archive is not None:
            self._archives[source] = archive  # the server may remove the image, and a later lease ask for it again
        try:
            state = await self._ask("POST", "/v1/images", ImageState, ImageRequest(source=source))
        except NotSupported:
            if source not in self._archives:
                raise
            state = await self._send_image(source, self._archives[source]())
        while state.phase not in {"ready", "failed"}:
            if progress is not None:
                progress(state)
            wanted = ImageRequest(source=source, wait_s=1 if progress else 20)
            state = await self._ask("POST", "/v1/images", ImageState, wanted, patient=True)
        if progress is not None:
            progress(state)
        if state.image is None:
            raise ImageUnavailable(state.error)
        return state.image

    async def _send_image(self, source: str, chunks: AsyncIterator[bytes]) -> ImageState:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=None)
        path = f"{self._url}/v1/images/archive"
        try:
            async with self._session.put(path, params={"source": source}, data=chunks, timeout=timeout) as response:
                raw = await response.read()
                if response.status != 200:
                    raise _problem(response.status, raw)
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"image {source} could not be sent to {self._url}: {error!r}") from error
        return ImageState.model_validate_json(raw)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot; leases that stand on it go on. One that is not there is as good as dropped."""
        with contextlib.suppress(_NotFound):
            await self._ask("DELETE", f"/v1/snapshots/{snapshot_id}", None)

    async def _forget(self, snapshot_id: str) -> None:
        with contextlib.suppress(SandboxError):
            await self.drop_snapshot(snapshot_id)

    async def copy_snapshot(self, snapshot_id: str, to: SandboxClient) -> SnapshotInfo:
        """Bring a snapshot to another server under the same id, as a zstd tar where both can, else as a plain one.

        A transfer that breaks is begun again: it may be there, and only its answer was lost.

        Raises:
            SandboxError: it is not here, doesn't fit there, or the transfer broke; nothing is left there then.
        """
        both = [await client.capabilities() for client in (self, to)]
        zstd = all(each.limits.get("zstd") for each in both)
        info = await self._ask("GET", f"/v1/snapshots/{snapshot_id}", SnapshotInfo)
        query = {"layers": str(info.layers), "client_id": to._client_id} | ({"base": info.base} if info.base else {})
        for attempt in range(COPY_TRIES):
            try:
                return await self._copy_once(snapshot_id, to, query, zstd=zstd)
            except (aiohttp.ClientError, OSError) as error:
                if attempt + 1 == COPY_TRIES or self.lost.is_set() or to.lost.is_set():
                    to._spawn(to._forget(snapshot_id))
                    raise BackendUnavailable(f"the snapshot could not be copied to {to._url}: {error!r}") from error
            await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError

    async def _copy_once(
        self, snapshot_id: str, to: SandboxClient, query: dict[str, str], *, zstd: bool
    ) -> SnapshotInfo:
        kind = "application/zstd" if zstd else "application/x-tar"
        raw = await self._piped(f"/v1/snapshots/{snapshot_id}/archive?zstd={int(zstd)}", to, query, kind)
        return SnapshotInfo.model_validate_json(raw)

    async def _piped(self, path: str, to: SandboxClient, query: dict[str, str], kind: str) -> bytes:
        """What one server gives at a path is put at the same path of another one. Returns the answer."""
        source, target = self._session, to._session
        if source is None or target is None:
            raise BackendUnavailable("this client is not connected")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=REQUEST_S)
        async with source.get(f"{self._url}{path}", timeout=timeout) as archive:
            if archive.status != 200:
                raise _problem(archive.status, await archive.read())
            put = target.put(
                to._url + path.partition("?")[0],
                params=query,
                data=archive.content.iter_chunked(1 << 18),
                headers={"Content-Type": kind},
                timeout=timeout,
            )
            async with put as response:
                raw = await response.read()
                if response.status != 200:
                    raise _problem(response.status, raw)
                return raw

    # --------------------------------------------------------------------------------------------------------- looking

    async def capabilities(self) -> Capabilities:
        """What the server's probe found."""
        return await self._ask("GET", "/v1/capabilities", Capabilities)

    async def status(self) -> Status:
        """The server's own count of everything."""
        return await self._ask("GET", "/v1/status", Status)

    async def health(self) -> Health:
        """Whether the server is well; `broken` too is an answer."""
        return await self._ask("GET", "/v1/health", Health)

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _ask(
        self, method: str, path: str, kind: type[T] | None, body: BaseModel | None = None, *, patient: bool = False
    ) -> T:
        """One request, repeated while the connection fails: everything asked for here may be asked twice.

        A `patient` one is asked again when its answer takes longer than a request may take.
        """
        pause = 0.02
        patience_s = self._reconnect_s if method != "GET" else 1.0
        until: float | None = None
        while True:
            if self.lost.is_set():
                raise SlotLost(self.lost_reason)
            if self._session is None:
                raise BackendUnavailable("this client is closed" if self._closed else "this client is not connected")
            try:
                return await self._ask_once(method, path, kind, body)
            except TimeoutError as error:
                if not patient:
                    raise BackendUnavailable(f"{self._url}{path} did not answer within {REQUEST_S:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                # From the first failure on: an answer that took long to come, and was cut off, is asked for again as well.
                until = until or time.monotonic() + patience_s
                if time.monotonic() + pause > until:
                    raise BackendUnavailable(f"{self._url} can't be reached: {error}") from error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.5, 1)):
                    await self.lost.wait()
            pause = min(pause * 2, 1.0)

    async def _ask_once(self, method: str, path: str, kind: type[T] | None, body: BaseModel | None) -> T:
        assert self._session is not None
        data = None if body is None else body.__pydantic_serializer__.to_json(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
            raw = await response.read()
            if response.status >= 300 and not (kind is Health and response.status == 503):
                raise _problem(response.status, raw)
        try:
            return kind.model_validate_json(raw) if kind is not None else None  # pyright: ignore[reportReturnType]
        except ValidationError as error:
            raise BackendUnavailable(f"{self._url}{path} answered nonsense: {error.errors()[:1]}") from None

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, lease_id: str, error: SandboxError) -> None:
        self._ended[lease_id] = error
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    # ---------------------------------------------------------------------------------------- what the stream reports

    def _lease_ended(self, message: LeaseEnded) -> None:
        if message.lease_id in self._asking:
            self._end(message.lease_id, from_code(message.code, message.message))
        held = self._held.get(message.lease_id)
        if held is None or held.epoch != message.epoch:
            return
        del self._held[message.lease_id]
        self._end(message.lease_id, from_code(message.code, message.message))
        self._report(self._on_lease_ended, message)

    def _capacity(self, free: int) -> None:
        self._report(self._on_capacity, free)

    def _report(self, callback: Callable[[R], None] | None, news: R) -> None:
        """Tell the owner; its mistakes must not end the stream."""
        if callback is not None:
            try:
                callback(news)
            except Exception:
                log.exception("a callback of %r failed", self)

    def _lose(self, reason: str) -> None:
        self.lost_reason = reason
        self.lost.set()
        held, self._held = self._held, {}
        for lease in held.values():
            self._end(lease.lease_id, SlotLost(reason))
            message = LeaseEnded(lease_id=lease.lease_id, epoch=lease.epoch, code=SlotLost.code, message=reason)
            self._report(self._on_lease_ended, message)

    def _holds(self) -> tuple[str, ...]:
        return (*self._held, *self._asking)

    def _beat_s(self) -> float:
        return min((lease.ttl_s for lease in self._held.values()), default=86_400.0) / 3


async def _slices(piece: bytes) -> AsyncGenerator[memoryview]:
    """A body in parts, so that the loop does other things between them."""
    view = memoryview(piece)
    for start in range(0, len(piece), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]


class _NotFound(SandboxError):
    """404: what was meant isn't there."""

    code = "not_found"
    retryable = False


def _problem(status: int, raw: bytes) -> SandboxError:
    """The exception that an HTTP refusal stands for."""
    try:
        found = Problem.model_validate_json(raw)
    except ValidationError:
        return BackendUnavailable(f"the server answered {status}: {raw[:200]!r}")
    if status == 401:
        return ClientRefused("the server refuses the token")
    if status == 404:
        return _NotFound(found.message)
    if found.code == PoolFull.code:
        return PoolFull(found.message, free_mib=found.free_mib or 0)
    return from_code(found.code, found.message)
