"""Requests to a ToolServer: over persistent connections, or to an application in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
        self._headers = _encoded({"host": "inprocess", **headers})

    async def send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> TransportResponse:
        """See `Transport`."""
        content = body or b""
        requests = [{"type": "http.request", "body": content, "more_body": False}]
        start: Message = {}
        parts: list[bytes] = []
        complete = asyncio.Event()

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await complete.wait()
            return {"type": "http.disconnect"}

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    complete.set()

        more = {"content-type": "application/json", "content-length": str(len(content))} if body is not None else {}
        try:
            async with asyncio.timeout(timeout_s):
                await self._app(_scope(method, path, [*self._headers, *_encoded(more)]), receive, respond)
        except TimeoutError as error:
            raise ResponseLost(f"no answer within {timeout_s:g} s") from error
        except Exception as error:
            if not start:
                return TransportResponse(500, {}, repr(error).encode())
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start.get("headers", ())}
        return TransportResponse(start.get("status", 500), headers, b"".join(parts))


def _scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, object]:
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("inprocess", 80),
    }


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]  # as aiohttp does
