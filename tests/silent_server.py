"""A server that takes connections, reads what comes, and never answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Its address, as HOST:PORT."""

    async def read(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()  # since Python 3.13 a connection whose writer nothing holds is closed

    async with await asyncio.start_server(read, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
