"""The browser's only network access: a forward proxy on loopback that dials what the guard allows.

Whatever a page does (redirects, sub-resources, scripts, WebSockets, names that resolve to private addresses), its
connections come here.
"""

from __future__ import annotations

import asyncio
import secrets

from atropos.aio import Tasks
from atropos.api.external.guard import Guard
from atropos.net.exchange import CHUNK_BYTES
from atropos.net.relay import basic_credentials, connect, relay

_MAX_CONNECTIONS = 1000


class GuardedProxy:
    """One a ToolServer; asks for the user name and password that it made."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.username = "atropos"
        self.password = secrets.token_urlsafe(24)
        self._credentials = basic_credentials(self.username, self.password)
        self._server: asyncio.Server | None = None
        self._tasks = Tasks("guarded proxy")

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)

    async def aclose(self) -> None:
        """Stop listening and cut what is open."""
        if self._server is not None:
            self._server.close()
        await self._tasks.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._serve(reader, writer), "connection")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._tasks) <= _MAX_CONNECTIONS:
                await relay(reader, writer, self._dial, credentials=self._credentials)
        finally:
            writer.close()

    async def _dial(self, host: str, port: int) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        addresses = await self._guard.addresses(host, port)
        return host, *await connect(host, addresses, port)
