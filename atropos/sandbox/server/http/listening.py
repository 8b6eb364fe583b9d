"""The HTTP site of a server, from its first request to its last."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from atropos.net.admission import ACCEPTS, Admission, BearerToken
from atropos.net.sockets import BACKLOG
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.http.routes import NO_TOKEN, OPEN_PATHS, Routes
from atropos.wire import Capabilities, Problem

if TYPE_CHECKING:
    import ssl

KEEP_S = 75.0
"""How long an idle connection is kept; longer than clients keep theirs, so that they never meet one just closed."""
CLOSE_S = 1.0
"""Longest the end waits for requests under way, in seconds."""


@contextlib.asynccontextmanager
async def listening(
    listener: socket.socket,
    core: Core,
    token: str,
    capabilities: Callable[[], Capabilities | None],
    drain: Callable[[float | None], None],
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator[None]:
    """Answer requests on a listening socket; `Admission` keeps those without the token from aiohttp."""
    bearer = BearerToken(token)
    refusal = Problem(code="unauthorized", message=NO_TOKEN).model_dump_json(exclude_none=True)
    admission = Admission(bearer, OPEN_PATHS, refusal.encode(), tls=tls)
    runner = web.AppRunner(
        Routes(core, bearer, capabilities, drain).app(),
        access_log=None,
        handle_signals=False,
        keepalive_timeout=KEEP_S,
        shutdown_timeout=CLOSE_S,
        auto_decompress=False,
    )
    await runner.setup()
    accepting: asyncio.Server | None = None
    try:
        http = runner.server
        assert http is not None
        loop = asyncio.get_running_loop()
        accepting = await loop.create_server(lambda: admission.connection(http), sock=listener, backlog=ACCEPTS)
        listener.listen(BACKLOG)
        yield
    finally:
        if accepting is not None:
            accepting.close()
        admission.close()
        await runner.cleanup()
