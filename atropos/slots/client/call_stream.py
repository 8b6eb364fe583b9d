"""A client's stream to one sandbox server: calls out, answers in, kept up across lost connections.

Batching is adaptive: the sender writes queued calls as soon as it can, and calls that come while it writes go into the
next frame. After a lost connection the unanswered calls are sent again under their ids, marked `resent`; the server's
journal makes that safe. The stream is lost for good when the server has another `boot_id`, refuses the token, or can't
be reached for `reconnect_s`: then calls that were sent end as `OutcomeUnknown` and the others as `SlotLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from pydantic import ValidationError

from atropos import tracing
from atropos.aio import Backoff, Tasks, race, receive_small, set_within
from atropos.errors import BackendUnavailable, OutcomeUnknown, SandboxError, SlotLost, from_code
from atropos.net import web_socket
from atropos.resources import Resources
from atropos.slots.client.acknowledgements import Acknowledgements
from atropos.wire import (
    MAX_FRAME_BYTES,
    SERVER_FRAME,
    VERSION,
    Ack,
    Call,
    Cancel,
    Capacity,
    Draining,
    Fault,
    Heartbeat,
    Hello,
    LeaseEnded,
    OpError,
    OpResult,
    Reply,
    ServerMessage,
    Welcome,
)

log = logging.getLogger(__name__)
CONNECT_S = 5.0
"""Longest one attempt to connect may take, up to the server's welcome."""
PAUSE_S = (0.02, 1.0)
"""First and longest pause between attempts; each is drawn from half to all of it."""
SILENT_BEATS = 3
"""A connection that was silent for this many heartbeats is dead."""
MAX_PENDING = 20_000
"""Calls that may wait for their answers; one more is refused. The server's own bound is the same."""
MAX_CANCELS = 4096
"""Cancelled calls remembered until the server answered them."""
LARGE_FRAME = 65_536
"""A frame of answers beyond this is acknowledged at once."""
# By it the server tells a newer connection from an older one. From the clock, which no program of this boot repeats: a
# restarted one may have the same client_id.
_numbers = itertools.count(time.monotonic_ns())


