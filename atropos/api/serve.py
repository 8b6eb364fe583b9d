"""Runs an app with uvicorn: the port is told when it is ready, and SIGTERM drains before it ends."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from atropos.api.settings import LOOPBACK
from atropos.errors import ConfigError

_AFTER_DRAIN_S = 5
"""How long answers may still be written once the drain is over."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the port is in use or the address is not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(1024)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(f"host, port: can't listen on {host}:{port}: {error.strerror or error}") from None
    made.setblocking(False)
    return made


class _Server(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and ends at once at the second."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]] | None, ready: str) -> None:
        super().__init__(config)
        self._drain = drain
        self._ready = ready
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so on stderr."""
        await super().startup(sockets)
        if self.started and not self.should_exit:
            print(self._ready, file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM: drain; again: end now."""
        if self._draining is not None or self._drain is None:
            super().handle_exit(sig, frame)
            self.force_exit = True
            return
        print(
            "ending: running calls are finished first; the same signal again ends at once", file=sys.stderr, flush=True
        )
        # signal handlers run between two steps of the loop, in its thread
        loop = asyncio.get_event_loop()
        self._draining = loop.create_task(self._drained())

    async def _drained(self) -> None:
        try:
            if self._drain is not None:
                await self._drain()
        finally:
            self.should_exit = True


async def _serve(server: _Server, app: FastAPI, listening: socket.socket) -> None:
    async with app.router.lifespan_context(app):
        await server.serve(sockets=[listening])


def run(app: FastAPI, *, host: str, port: int, name: str, drain: Callable[[], Awaitable[None]] | None = None) -> int:
    """Serve until a signal ends it.

    Args:
        app: what to serve.
        host: address to listen on; anything beyond loopback was asked for.
        port: 0: any free one.
        name: for the line that says where it listens.
        drain: awaited at the first signal, while the server still answers.

    Returns:
        The exit code.

    Raises:
        ConfigError: the port is in use, or the app can't start with its settings.
        SandboxError: what the app needs can't be reached.
    """
    listening = listen(host, port)
    where = listening.getsockname()
    shown = f"[{where[0]}]" if ":" in where[0] else where[0]
    ready = f"{name} on http://{shown}:{where[1]}"
    if host not in LOOPBACK:
        ready += " (reachable beyond this machine; put TLS in front of it)"
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_AFTER_DRAIN_S,
        timeout_keep_alive=30,
        limit_concurrency=2000,
        ws="none",
        lifespan="off",  # entered below, where a failure is one clear exception
        server_header=False,
    )
    server = _Server(config, drain, ready)
    try:
        asyncio.run(_serve(server, app, listening))
    except KeyboardInterrupt:
        return 130
    finally:
        listening.close()
    return 0 if server.started else 1
