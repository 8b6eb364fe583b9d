"""Runs an app with uvicorn behind `Admission`; prints the address when ready, drains at SIGTERM."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from atropos.aio import Tasks
from atropos.api.http import NO_TOKEN, OPEN_PATHS
from atropos.net.admission import ACCEPTS, Admission, Credentials
from atropos.net.sockets import BACKLOG, LOOPBACK, is_loopback, listen
from atropos.terminal import log_to_stderr

Upgraded = Callable[[], asyncio.Protocol]
_AFTER_DRAIN_S = 5
"""Time for writing answers after the drain."""
CONNECTIONS = 2000
"""That one holder of a token may have at once; a server has twice as many, so that nobody takes them all."""
_DESCRIPTORS = 65_536


def _allow_descriptors() -> None:
    """Raise the limit of open files where it is a shell's, whose 1,024 are fewer than connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS if hard < 0 else min(hard, _DESCRIPTORS), hard))


class _Server(uvicorn.Server):
    """uvicorn's server; drains at the first signal, ends at once at the second."""

    def __init__(
        self,
        config: uvicorn.Config,
        admission: Admission,
        drain: Callable[[], Awaitable[None]],
        ready: str,
    ) -> None:
        super().__init__(config)
        self._admission = admission
        self._drain = drain
        self._ready = ready
        self._tasks = Tasks("server")
        self._draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and print the address to stderr."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn set the backlog to the number of accepts in one turn
        if self.started and not self.should_exit:
            print(self._ready, file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections without a token first: uvicorn waits for all others."""
        self._admission.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM: drain; again: end now."""
        if self._draining:
            super().handle_exit(sig, frame)
            self.force_exit = True
            return
        print(
            "ending: running calls are finished first; the same signal again ends at once", file=sys.stderr, flush=True
        )
        # signal handlers run between two steps of the loop, in its thread
        self._draining = True
        self._tasks.spawn(self._drained(), "drain")

    async def _drained(self) -> None:
        try:
            await self._drain()
        finally:
            self.should_exit = True


async def _serve(server: _Server, app: FastAPI, listening: socket.socket) -> None:
    async with app.router.lifespan_context(app):
        await server.serve(sockets=[listening])


def _config(
    app: FastAPI, admission: Admission, upgraded: Upgraded | None, trusted_proxies: Iterable[str]
) -> uvicorn.Config:
    def connection(**settings: Any) -> asyncio.Protocol:  # uvicorn's own arguments
        return admission.connection(lambda: AutoHTTPProtocol(**settings))

    def handed_over(**_: object) -> asyncio.Protocol:
        assert upgraded is not None
        return upgraded()

    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connection),
        backlog=ACCEPTS,
        log_config=None,  # the process's own handler writes its records, with their time
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_AFTER_DRAIN_S,
        timeout_keep_alive=30,
        limit_concurrency=2 * CONNECTIONS,
        forwarded_allow_ips=[form for network in trusted_proxies for form in _forms(network)],
        ws="none" if upgraded is None else cast("type[asyncio.Protocol]", handed_over),
        lifespan="off",  # entered by `_serve`, where a failure is one clear exception
        server_header=False,
    )


def _forms(network: str) -> Iterator[str]:
    """A network as its addresses are seen: on a socket of both families, IPv4's in IPv6's form."""
    yield network
    address, _, bits = network.partition("/")
    if "." in address:
        yield f"::ffff:{address}/{96 + int(bits)}"


def run(
    app: FastAPI,
    *,
    host: str,
    port: int,
    name: str,
    credentials: Credentials | None,
    token_headers: Iterable[bytes] = (),
    admits: Callable[[h11.Request], bool] = lambda _: False,
    upgraded: Upgraded | None = None,
    trusted_proxies: Iterable[str] = LOOPBACK,
    drain: Callable[[], Awaitable[None]],
) -> int:
    """Serve until a signal ends it.

    Args:
        app: what to serve.
        host: address to listen on.
        port: 0: any free one.
        name: for the line that says where it listens.
        credentials: the tokens that are let in; None: none is required.
        token_headers: headers besides `Authorization` in which the app takes the token.
        admits: requests without a token that are the app's all the same.
        upgraded: makes what gets a connection that asks for a WebSocket, its request first; None: nothing does.
        trusted_proxies: networks of proxies whose X-Forwarded-Proto says how clients reach the app.
        drain: awaited at the first signal, while the server still answers.

    Returns:
        The exit code.

    Raises:
        ConfigError: the port is in use, or the app can't start with its settings.
        SandboxError: what the app needs can't be reached.
    """
    listening = listen(host, port)
    log_to_stderr()
    where = listening.getsockname()
    shown = f"[{where[0]}]" if ":" in where[0] else where[0]
    ready = f"{name} on http://{shown}:{where[1]}"
    if not is_loopback(host):
        ready += " (reachable beyond this machine; put TLS in front of it)"
    admission = Admission(
        credentials,
        OPEN_PATHS,
        NO_TOKEN.body(),
        token_headers=token_headers,
        admits=admits,
        most_each=CONNECTIONS,
    )
    _allow_descriptors()
    server = _Server(_config(app, admission, upgraded, trusted_proxies), admission, drain, ready)
    try:
        asyncio.run(_serve(server, app, listening))
    except KeyboardInterrupt:
        return 130
    finally:
        listening.close()
    return 0 if server.started else 1
