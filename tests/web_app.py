"""An aiohttp application on a port of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(app: web.Application, *, auto_decompress: bool = True) -> AsyncIterator[str]:
    """Its URL, while it answers."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, auto_decompress=auto_decompress)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
