"""Requests to a ToolServer: over persistent connections, or to an application in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

import aiohttp

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

CONNECT_S = 10.0
MAX_CONNECTIONS = 1000
KEEP_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn closes it."""


class RequestNotSent(Exception):
    """The request did not reach the server."""


class ResponseLost(Exception):
    """The request may have reached the server; its answer did not come."""


@dataclass(frozen=True, slots=True)
class TransportResponse:
    """A complete response. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport(Protocol):
    """Sends requests to the server."""

    async def send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> TransportResponse:
        """One request: `path` is quoted and may have a query, `body` is JSON.

        Raises:
            RequestNotSent: it was not delivered.
            ResponseLost: it may have been.
        """
        ...


class Connections:
    """HTTP over aiohttp, whose requests cost a fifth of httpx's CPU time."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> TransportResponse:
        """See `Transport`."""
        request = self._session.request(
            method,
            self._url + path,
            data=body,
            headers={"Content-Type": "application/json"} if body is not None else None,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            allow_redirects=False,
        )
        try:
            async with request as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return TransportResponse(response.status, headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise RequestNotSent(str(error) or type(error).__name__) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResponseLost(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


class InProcess:
    """Calls an ASGI application."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = _encoded({"host": "inprocess", **headers}.items())

    async def send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> TransportResponse:
        """See `Transport`."""
        content = body or b""
        path, _, query = path.partition("?")
        more = {"content-type": "application/json", "content-length": str(len(content))} if body is not None else {}
        scope: dict[str, object] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [*self._headers, *_encoded(more.items())],
            "client": ("127.0.0.1", 0),
            "server": ("inprocess", 80),
        }
        exchange = _Exchange(content)
        try:
            async with asyncio.timeout(timeout_s):
                await self._app(scope, exchange.receive, exchange.send)
        except TimeoutError as error:
            raise ResponseLost(f"no answer within {timeout_s:g} s") from error
        except Exception as error:
            if exchange.status == 0:
                return TransportResponse(500, {}, repr(error).encode())
        return TransportResponse(exchange.status or 500, exchange.headers, b"".join(exchange.parts))


class _Exchange:
    """One request as its application receives it, and the response."""

    def __init__(self, content: bytes) -> None:
        self._content: bytes | None = content
        self._complete = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._content is None:
            await self._complete.wait()
            return {"type": "http.disconnect"}
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message.get("headers", ()):
                with contextlib.suppress(UnicodeDecodeError):
                    self.headers[name.decode().lower()] = value.decode("latin-1")
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self._complete.set()


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers]  # as aiohttp does
