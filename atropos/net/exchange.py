"""One request and its answer, forwarded; and the proxy's own answers.

h11 reads and writes every message, both ways, so that nothing reaches an origin but one well-formed request, and no
answer but its own reaches the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import h11

from atropos.aio import race
from atropos.net.egress_policy import EgressRefused
from atropos.net.insertion import BlottedStream, Insertion

HEAD_S = 20.0
REFUSED_HEADER = "x-atropos-refused"
"""On an answer that the proxy gave itself, with the reason; an origin's header of this name is dropped."""
CHUNK_BYTES = 1 << 16
MAX_HEAD = 32_768
_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: to close is to reset."""
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
                        b"proxy-connection", b"te", b"trailer", b"upgrade"})  # fmt: skip
"""Headers that concern one connection alone (RFC 9110, 7.6.1), beside those of a body's length."""
_ECHOED = frozenset({b"TRACE", b"TRACK"})
"""Methods whose answer is the request."""


class OutOfBytes(Exception):
    """The byte budget is used up."""


@dataclass(frozen=True)
class Forwarding:
    """One request and its answer; the connection ends with it.

    `spend` as in `relay`, `remote` and `upstream` the origin's. `insertion`: secrets that go into the request, and are
    taken out of the answer.
    """

    spend: Callable[[int], None]
    client: h11.Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    remote: asyncio.StreamReader
    upstream: asyncio.StreamWriter
    insertion: Insertion | None = None
    origin: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    )

    async def run(self, request: h11.Request, target: bytes, authority: bytes) -> None:
        """Forward the request to the origin, and its answer to the client.

        Raises:
            EgressRefused: a secret would come back in its answer.
        """
        # the origin is the one that was judged, whatever the program wrote into its own Host (RFC 9112, 3.2.2)
        forwarded = [pair for pair in _end_to_end(request.headers) if pair[0] != b"host"]
        if self.insertion is not None:
            if request.method in _ECHOED:
                raise EgressRefused(
                    f"{request.method.decode()} is answered with the request, and this host's has a secret"
                )
            forwarded = self.insertion.into(forwarded)
        # Host first (RFC 9110, 7.2), and one request a connection: no second one can be smuggled behind it.
        headers = [(b"host", authority), *forwarded, (b"connection", b"close")]
        asked = h11.Request(method=request.method, target=target, headers=headers)
        # An origin may answer before it has read the whole body, and a client may go before the answer.
        await race(self._up(asked), self._down())

    async def _send(self, data: bytes | None, sink: asyncio.StreamWriter) -> None:
        if data:
            # Before the bytes move: the budget is never exceeded by what is under way.
            self.spend(len(data))
            sink.write(data)
            await sink.drain()

    async def _offer(self, data: bytes) -> None:
        """Send the origin more of the request. One that takes no more has perhaps answered: `_down` sees it."""
        self.spend(len(data))
        with contextlib.suppress(OSError):
            if not self.upstream.is_closing():
                self.upstream.write(data)
                await self.upstream.drain()

    async def _up(self, asked: h11.Request) -> None:
        client, origin = self.client, self.origin
        await self._send(origin.send(asked), self.upstream)
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                if client.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    await self._send(client.send(go_on), self.writer)
                # An empty read tells h11 that the client has closed; `next_event` then says whether that was the end.
                client.receive_data(await self.reader.read(CHUNK_BYTES))
            elif isinstance(event, (h11.Data, h11.EndOfMessage)):
                await self._offer(origin.send(event) or b"")
                if isinstance(event, h11.EndOfMessage):
                    break
            else:
                break
        # ends when the client hangs up; what it sends beyond its request is dropped
        while dropped := await self.reader.read(CHUNK_BYTES):
            self.spend(len(dropped))

    async def _down(self) -> None:
        client, origin, insertion = self.client, self.origin, self.insertion
        body = None if insertion is None else BlottedStream(insertion.blot)
        while True:
            try:
                event = origin.next_event()
            except h11.RemoteProtocolError as error:
                detail = "" if insertion is not None else f": {error}"  # which may be the request, sent back
                raise ConnectionResetError(f"the origin's answer is not HTTP{detail}") from None
            if event is h11.NEED_DATA:
                origin.receive_data(await self.remote.read(CHUNK_BYTES))
            elif isinstance(event, h11.Response):
                await self._send(client.send(self._answer_to(event)), self.writer)
            elif isinstance(event, h11.Data):
                data = event.data if body is None else body.feed(bytes(event.data))
                await self._send(client.send(h11.Data(data)), self.writer)
            elif isinstance(event, h11.EndOfMessage):
                if body is not None and (rest := body.feed(b"", last=True)):
                    await self._send(client.send(h11.Data(rest)), self.writer)
                await self._send(client.send(h11.EndOfMessage()), self.writer)
                return
            # 1xx answers are dropped: they may carry headers, and no client needs them.
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the origin closed the connection")

    def _answer_to(self, event: h11.Response) -> h11.Response:
        """An origin's head as it goes to the client.

        Raises:
            EgressRefused: the body is packed, so that secrets can't be found in it.
        """
        fields, reason = _end_to_end(event.headers), event.reason
        if self.insertion is not None:
            if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in fields):
                raise EgressRefused("the host packs its answer unasked, and secrets could not be found in it")
            out_of = self.insertion.blot.out_of
            fields, reason = [(out_of(name), out_of(value)) for name, value in fields], out_of(reason)
        headers = [*fields, (b"connection", b"close")]
        return h11.Response(status_code=event.status_code, reason=reason, headers=headers)


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that travel on. h11 gives their names in lower case."""
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    dropped = {REFUSED_HEADER.encode(), *HOP_BY_HOP, *(named - {b"host", b"content-length", b"transfer-encoding"})}
    if any(name == b"transfer-encoding" for name, _ in headers):
        dropped.add(b"content-length")  # two lengths in one message is how requests are smuggled (RFC 9112, 6.1)
    return [(name, value) for name, value in headers if name not in dropped]


def authority(name: str, port: int, *, tls: bool = False) -> bytes:
    """The Host of a request."""
    host = f"[{name}]" if ":" in name else name
    return (host if port == (443 if tls else 80) else f"{host}:{port}").encode("ascii")


async def head(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    """A client's request, but for its body.

    Raises:
        ConnectionResetError: it went away.
        TimeoutError: it is too slow.
        h11.ProtocolError: it sends something else.
    """
    async with asyncio.timeout(HEAD_S):
        while (event := connection.next_event()) is h11.NEED_DATA and (data := await reader.read(CHUNK_BYTES)):
            connection.receive_data(data)
    if not isinstance(event, h11.Request):
        raise ConnectionResetError("the client went away")
    return event


def refusal(error: Exception) -> tuple[int, str]:
    """Status and text of the answer to a request that failed."""
    if isinstance(error, EgressRefused | OutOfBytes):
        # 403 and not 502: a program that retries on gateway errors would try again in vain.
        return 403, f"egress refused: {error}\n"
    if isinstance(error, TimeoutError):
        return 504, "egress: timed out\n"
    if isinstance(error, OSError):
        return 502, f"egress: {error.strerror or error}\n"
    return 400, f"egress: not a proxy request: {error}\n"


async def answer(connection: h11.Connection, writer: asyncio.StreamWriter, status: int, text: str) -> None:
    """Answer the program with an error.

    In the middle of an answer or a tunnel, reset: an end would look like theirs.
    """
    if writer.is_closing():
        return
    # A second head would be read as a part of the body.
    if connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        reset(writer)
        return
    body = text.encode()
    # in the reason, too: it is all that many programs show of a refused CONNECT
    reason = re.sub(r"[^ -~]", "?", text.strip())[:200]
    head = [f"HTTP/1.1 {status} {reason}", "content-type: text/plain; charset=utf-8", f"content-length: {len(body)}"]
    head += [f"{REFUSED_HEADER}: {reason}", *(["proxy-authenticate: Basic realm=atropos"] if status == 407 else [])]
    writer.write("\r\n".join([*head, "connection: close", "", ""]).encode() + body)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(HEAD_S):
            await writer.drain()


async def hear_out(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spend: Callable[[int], None]
) -> None:
    """Read the rest of a request that was answered before its end.

    To close with unread data is to reset, which takes the answer from a client that still sends (RFC 9112, 9.6).
    """
    if writer.is_closing() or connection.they_are_waiting_for_100_continue:
        return
    with contextlib.suppress(OSError, OutOfBytes, h11.ProtocolError):
        async with asyncio.timeout(HEAD_S):
            while connection.their_state is h11.SEND_BODY:
                if connection.next_event() is h11.NEED_DATA:
                    if writer.can_write_eof():
                        writer.write_eof()
                    data = await reader.read(CHUNK_BYTES)
                    spend(len(data))
                    connection.receive_data(data)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that its other end can't take that for the end of an answer."""
    with contextlib.suppress(OSError):  # it has ended
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    abort(writer)


def abort(*streams: asyncio.StreamWriter | None) -> None:
    """End connections at once."""
    for stream in filter(None, streams):
        with contextlib.suppress(AttributeError):  # of one by TLS that has ended: asyncio has forgotten its parts
            stream.transport.abort()