@dataclass(slots=True)
class FrameLimit:
    """The most messages in a frame; one for all streams of a pool, read for each frame."""

    max_calls: int = 200


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call without an answer. `encoded` is dropped once it was sent."""

    call: Call
    encoded: bytes | None
    sent: bool = False
    over: bool = False
    waiters: list[asyncio.Future[OpResult]] = field(default_factory=list["asyncio.Future[OpResult]"])


@dataclass(frozen=True, slots=True)
class StreamEvents:
    """What the stream reports, each called on the loop.

    Attributes:
        lease_ended: the server ended a lease.
        capacity: a slot came free.
        lost: the stream is lost for good, with the reason; after it no call is answered.
        holds: the lease ids that the client holds or asks for right now.
        beat_s: the longest pause between signs of life that its leases allow, in seconds.
    """

    lease_ended: Callable[[LeaseEnded], None]
    capacity: Callable[[Resources], None]
    lost: Callable[[str], None]
    holds: Callable[[], tuple[str, ...]]
    beat_s: Callable[[], float]


class ClientRefused(BackendUnavailable):
    """The server can be reached and will never accept this client."""

    retryable = False


class CallStream:
    """See the module. The session that makes the connections carries the token."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        client_id: str,
        events: StreamEvents,
        *,
        frames: FrameLimit,
        reconnect_s: float,
    ) -> None:
        self._session = session
        self._url = url
        self._client_id = client_id
        self._events = events
        self._frames = frames
        self._reconnect_s = reconnect_s
        self._pending: dict[str, PendingCall] = {}
        self._cancels: dict[str, None] = {}
        self._acks = Acknowledgements()
        self._out: deque[PendingCall | Cancel | Heartbeat] = deque()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._wake = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._heard_at = 0.0
        self._heartbeat_s = 5.0
        self._tasks = Tasks(f"stream {url}")
        self.boot_id: str | None = None
        self.draining = False
        self.up = asyncio.Event()
        """Set while connected, and permanently once lost, so that its waiters wake and see why."""
        self.gone: str | None = None

    # ---------------------------------------------------------------------------------------------------------- calls

    async def call(self, call: Call) -> OpResult:
        """Run one call. Cancelling the awaiting task cancels it on the server.

        Raises:
            SandboxError: of the kind that the server's fault, or the lost stream, stands for.
        """
        waiter: asyncio.Future[OpResult] = asyncio.get_running_loop().create_future()
        pending = self._pending.get(call.call_id)
        try:
            # The same id again while it runs: both wait for the one answer.
            if pending is not None:
                pending.waiters.append(waiter)
            elif (refused := self._queue(call, waiter)) is not None:
                return refused
            return await waiter
        except BaseException:  # a cancellation; or a signal's handler raised, at any line
            self._give_up(call.call_id, waiter)
            raise

    def _queue(self, call: Call, waiter: asyncio.Future[OpResult]) -> OpError | None:
        if self.gone is not None:
            raise SlotLost(self.gone)
        if len(self._pending) >= MAX_PENDING:
            raise SandboxError(f"{MAX_PENDING} calls wait for their answers; this one was not sent")
        try:
            # Here, and not when it is sent: a call that can't be encoded is the caller's to hear of.
            encoded = call.__pydantic_serializer__.to_json(call)
        except ValueError as error:  # a lone surrogate in a string: not Unicode, so nothing a program could receive
            return OpError(error="bad_path", message=f"the call holds text that is not valid Unicode: {error}"[:300])
        if len(encoded) > MAX_FRAME_BYTES - 2:
            return OpError(error="too_large", message=f"the call has {len(encoded)} bytes, over {MAX_FRAME_BYTES}")
        pending = self._pending[call.call_id] = PendingCall(call, encoded)
        pending.waiters.append(waiter)
        self._out.append(pending)
        # Nothing else is under way: a turn of the loop would only add to its time.
        if len(self._pending) == 1 and self._socket is not None and len(encoded) < LARGE_FRAME:
            self._send_now(self._socket)
        else:
            self._wake.set()
        return None

    def _give_up(self, call_id: str, waiter: asyncio.Future[OpResult]) -> None:
        pending = self._pending.get(call_id)
        if pending is None or waiter not in pending.waiters:
            return
        pending.waiters.remove(waiter)
        # Another caller waits for the same call.
        if pending.waiters:
            return
        del self._pending[call_id]
        pending.over = True
        if pending.sent:
            # Kept until the server has answered: a new connection has to repeat it.
            self._cancels[call_id] = None
            if len(self._cancels) > MAX_CANCELS:
                del self._cancels[next(iter(self._cancels))]
            self._out.append(Cancel(call_id=call_id))
            self._wake.set()

    def reschedule_heartbeat(self) -> None:
        """The leases' times changed: look again when the next heartbeat is due."""
        self._beat_now.set()

    # ----------------------------------------------------------------------------------------------------------- life

    async def open(self) -> None:
        """Connect for the first time.

        Raises:
            BackendUnavailable: the server can't be reached, refuses, or speaks another version.
        """
        socket = await self._connect()
        self.up.set()
        self._tasks.spawn(self._live(socket), "connection")

    async def close(self, reason: str) -> None:
        """End the stream; calls that wait end as lost."""
        self._lose(reason, report=False)
        await self._tasks.cancel(2)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await self._session.ws_connect(
                    self._url,
                    max_msg_size=MAX_FRAME_BYTES + 1,
                    compress=0,
                    autoping=True,
                    timeout=aiohttp.ClientWSTimeout(ws_close=0.2),  # pyright: ignore[reportCallIssue]
                )
                receive_small(socket._conn and socket._conn.transport)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                try:
                    await self._greet(socket)
                except BaseException:
                    await socket.close()
                    raise
        except TimeoutError:
            raise BackendUnavailable(f"{self._url} did not answer within {CONNECT_S:g} s") from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status in {401, 403}:
                raise ClientRefused(f"{self._url} refuses the token") from None
            raise BackendUnavailable(f"{self._url} answered {error.status}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"{self._url} can't be reached: {error}") from error
        return socket

    async def _greet(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        # `holds` is read at the last moment: the server ends the leases that are missing in it.
        hello = Hello(client_id=self._client_id, connection=next(_numbers), holds=self._events.holds())
        await web_socket.send(socket, web_socket.batch([hello.model_dump_json().encode()]))
        try:
            messages = _parse(answer := await socket.receive())
        except ValidationError as error:
            raise BackendUnavailable(
                f"{self._url} is no sandbox server: {error.errors(include_input=False)[:1]}"
            ) from None
        if answer.type is aiohttp.WSMsgType.CLOSE and answer.data == aiohttp.WSCloseCode.POLICY_VIOLATION:
            raise ClientRefused(f"{self._url} refuses the connection: {answer.extra}")
        if not messages or not isinstance(messages[0], Welcome):
            raise BackendUnavailable(f"{self._url} did not answer the hello with a welcome")
        welcome = messages[0]
        if welcome.version != VERSION:
            raise ClientRefused(f"{self._url} speaks version {welcome.version} of the wire, not {VERSION}")
        # Another process: its journal knows none of the calls, so that none may be sent again.
        if self.boot_id is not None and welcome.boot_id != self.boot_id:
            raise ClientRefused("the sandbox server was restarted, and its slots are gone")
        self.boot_id = welcome.boot_id
        self._heartbeat_s = welcome.heartbeat_s
        self._heard_at = time.monotonic()
        self._resend()
        # After `_resend`: answers behind the welcome take their calls out of the queue again.
        self._handle(messages[1:])

    def _resend(self) -> None:
        """Queue everything that is not answered, in the order in which it was given."""
        self._out.clear()  # what was in it is among the unanswered
        self._acks.resend()
        # Before the calls: one that was cancelled and is unknown there must not begin.
        self._out.extend(Cancel(call_id=call_id) for call_id in self._cancels)
        for pending in self._pending.values():
            if pending.sent and not pending.call.resent:
                # Only those that were sent: one that never left may run even where the journal has forgotten old calls.
                pending.call = pending.call.model_copy(update={"resent": True})
            if pending.encoded is None or pending.sent:
                pending.encoded = pending.call.__pydantic_serializer__.to_json(pending.call)
            self._out.append(pending)
        self._wake.set()

    async def _live(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                self.up.set()
                reason = await self._serve(socket)
                self.up.clear()
                log.info("stream %s broke: %s", self._url, reason)
                again = await self._reconnect(reason)
                if again is None:
                    return
                socket = again
        except Exception as error:
            log.exception("stream %s failed", self._url)
            self._lose(f"the client's stream failed: {error!r}", report=True)
        except BaseException:  # the event loop ends, by an exception that was perhaps raised here: clean-up may call on
            self._lose("the client's event loop ends", report=True)
            raise

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        """Until the connection breaks; returns why."""
        self._socket = socket
        try:
            return await race(self._read(socket), self._write(socket), self._beat())
        finally:
            self._socket = None
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(1):
                    await socket.close()

    async def _reconnect(self, reason: str) -> aiohttp.ClientWebSocketResponse | None:
        backoff = Backoff(*PAUSE_S)
        # From the break on, not from each attempt.
        until = time.monotonic() + self._reconnect_s
        while True:
            try:
                return await self._connect()
            except ClientRefused as error:
                self._lose(str(error), report=True)
                return None
            except BackendUnavailable as error:
                # one that drains and refuses connections has ended for good
                ended = self.draining and isinstance(error.__cause__, ConnectionRefusedError | aiohttp.ClientOSError)
                pause = backoff.failed()
                if ended or time.monotonic() + pause > until:
                    self._lose(f"{error} ({reason})", report=True)
                    return None
            await asyncio.sleep(pause)

    def _lose(self, reason: str, *, report: bool) -> None:
        if self.gone is not None:
            return
        self.gone = reason
        # Whoever waits for the connection wakes, and finds `gone`.
        self.up.set()
        pending, self._pending = self._pending, {}
        self._cancels.clear()
        self._out.clear()
        for each in pending.values():
            # What never left did not run: its caller may do it again elsewhere.
            kind = OutcomeUnknown if each.sent else SlotLost
            for waiter in each.waiters:
                if not waiter.done():
                    waiter.set_exception(kind(reason))
        if report:
            self._events.lost(reason)

    # -------------------------------------------------------------------------------------------------------- reading

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        while True:
            message = await socket.receive()
            try:
                messages = _parse(message)
            except ValidationError as error:
                return f"the server sent something else than frames: {error.errors(include_input=False)[:1]}"
            if messages is None:
                return f"closed by the server ({socket.close_code}) {message.extra or ''}"
            self._heard_at = time.monotonic()
            self._handle(messages)
            if self._acks.many or (self._acks and len(message.data) > LARGE_FRAME):
                self._acks.due = True
                self._wake.set()

    def _handle(self, messages: list[ServerMessage]) -> None:
        for message in messages:
            if isinstance(message, Reply | Fault):
                self._answer(message)
            elif isinstance(message, Heartbeat):
                self._acks.echoed(message.seq)
            elif isinstance(message, LeaseEnded):
                self._events.lease_ended(message)
            elif isinstance(message, Capacity):
                self._events.capacity(message.room)
            elif isinstance(message, Draining):
                self.draining = True

    def _answer(self, message: Reply | Fault) -> None:
        # Also where nobody waits any more: the server keeps the answer until it is acknowledged.
        self._acks.add(message.call_id)
        self._cancels.pop(message.call_id, None)
        pending = self._pending.pop(message.call_id, None)
        if pending is None:  # it was cancelled: there may be no later frame to carry the acknowledgement
            self._acks.due = True
            self._wake.set()
            return
        pending.over = True
        call = pending.call
        if call.traceparent is not None and isinstance(message, Reply) and message.timing is not None:
            timing = message.timing
            tracing.joined(call.traceparent, f"sandbox {call.operation.op}", timing.waited_s, timing.ran_s)
        for waiter in pending.waiters:
            if not waiter.done():
                if isinstance(message, Reply):
                    waiter.set_result(message.result)
                else:
                    waiter.set_exception(from_code(message.code, message.message))

    # -------------------------------------------------------------------------------------------------------- writing

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        try:
            while True:
                frame = self._next_frame()
                if frame is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    await web_socket.send(socket, frame)
        except web_socket.SENDING_FAILURES as error:
            return f"writing failed: {error!r}"

    def _send_now(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """An idle connection sends at once, without waiting for the writer's turn on the loop."""
        frame = self._next_frame()
        if frame is None:
            return
        try:
            web_socket.send_now(socket, frame)
        except web_socket.SENDING_FAILURES as error:
            # the connection has broken: its reader finds out, and all is sent again
            log.debug("writing failed: %r", error)

    def _next_frame(self) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        out = self._out
        while out and len(parts) < self._frames.max_calls:
            item = out[0]
            if isinstance(item, PendingCall):
                if item.over:
                    out.popleft()
                    continue
                assert item.encoded is not None
                encoded = item.encoded
            else:
                encoded = item.__pydantic_serializer__.to_json(item)
            # Half: acknowledgements still fit in, and a frame is read as a whole at the other end.
            if parts and size + len(encoded) > MAX_FRAME_BYTES // 2:
                break
            out.popleft()
            if isinstance(item, PendingCall):
                # Before the write: if that fails, whether it arrived is not known.
                item.sent, item.encoded = True, None
            elif isinstance(item, Heartbeat):
                # Its echo will cover what was acknowledged in earlier frames, not in this one, whose Ack comes behind
                # it.
                self._acks.beat(item.seq)
            parts.append(encoded)
            size += len(encoded) + 1
        if self._acks and (parts or self._acks.due) and size < MAX_FRAME_BYTES // 2:
            ack = Ack(call_ids=self._acks.take())
            parts.append(ack.__pydantic_serializer__.to_json(ack))
        return web_socket.batch(parts) if parts else None

    async def _beat(self) -> str:
        """Heartbeats out, and the end of a connection on which nothing comes in."""
        for seq in itertools.count(1):
            pause = min(self._heartbeat_s, self._events.beat_s())
            if seq == 1 and self._acks.unconfirmed:
                pause = 0  # its echo confirms what would otherwise be sent again on every short-lived connection
            self._beat_now.clear()
            await set_within(self._beat_now, pause)
            silent = time.monotonic() - self._heard_at
            # By the server's own interval: leases may make this client's heartbeats more frequent.
            if silent > SILENT_BEATS * self._heartbeat_s:
                return f"nothing came for {silent:.1f} s"
            self._out.append(Heartbeat(seq=seq))
            self._acks.due = bool(self._acks)
            self._wake.set()
        raise AssertionError


def _parse(message: aiohttp.WSMessage) -> list[ServerMessage] | None:
    """The messages of a frame; None: the connection is over."""
    if (text := web_socket.text_of(message)) is None:
        return None
    return SERVER_FRAME.validate_json(text)
