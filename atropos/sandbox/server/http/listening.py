"""The HTTP site of a server, from its first request to its last."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Callable

from aiohttp.http_exceptions import HttpProcessingError

from atropos.net.admission import Admission, BearerToken
from atropos.net.site import Site
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.http.routes import NO_TOKEN, OPEN_PATHS, Routes
from atropos.wire import Capabilities, Problem

CLOSE_S = 1.0
"""Longest that shutdown waits for running requests, in seconds."""


@contextlib.asynccontextmanager
async def listening(
    listener: socket.socket, core: Core, capabilities: Capabilities, drain: Callable[[float | None], None]
) -> AsyncGenerator[None]:
    """Answer requests on a listening socket; `Admission` keeps those without the token from aiohttp."""
    logging.getLogger("aiohttp.server").addFilter(_without_traceback)
    config = core.state.config
    bearer = BearerToken(config.token.get_secret_value())
    refusal = Problem(code="unauthorized", message=NO_TOKEN).model_dump_json(exclude_none=True)
    tls = None
    if config.tls is not None:
        from atropos.net.tls import server_context  # most servers can't load the ssl module: see `__main__`

        tls = server_context(config.tls.get_secret_value())
    admission = Admission(bearer, OPEN_PATHS, refusal.encode(), tls=tls)
    site = Site(Routes(core, bearer, capabilities, drain).app(), admission, close_s=CLOSE_S)
    try:
        await site.start(listener)
        yield
    finally:
        await site.close()


def _without_traceback(record: logging.LogRecord) -> bool:
    """Log a malformed request as one line, since its sender is at fault; don't log a broken connection."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionError):
        return False
    if isinstance(error, HttpProcessingError):
        record.msg, record.exc_info = f"{record.msg}: {error.code} {type(error).__name__}", None
    return True
