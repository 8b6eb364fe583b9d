"""The client of one sandbox server: leases over HTTP, calls over one stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Self, TypeVar

import aiohttp

from atropos import tracing
from atropos.aio import Tasks, backoff_s, outlive
from atropos.errors import (
    BackendUnavailable,
    ImageUnavailable,
    LeaseExpired,
    PoolFull,
    SandboxError,
    SlotLost,
    from_code,
)
from atropos.resources import Resources
from atropos.slots.client.call_stream import CallStream, FrameLimit, StreamEvents
from atropos.slots.client.server_images import NO_ARCHIVES, Archive, ServerImages
from atropos.slots.client.server_requests import NotFound, ServerRequests
from atropos.wire import (
    Call,
    Capabilities,
    Lease,
    LeaseEnded,
    LeaseRequest,
    MountRequest,
    MountResult,
    Operation,
    OpResult,
    ReleaseResult,
    SnapshotInfo,
    SnapshotRequest,
    Status,
    ViewFolders,
    ViewInfo,
    ViewRequest,
)

log = logging.getLogger(__name__)
R = TypeVar("R")
CLOSE_S = 2.0
"""Longest `close` waits for what is under way."""
COPY_TRIES = 3
"""Attempts to copy a snapshot while connections break."""


class SandboxClient:
    """Talks to one container's sandbox server. Made and used within one event loop.

    Args:
        url: `http://host:port`, or `https://host:port` with a `certificate`.
        token: the server's bearer token.
        client_id: names the leases' holder; unique to the process that uses them.
        frames: most calls in a frame. No call waits on purpose to be batched: it is sent as soon as the connection can
            take it.
        on_lease_ended: called when the server ended a lease that this client holds.
        on_capacity: called with the free room when a slot came free after an acquire was refused.
        reconnect_s: how long a lost connection is tried for before the client is `lost`.
        certificate: in PEM, the only one that the server may show.
        archives: by their names, of images that only this process can read; looked up when the server needs one.

    Attributes:
        boot_id: the server's, once connected.
        images: the images of the server's host.
        lost: set when the server is gone for good: every lease is over.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        client_id: str,
        frames: FrameLimit | None = None,
        on_lease_ended: Callable[[LeaseEnded], None] | None = None,
        on_capacity: Callable[[Resources], None] | None = None,
        reconnect_s: float = 15.0,
        certificate: str | None = None,
        archives: Mapping[str, Archive] = NO_ARCHIVES,
    ) -> None:
        self._requests = ServerRequests(url, token, certificate=certificate, patience_s=reconnect_s)
        self.images = ServerImages(self._requests, archives)
        self._client_id = client_id
        self._frames = frames or FrameLimit()
        self._on_lease_ended = on_lease_ended
        self._on_capacity = on_capacity
        self._reconnect_s = reconnect_s
        self._stream: CallStream | None = None
        self._held: dict[str, Lease] = {}
        self._asking: dict[str, SandboxError | None] = {}
        """Ids of leases that are being acquired or released, and why the server has ended one meanwhile."""
        self._tasks = Tasks("sandbox client")
        # Ids of calls are unique over clients and their restarts: a journal may still know earlier ones.
        self._prefix = uuid.uuid4().hex[:12]
        self._count = itertools.count(1)
        self.boot_id: str | None = None
        self.lost = self._requests.lost

    def __repr__(self) -> str:
        new = "new" if self._stream is None else "open"
        state = "closed" if self._requests.closed else "lost" if self.lost.is_set() else new
        return f"<SandboxClient {self._requests.url} {state}, {len(self._held)} leases>"

    # ----------------------------------------------------------------------------------------------------------- life

    async def connect(self) -> None:
        """Open the stream. May be tried again after a failure.

        Raises:
            BackendUnavailable: the server can't be reached, refuses the token, or speaks another version.
        """
        if self._requests.closed:
            raise BackendUnavailable(self._requests.closed)
        session = self._requests.open()
        # An earlier attempt has come this far.
        if self._stream is not None:
            return
        events = StreamEvents(self._lease_ended, self._capacity, self._lose, self._holds, self._beat_s)
        stream = CallStream(
            session,
            f"{self._requests.url}/v1/stream",
            self._client_id,
            events,
            frames=self._frames,
            reconnect_s=self._reconnect_s,
        )
        try:
            await stream.open()
        except BaseException:
            await outlive(self._requests.close_sessions())
            raise
        self._stream = stream
        self.boot_id = stream.boot_id

    async def close(self, reason: str = "the client was closed") -> None:
        """End the stream and everything that waits on it, within `CLOSE_S` and a bit. Leases are not released.

        Args:
            reason: why; what is pending or comes later fails with it.
        """
        if self._requests.closed:
            return
        self._requests.closed = reason
        try:
            await self._tasks.settle(CLOSE_S)
            if self._stream is not None:
                await self._stream.close(reason)
        finally:
            await outlive(self._requests.close_sessions())

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
        # The lease has to belong to the client whose stream will use it.
        if request.client_id != self._client_id:
            request = request.model_copy(update={"client_id": self._client_id})
        name = request.lease_id
        if self._stream is None:
            raise BackendUnavailable("this client is not connected")
        # Not while a new connection is being made: its hello would not name this lease, and so end it.
        await self._stream.up.wait()
        self._asking[name] = None
        try:
            try:
                lease = await self._requests.ask("POST", "/v1/leases", Lease, request)
            except ImageUnavailable:  # prepared elsewhere, or removed for others since
                if request.image is None:
                    raise
                await self.images.prepare(request.image)
                lease = await self._requests.ask("POST", "/v1/leases", Lease, request)
            # Granted by a server that came after the one that the stream is connected to.
            if self.lost.is_set() or lease.boot_id != self.boot_id:
                raise SlotLost(self._requests.lost_reason or "the sandbox server was restarted meanwhile")
            # The stream has reported its end before the HTTP answer came.
            if (over := self._asking.get(name)) is not None:
                raise over
        except (PoolFull, LeaseExpired):
            raise
        except BaseException:
            # Whether it was granted is not known; by its id it can be given back without knowing.
            if not self._requests.closed and not self.lost.is_set():
                self._in_background(self._requests.ask("DELETE", f"/v1/leases/{name}", ReleaseResult))
            raise
        finally:
            self._asking.pop(name, None)
        # Together with the end of `_asking`, without an await: a hello in between would not name it.
        self._held[name] = lease
        self._stream.reschedule_heartbeat()
        return lease

    async def release(self, lease: Lease) -> ReleaseResult:
        """Give a slot back; returns when it is reset. What runs in it ends as `LeaseExpired`.

        Raises:
            SlotLost: the server is gone, and the slot with it.
            BackendUnavailable: the server could not be asked.
        """
        name = lease.lease_id
        self._held.pop(name, None)
        # Until the server confirms, a new connection must not make it end the lease by itself.
        self._asking[name] = None
        try:
            return await self._requests.ask("DELETE", f"/v1/leases/{name}?epoch={lease.epoch}", ReleaseResult)
        except LeaseExpired:
            return ReleaseResult(released=False)
        finally:
            self._asking.pop(name, None)

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
        stream = self._stream
        if stream is None or self._requests.closed:
            raise SlotLost(self._requests.closed or "this client is not connected")
        if call_id is None:
            name = f"{self._prefix}.{next(self._count)}"
        else:
            # Of this lease: the same id may be used in another one.
            name = f"{lease.lease_id}/{call_id}"
            # The wire's bound (`Call.call_id`).
            if len(name) > 200:
                name = f"{lease.lease_id}/{uuid.uuid5(uuid.NAMESPACE_OID, call_id).hex}"
        trace = tracing.traceparent()
        call = Call(call_id=name, lease_id=lease.lease_id, epoch=lease.epoch, operation=operation, traceparent=trace)
        return await stream.call(call)

    # ---------------------------------------------------------------------------------------------------- file streams

    async def put_piece(self, lease: Lease, stream: str, offset: int, piece: bytes, *, last: bool) -> None:
        """Send a piece of a stream once; one that came already is skipped there.

        Raises:
            BackendUnavailable: it may not have come as a whole: send it again.
        """
        async with self._requests.stream(lease, stream, piece, offset=offset, last=int(last)) as response:
            await response.read()

    async def get_stream(self, lease: Lease, stream: str) -> AsyncGenerator[bytes]:
        """What a stream brings, in chunks, once.

        Raises:
            BackendUnavailable: it broke off.
        """
        async with self._requests.stream(lease, stream) as response:
            async for chunk in response.content.iter_any():
                yield chunk

    # ------------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self, lease: Lease, *, beside: bool = False) -> SnapshotInfo:
        """Freeze a slot's workspace; the lease continues above it, without its background processes.

        Args:
            lease: whose workspace it is.
            beside: copy it instead, while the slot's programs run; the lease's later views start from the copy.

        Raises:
            LeaseExpired: the lease is over.
            SlotLost: the workspace was lost by the attempt, or the server is gone.
            NotSupported, PoolFull: too deep, or too many.
        """
        request = SnapshotRequest(snapshot_id=f"snap-{uuid.uuid4().hex}", beside=beside, epoch=lease.epoch)
        path = f"/v1/leases/{lease.lease_id}/snapshot"
        return await self._requests.ask(
            "POST", path, SnapshotInfo, request, patient=True
        )  # the calls before it may take long

    async def view(self, lease: Lease, folders: ViewFolders) -> ViewInfo:
        """Run a lease's later calls in a view of its slot.

        Raises:
            LeaseExpired: the lease is over.
            NotSupported: a folder can't be shown; the lease goes on as before.
            SlotLost: the server is gone.
        """
        request = ViewRequest(folders=folders, epoch=lease.epoch)
        return await self._requests.ask("POST", f"/v1/leases/{lease.lease_id}/view", ViewInfo, request, patient=True)

    async def mount(self, lease: Lease, wanted: MountRequest) -> MountResult:
        """Have a lease see what another one of its group has.

        Raises:
            LeaseExpired: one of the two is over.
            NotSupported: they are of no group, or its server can't mount there.
            SlotLost: the server is gone.
        """
        return await self._requests.ask("POST", f"/v1/leases/{lease.lease_id}/mounts", MountResult, wanted)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        """Drop a snapshot, if it is there; leases that use it keep it."""
        with contextlib.suppress(NotFound):
            await self._requests.ask("DELETE", f"/v1/snapshots/{snapshot_id}", None)

    async def copy_snapshot(self, snapshot_id: str, to: SandboxClient) -> SnapshotInfo:
        """Bring a snapshot to another server under the same id, as a zstd tar where both can, else as a plain one.

        A transfer that breaks is begun again: it may be there, and only its answer was lost.

        Raises:
            SandboxError: it is not here, doesn't fit there, or the transfer broke; nothing is left there then.
        """
        # Compressed only where both ends can: a server without zstd refuses the archive.
        both = [await client.capabilities() for client in (self, to)]
        zstd = all(each.limits.get("zstd") for each in both)
        info = await self._requests.ask("GET", f"/v1/snapshots/{snapshot_id}", SnapshotInfo)
        query = {"layers": str(info.layers), "client_id": to._client_id} | ({"base": info.base} if info.base else {})
        path, kind = f"/v1/snapshots/{snapshot_id}/archive", "application/zstd" if zstd else "application/x-tar"
        for attempt in range(COPY_TRIES):
            try:
                raw = await self._requests.pipe(f"{path}?zstd={int(zstd)}", to._requests, query, kind)
                return to._requests.parsed(SnapshotInfo, raw, path)
            except (aiohttp.ClientError, OSError) as error:
                if attempt + 1 == COPY_TRIES or self.lost.is_set() or to.lost.is_set():
                    to._in_background(to.drop_snapshot(snapshot_id))
                    raise BackendUnavailable(
                        f"the snapshot could not be copied to {to._requests.url}: {error!r}"
                    ) from error
            await asyncio.sleep(backoff_s(attempt, first_s=0.1, longest_s=1))
        raise AssertionError

    # --------------------------------------------------------------------------------------------------------- looking

    async def capabilities(self) -> Capabilities:
        """What the server's probe found."""
        return await self._requests.ask("GET", "/v1/capabilities", Capabilities)

    async def status(self) -> Status:
        """The server's own count of everything."""
        return await self._requests.ask("GET", "/v1/status", Status)

    def _in_background(self, request: Coroutine[object, object, object]) -> None:
        """Take back what is perhaps there; whether that works changes nothing."""

        async def work() -> None:
            with contextlib.suppress(SandboxError):
                await request

        self._tasks.spawn(work(), "take back")

    # ---------------------------------------------------------------------------------------- what the stream reports

    def _lease_ended(self, message: LeaseEnded) -> None:
        if message.lease_id in self._asking:
            self._asking[message.lease_id] = from_code(message.code, message.message)
        held = self._held.get(message.lease_id)
        if held is not None and held.epoch == message.epoch:
            del self._held[message.lease_id]
            self._report(self._on_lease_ended, message)

    def _capacity(self, room: Resources) -> None:
        self._report(self._on_capacity, room)

    def _report(self, callback: Callable[[R], None] | None, news: R) -> None:
        """Call the owner's callback; its failure must not end the stream."""
        if callback is not None:
            try:
                callback(news)
            except Exception:
                log.exception("a callback of %r failed", self)

    def _lose(self, reason: str) -> None:
        self._requests.lose(reason)
        # Taken out first: a callback may ask which leases are held.
        held, self._held = self._held, {}
        for lease in held.values():
            message = LeaseEnded(lease_id=lease.lease_id, epoch=lease.epoch, code=SlotLost.code, message=reason)
            self._report(self._on_lease_ended, message)

    def _holds(self) -> tuple[str, ...]:
        # Those that are being acquired as well: the server may have granted one whose answer is on its way.
        return (*self._held, *self._asking)

    def _beat_s(self) -> float:
        # Two heartbeats may be lost before the shortest lease ends.
        return min((lease.ttl_s for lease in self._held.values()), default=86_400.0) / 3
