"""One client's WebSocket: frames of messages in, answers out as they finish.

What is ready while a frame is being written goes into the next one, so batches grow with the load and an idle stream
sends at once. What a client sends is bounded by stopping to read: while more than `MAX_QUEUED_BYTES` of its calls have
not been answered, or more than `MAX_WAITING` messages wait for it to read them, TCP makes it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from atropos.errors import OutcomeUnknown
from atropos.net import web_socket
from atropos.sandbox.server.calls.journal import JournalEntry
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.state.clients import ClientState
from atropos.wire import (
    CLIENT_FRAME,
    MAX_FRAME_BYTES,
    VERSION,
    Ack,
    Call,
    Cancel,
    ClientMessage,
    Fault,
    Heartbeat,
    Hello,
    ServerMessage,
    Welcome,
    client_name,
)

log = logging.getLogger(__name__)
HELLO_S = 10.0
"""Longest a new connection may take to say hello, in seconds."""
SHARE, FRAME_S = 8, 0.006
"""A frame waits for one answer from every `SHARE` open calls, for at most `FRAME_S` seconds, and only while answers
come at that rate: then a call takes several times as long as its answer waits."""
MAX_BATCH = 200
"""Most messages in one frame to a client."""
FULL_S = 0.005
"""Pause before a full write buffer is checked again, in seconds."""
MAX_BATCH_BYTES = 1024 * 1024
"""A frame is closed when it is this large, so that a large answer delays the others no longer than it must."""
MAX_QUEUED_BYTES = 256 * 1024 * 1024
"""Bytes of frames with unanswered calls at which a connection is not read any further."""
MAX_WAITING = 40_000
"""Unsent messages at which a connection is not read any further: twice its open calls."""


class _Over(Exception):
    """The connection is over, or, with a reason, refused."""


class Stream:
    """One accepted WebSocket; by the transport under it, it is written to and cut."""

    def __init__(self, core: Core, socket: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        self._state = core.state
        self._leasing = core.leasing
        self._calls = core.calls
        self._socket = socket
        self._transport = transport
        self._out: deque[JournalEntry | ServerMessage] = deque()
        self._loop = asyncio.get_running_loop()
        self._flushing = False
        self._gathering: asyncio.TimerHandle | None = None
        self._ended_at: deque[float] = deque(maxlen=32)
        self._held_bytes: dict[str, int] = {}
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._closed = False
        self.client: ClientState | None = None
        self.heard_at = core.state.now()
        self.paused = False

    # ------------------------------------------------------------------------------ what others call: see `Connection`

    def push(self, entry: JournalEntry) -> None:
        """Send the answer of a finished call."""
        # The answer frees the bytes of the frame in which its call came: reading may go on.
        size = self._held_bytes.pop(entry.call_id, 0)
        if size:
            self._queued_bytes -= size
            self._room.set()
        self._out.append(entry)
        self._ended_at.append(self._loop.time())
        self._flush_soon()

    def send(self, message: ServerMessage) -> None:
        """Send a message."""
        self._out.append(message)
        self._flush_soon()

    def abort(self, reason: str) -> None:
        """Cut the connection now; whatever it still delivers is ignored."""
        if not self._closed:
            log.info("stream of %s closed: %s", client_name(self.client.client_id) if self.client else "?", reason)
        self._closed = True
        # A reader that waits for room must see that it is over.
        self._room.set()
        self._transport.abort()

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the client or, while it is not read, since anything went to it.

        A client that hears nothing for as long reconnects; one that doesn't is dead.
        """
        return self._state.now() - self.heard_at

    # -------------------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Serve the connection until it ends."""
        self._state.streams.add(self)
        try:
            await self._hello()
            await self._read()
        except _Over as over:
            if reason := str(over):
                await self._refuse(reason)
        finally:
            self._closed = True
            self._state.streams.discard(self)
            if self.client is not None:
                self._state.clients.disconnect(self.client, self)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(1):
                    await self._socket.close()

    async def _hello(self) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                messages, _ = await self._next_frame()
        except TimeoutError:
            raise _Over("no hello came") from None
        hello = messages[0] if messages else None
        if not isinstance(hello, Hello):
            raise _Over("the first message must be hello")
        # Before the client is registered: it replaces no connection of its own that works.
        if hello.version != VERSION:
            raise _Over(f"this server speaks version {VERSION} of the wire, not {hello.version}")
        # The welcome goes first, before the messages that connecting sends.
        self.send(Welcome(boot_id=self._state.boot_id, heartbeat_s=self._state.config.heartbeat_s))
        self.client = self._leasing.connect(hello, self)
        if self.client is None:
            raise _Over("a newer connection of this client is open")
        self._handle(messages[1:], 0)
        self._flush_soon()

    async def _read(self) -> None:
        while not self._closed:
            messages, size = await self._next_frame()
            if self._closed:
                return
            self.heard_at = self._state.now()
            assert self.client is not None
            # Anything that comes renews the client's leases: heartbeats, acknowledgements and calls alike.
            self._state.table.seen(self.client.client_id, self.heard_at)
            self._handle(messages, size)
            # Not reading is all that is needed: TCP's window fills, and the client waits.
            if self._full:
                await self._wait_for_room()

    @property
    def _full(self) -> bool:
        return self._queued_bytes > MAX_QUEUED_BYTES or len(self._out) > MAX_WAITING

    async def _wait_for_room(self) -> None:
        self.paused = True
        while self._full and not self._closed:
            self._room.clear()
            await self._room.wait()
        self.paused = False
        self.heard_at = self._state.now()

    async def _next_frame(self) -> tuple[list[ClientMessage], int]:
        """The messages of the next frame, and its length."""
        text = web_socket.text_of(await self._socket.receive())
        if text is None:
            raise _Over
        try:
            return CLIENT_FRAME.validate_json(text), len(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise _Over(f"not a frame: {first['msg']} at {json.dumps(first['loc'])[:80]}") from None

    async def _refuse(self, reason: str) -> None:
        log.warning("stream refused: %s", reason)
        self._state.counters["streams_refused"] += 1
        with contextlib.suppress(OSError):
            async with asyncio.timeout(1):
                await self._socket.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION, message=reason.encode()[:120])

    def _handle(self, messages: list[ClientMessage], size: int) -> None:
        client = self.client
        assert client is not None
        calls = self._calls
        for message in messages:
            if isinstance(message, Call):
                # A known call's answer was pushed by `submit`; only a refusal is sent here.
                answer = calls.submit(client, message)
                if isinstance(answer, Fault):
                    self.send(answer)
                elif answer.state != "done" and size > 65_536 and message.call_id not in self._held_bytes:
                    # Small frames are bounded by the number of open calls.
                    share = size // len(messages)
                    self._held_bytes[message.call_id] = share
                    self._queued_bytes += share
            elif isinstance(message, Ack):
                calls.ack(client, message.call_ids)
            elif isinstance(message, Heartbeat):
                self.send(message)
            elif isinstance(message, Cancel):
                calls.cancel(client, message.call_id)

    # -------------------------------------------------------------------------------------------------------- writing

    def _flush_soon(self) -> None:
        """Write at the end of this turn of the loop: what else ends in it goes into the same frame.

        A client without another call under way gets its answer at once: nothing else can end. Of one with many, answers
        that come close after each other are gathered: then both ends wake up less often.
        """
        # Before the welcome nothing else may be sent.
        if self._flushing or self.client is None:
            return
        open_calls = self.client.journal.open_calls
        if not open_calls:
            self._flush()
            return
        if self._worth_waiting(min(open_calls // SHARE, len(self._ended_at))):
            if self._gathering is None:
                self._gathering = self._loop.call_later(FRAME_S, self._flush)
            return
        self._flushing = True
        self._loop.call_soon(self._flush)

    def _worth_waiting(self, wanted: int) -> bool:
        """Whether fewer than `wanted` answers are ready, and the last `wanted` ones came within `FRAME_S`."""
        return len(self._out) < wanted and self._loop.time() - self._ended_at[-wanted] < FRAME_S

    def _flush(self) -> None:
        self._flushing = False
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        transport = self._transport
        try:
            while self._out and not self._closed and not transport.is_closing():
                # asyncio's transport takes any amount into memory; `drain` would need a task for each stream.
                if transport.get_write_buffer_size() > MAX_BATCH_BYTES:
                    # the client doesn't keep up
                    self._flushing = True
                    self._loop.call_later(FULL_S, self._flush)
                    return
                transport.write(web_socket.unmasked(self._next_batch()))
                # A client that takes its answers is alive, though nothing of its own is read.
                if self.paused:
                    # It was not listened to meanwhile, and may not be called silent for that.
                    # A client that takes its answers is alive, though nothing of its own is read.
                    self.heard_at = self._state.now()
            self._room.set()
        except Exception:
            log.exception("a stream's writer failed")
            self.abort("the writer failed")

    def _next_batch(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        out = self._out
        while out and len(parts) < MAX_BATCH and size < MAX_BATCH_BYTES:
            item = out.popleft()
            # The entry and not its answer was queued: one that the journal dropped meanwhile sends a small fault
            # instead.
            message = item.answer if isinstance(item, JournalEntry) else item
            assert message is not None
            part = message.__pydantic_serializer__.to_json(message)
            if len(part) > MAX_FRAME_BYTES - 2:
                part = _too_large(item, len(part))
            # MAX_BATCH commas and two brackets.
            elif parts and size + len(part) > MAX_FRAME_BYTES - MAX_BATCH - 2:
                out.appendleft(item)
                break
            parts.append(part)
            size += len(part)
        return web_socket.batch(parts)


def _too_large(item: JournalEntry | ServerMessage, size: int) -> bytes:
    """No operation's bounds allow such an answer; a sandbox that made one anyway must not kill the stream."""
    call_id = item.call_id if isinstance(item, JournalEntry) else ""
    message = f"the result has {size} bytes, more than a frame may hold; the call ran"
    return Fault(call_id=call_id, code=OutcomeUnknown.code, message=message).model_dump_json().encode()
