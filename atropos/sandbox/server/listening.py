"""The HTTP site of a server, from its first request to its last."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, Callable

from aiohttp import web

from atropos.sandbox.server.core import Core
from atropos.sandbox.server.http import Routes
from atropos.wire import Capabilities

KEEP_S = 75.0
"""How long an idle connection is kept; longer than clients keep theirs, so that they never meet one just closed."""
CLOSE_S = 1.0
"""Longest the end waits for requests under way, in seconds."""
BACKLOG = 1024


@contextlib.asynccontextmanager
async def listening(
    listener: socket.socket,
    core: Core,
    token: str,
    capabilities: Callable[[], Capabilities | None],
    drain: Callable[[float | None], None],
) -> AsyncGenerator[None]:
    """Answer requests on a listening socket."""
    app = Routes(core, token, capabilities, drain).app()
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, keepalive_timeout=KEEP_S, shutdown_timeout=CLOSE_S
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
