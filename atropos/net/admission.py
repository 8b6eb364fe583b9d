"""Authenticates connections before an HTTP server sees them.

An HTTP server spends memory and tasks on every connection, and reads, or even unpacks, bodies before its handlers can
ask for a token. So each new connection belongs to `Admission` first, which reads nothing but the first request's head:

- the right token: the HTTP server takes the connection over, with what was read;
- one of the open requests (liveness): it is passed on without a body, and the connection closes after the answer;
- anything else: 401, and the body is discarded unread.

With TLS a connection counts from its first byte on: its handshake is part of the same deadline.

Unauthenticated connections have a deadline and a bound; above the bound the oldest one is closed, so that a flood of
half-open connections can't keep a client out whose first request comes at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, cast

import h11

from atropos.aio import Tasks

if TYPE_CHECKING:
    import ssl

HEAD_S = 10.0
"""Longest an unauthenticated connection lives, in seconds: its head, its answer and the discarding of its body."""
MAX_UNAUTHENTICATED = 256
"""Unauthenticated connections kept at once; one more closes the oldest."""
MAX_HEAD_BYTES = 32 * 1024
ACCEPTS = 64
"""Connections accepted in one turn of the event loop: a flood of them shares the loop with the requests under way."""


class Credentials(Protocol):
    """What a server lets in."""

    def holder(self, value: bytes) -> str | None:
        """Whose token this is; None: it is none that is let in."""
        ...


def bearer_of(authorization: bytes) -> bytes:
    """The token in a value of the Authorization header; empty: there is none."""
    kind, _, token = authorization.partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


class BearerToken:
    """A server's token; compared as digests in constant time, so that neither its content nor its length leaks."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token.encode("utf-8", "surrogateescape"))

    def matches(self, authorization: bytes) -> bool:
        """Whether this value of the Authorization header carries the token."""
        return self.is_token(bearer_of(authorization))

    def is_token(self, value: bytes) -> bool:
        """Whether this is the token itself, as the headers of other APIs carry it."""
        return bool(value) and hmac.compare_digest(_digest(value), self._digest)

    def holder(self, value: bytes) -> str | None:
        """As `Credentials.holder`: there is one."""
        return "token" if self.is_token(value) else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Admission:
    """The unauthenticated connections of one port.

    Args:
        token: the one that requests must carry; None: every complete head is admitted.
        open_paths: paths that GET and HEAD may ask for without a token; None: every path.
        refusal: body of the 401, as JSON.
        token_headers: other headers that may carry the token itself.
        admits: whether a request without a token is the app's all the same.
        tls: for every connection; None: plain HTTP.
        head_s: see `HEAD_S`.
        most: see `MAX_UNAUTHENTICATED`.
        most_each: connections that one holder of tokens may have at once, so that nobody takes those of others; all who
            need no token count as one holder. None: any number.
    """

    def __init__(
        self,
        token: Credentials | None,
        open_paths: Iterable[str] | None,
        refusal: bytes,
        *,
        token_headers: Iterable[bytes] = (),
        admits: Callable[[h11.Request], bool] = lambda _: False,
        tls: ssl.SSLContext | None = None,
        head_s: float = HEAD_S,
        most: int = MAX_UNAUTHENTICATED,
        most_each: int | None = None,
    ) -> None:
        self.refusal = refusal
        self.head_s = head_s
        self.tls = tls
        self.tasks = Tasks("admission")
        self._token = token
        self._token_headers = frozenset(token_headers)
        self._admits = admits
        self._open_paths = None if open_paths is None else frozenset(path.encode() for path in open_paths)
        self._most = most
        self._most_each = most_each
        self._waiting: dict[_Unauthenticated, None] = {}
        self._held: dict[str, set[asyncio.Transport]] = {}
        """Admitted connections by their holder, some that have ended among them."""

    def __len__(self) -> int:
        return len(self._waiting)

    def connection(self, make_http: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """The protocol of a new connection.

        Args:
            make_http: makes the HTTP server's protocol, called once the connection is admitted.
        """
        return _Unauthenticated(self, make_http)

    def add(self, connection: _Unauthenticated) -> None:
        """Count a new connection; the oldest one goes when there are too many."""
        while len(self._waiting) >= self._most:
            # The oldest: a real client sends its head at once, so that what has waited longest is least likely one.
            next(iter(self._waiting)).abort()
        self._waiting[connection] = None

    def discard(self, connection: _Unauthenticated) -> None:
        """Stop counting a connection: it was admitted, or is closed."""
        self._waiting.pop(connection, None)

    def holder(self, request: h11.Request) -> str | None:
        """Who sends a request, by the token in its head; empty: it needs none to be the app's. None: it is refused."""
        if self._token is None:
            return ""
        bearers = [bearer_of(value) for name, value in request.headers if name == b"authorization"]
        others = [value for name, value in request.headers if name in self._token_headers]
        for values in (bearers, others):
            # Two values are refused: another server behind this one might go by the other.
            if len(values) == 1 and (holder := self._token.holder(values[0])) is not None:
                return holder
        return "" if self._admits(request) else None

    def takes(self, holder: str, connection: asyncio.Transport) -> bool:
        """Whether a holder may have one more connection, which counts from now on."""
        if self._most_each is None:
            return True
        held = self._held.setdefault(holder, set())
        if len(held) >= self._most_each:
            # Only where it matters: transports are not told of to this table when they end.
            held -= {each for each in held if each.is_closing()}
        if len(held) >= self._most_each:
            return False
        held.add(connection)
        return True

    def is_open(self, request: h11.Request) -> bool:
        """Whether a request needs no token."""
        path = request.target.partition(b"?")[0]
        return request.method in {b"GET", b"HEAD"} and (self._open_paths is None or path in self._open_paths)

    def close(self) -> None:
        """Close every unauthenticated connection."""
        for connection in list(self._waiting):
            connection.abort()


_TOO_MANY = b'{"code":"full","message":"too many connections are open; close some"}'


class _Unauthenticated(asyncio.Protocol):
    """One connection until its first head is complete; then the HTTP server's, or refused."""

    def __init__(self, admission: Admission, make_http: Callable[[], asyncio.Protocol]) -> None:
        self._admission = admission
        self._make_http = make_http
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._received = bytearray()
        self._http: asyncio.Protocol | None = None
        self._decided = False
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._admission.head_s, self.abort)
        self._admission.add(self)
        if self._admission.tls is not None:
            self._transport.pause_reading()  # what comes first is for the handshake
            self._handshake = self._admission.tasks.spawn(self._start_tls(self._admission.tls), "handshake")

    async def _start_tls(self, tls: ssl.SSLContext) -> None:
        loop, plain, limit_s = asyncio.get_running_loop(), self._transport, self._admission.head_s
        assert plain is not None
        try:
            self._transport = await loop.start_tls(plain, self, tls, server_side=True, ssl_handshake_timeout=limit_s)
        except OSError:  # ssl.SSLError is one: the peer speaks no TLS, or went away
            self._transport = None
        finally:
            self._handshake = None
        if self._transport is None:
            self._forget()
            plain.abort()
        elif self._received:  # it came with the end of the handshake
            data = bytes(self._received)
            self._received.clear()
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._http is not None:
            self._http.connection_lost(exc)

    def abort(self) -> None:
        self._forget()
        if self._handshake is not None:
            self._handshake.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._admission.discard(self)

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Read on until the head is complete; what comes after a refused head is discarded."""
        if self._decided:
            return
        self._received += data
        # Decrypted data may come before `start_tls` has returned: it is parsed once the transport is known.
        if self._handshake is not None:
            return
        try:
            self._parser.receive_data(data)
            event = self._parser.next_event()
        except h11.RemoteProtocolError as error:
            self._decided = True
            self._answer(error.error_status_hint, b'{"code":"bad_request","message":"this is not an HTTP request"}')
            return
        if isinstance(event, h11.Request):
            self._decided = True
            self._decide(event)

    def _decide(self, request: h11.Request) -> None:
        transport = self._transport
        assert transport is not None
        holder = self._admission.holder(request)
        if holder is not None and not self._admission.takes(holder, transport):
            self._answer(429, b"" if request.method == b"HEAD" else _TOO_MANY)
        elif holder is not None:
            self._forget()
            http = self._make_http()
            # From here on asyncio calls the HTTP server directly; nothing of this class stays in the way of its bytes.
            transport.set_protocol(http)
            http.connection_made(transport)
            # What was read for the decision, so that the server sees the request from its first byte.
            http.data_received(bytes(self._received))
        elif self._admission.is_open(request):
            self._http = self._make_http()
            self._http.connection_made(transport)
            # Not what was received: a body, or a second request behind it, never reaches the server.
            self._http.data_received(_without_body(request))
        else:
            self._answer(401, b"" if request.method == b"HEAD" else self._admission.refusal)
        self._received.clear()

    def _answer(self, status: int, body: bytes) -> None:
        """Refuse, and let the peer read that: a socket closed with unread data would discard the answer."""
        transport = self._transport
        assert transport is not None
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        if status == 401:
            headers.append(("WWW-Authenticate", "Bearer"))
        head = self._parser.send(h11.Response(status_code=status, headers=headers))
        transport.write((head or b"") + (self._parser.send(h11.Data(data=body)) or b""))
        # Half-closed: the peer can still read the answer while what it sends is discarded, until the deadline.
        if transport.can_write_eof():
            transport.write_eof()
        else:  # TLS
            transport.close()


def _without_body(request: h11.Request) -> bytes:
    """Rewrite a request's head: no body follows, and the connection closes after the answer."""
    lines = [b"%s %s HTTP/1.1" % (request.method, request.target)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers if name == b"host"]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])
