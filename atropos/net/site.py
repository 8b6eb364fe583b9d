"""An aiohttp application on one listening socket, behind an `Admission`."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from atropos.net.admission import ACCEPTS, Admission
from atropos.net.sockets import BACKLOG

KEEP_S = 75.0
"""How long an idle connection is kept; longer than clients keep theirs, so that they never meet one just closed."""


class Site:
    """Serves an application from `start` to `close`.

    Args:
        app: the application; bodies reach it as they were sent.
        admission: who reaches it.
        close_s: longest that `close` waits for running requests, in seconds.
    """

    def __init__(self, app: web.Application, admission: Admission, *, close_s: float) -> None:
        self._admission = admission
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=KEEP_S,
            shutdown_timeout=close_s,
            auto_decompress=False,
        )
        self._accepting: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Answer on a listening socket."""
        await self._runner.setup()
        http = self._runner.server
        assert http is not None
        loop = asyncio.get_running_loop()
        self._accepting = await loop.create_server(
            lambda: self._admission.connection(http), sock=listener, backlog=ACCEPTS
        )
        # `create_server` has set the kernel's backlog to ACCEPTS, which is only to bound what one turn accepts.
        listener.listen(BACKLOG)

    async def close(self) -> None:
        """Stop listening, and wait for running requests."""
        if self._accepting is not None:
            # No new connections first, then those without a token, then running requests to their end.
            self._accepting.close()
        self._admission.close()
        await self._runner.cleanup()
