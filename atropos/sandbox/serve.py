"""One run of the sandbox server: host, probe, listening, the ready line, draining, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TextIO

from aiohttp import web

from atropos.config import ServerConfig
from atropos.errors import ConfigError, IsolationUnavailable
from atropos.sandbox.contract import Host
from atropos.sandbox.core import Core
from atropos.sandbox.http import Routes
from atropos.sandbox.travel import has_zstd
from atropos.sandbox.upkeep import pulse
from atropos.wire import Capabilities, Feature

log = logging.getLogger(__name__)
STATEFUL = frozenset({"sessions"})
"""The features that sessions living between calls need."""
BACKLOG = 1024


class Server:
    """One sandbox server from start to end.

    Args:
        config: its settings.
        make_host: makes the machinery; raises IsolationUnavailable.
        out: where the ready line goes.
    """

    def __init__(
        self, config: ServerConfig, make_host: Callable[[ServerConfig], Awaitable[Host]], out: TextIO | None = None
    ) -> None:
        self._config = config
        self._make_host = make_host
        self._out = out or sys.stdout
        self._found: Capabilities | None = None
        self._stop = asyncio.Event()
        self._deadline_s = config.drain_s
        self.core: Core | None = None
        self.port = 0

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit code.

        Raises:
            ConfigError: the address can't be listened on.
            IsolationUnavailable: the host can't do what is promised or required.
        """
        listener = listen(self._config.host, self._config.port)
        self.port = int(listener.getsockname()[1])
        try:
            host = await self._make_host(self._config)
        except BaseException:
            listener.close()
            raise
        core = self.core = Core(self._config, host)
        routes = Routes(core, self._config.token.get_secret_value(), lambda: self._found, self.stop)
        runner = web.AppRunner(
            routes.app(), access_log=None, handle_signals=False, keepalive_timeout=75, shutdown_timeout=1
        )
        upkeep = asyncio.get_running_loop().create_task(pulse(core))
        clean = False
        try:
            with self._signals():
                core.shelf.fill()
                self._publish(await host.probe())
                await runner.setup()
                await web.SockSite(runner, listener, backlog=BACKLOG).start()
                self._ready()
                await self._until_stopped()
                await self._drained()
        finally:
            upkeep.cancel()
            clean = await asyncio.shield(asyncio.get_running_loop().create_task(core.aclose()))
            await runner.cleanup()
            listener.close()
        return 0 if clean and not core.broken else 1

    def stop(self, deadline_s: float | None = None) -> None:
        """Begin to end: no new leases; the ones there are may go on for `deadline_s` (None: the configured time)."""
        assert self.core is not None
        wanted = self._config.drain_s if deadline_s is None else deadline_s
        self._deadline_s = min(self._deadline_s, wanted) if self._stop.is_set() else wanted
        self.core.drain(self._deadline_s)
        self._stop.set()

    # --------------------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """SIGTERM and SIGINT begin the end; again and again they change nothing."""
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
        except (ValueError, RuntimeError):  # not in the main thread: a test's in-process server
            yield
            return
        yield  # the handlers stay: a signal during the last steps must not kill us half-way

    def _signalled(self) -> None:
        if not self._stop.is_set():
            self.stop()

    def _publish(self, features: Sequence[Feature]) -> None:
        assert self.core is not None
        config = self._config
        check_required(config, features)
        missing = [feature for feature in features if not feature.ok]
        self.core.features = features
        self.core.limit_note = "; ".join(f"{f.name}: {f.detail or 'missing'}" for f in missing) or None
        self._found = Capabilities(
            boot_id=self.core.boot_id,
            kernel=os.uname().release,
            features=tuple(features),
            limits={
                **config.limits.model_dump(),
                "slots": config.slots,
                "volume": config.volume,
                "allow_network": config.allow_network,
                "max_snapshots": config.max_snapshots,
                "max_snapshot_mib": config.max_snapshot_mib,
                "zstd": int(has_zstd()),
            },
            stateful=not any(f.name in STATEFUL for f in missing),
            isolated=not missing,
        )

    def _ready(self) -> None:
        assert self.core is not None
        with contextlib.suppress(OSError):  # nobody listens: the server serves all the same
            print(
                json.dumps({"ready": True, "port": self.port, "boot_id": self.core.boot_id}),
                file=self._out,
                flush=True,
            )

    async def _until_stopped(self) -> None:
        """Until told to, or until a broken server has lost its last lease."""
        assert self.core is not None
        loop = asyncio.get_running_loop()
        stopped = loop.create_task(self._stop.wait())
        try:
            while not stopped.done():
                await asyncio.wait([stopped], timeout=0.5)
                if self.core.broken and not self.core.runs:
                    return
        finally:
            stopped.cancel()

    async def _drained(self) -> None:
        """Until no lease is left, or their time is over."""
        assert self.core is not None
        self.core.drain(self._deadline_s)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self.core.runs and loop.time() < began + self._deadline_s:
            left = min(0.25, max(0.0, began + self._deadline_s - loop.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.core.idle.wait()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: in one line, why not.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, number)
    except OSError as error:
        raise ConfigError(f"host: {host!r} is no address to listen on ({error})") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port: {port} on {host} is in use; set another, or 0 for any free one") from None
        raise ConfigError(f"host, port: can't listen on {host}:{port} ({error})") from None
    sock.setblocking(False)
    return sock


def check_required(config: ServerConfig, features: Sequence[Feature]) -> None:
    """Refuse to start without what is promised, or what the configuration requires.

    Raises:
        IsolationUnavailable: names each missing feature and its fix.
    """
    missing = [feature for feature in features if not feature.ok]
    refused = [f for f in missing if f.required or config.require_sandbox]
    why = "required by require_sandbox" if config.require_sandbox else "no slot starts without it"
    if not refused and config.require_stateful_sandbox:
        refused, why = [f for f in missing if f.name in STATEFUL], "required by require_stateful_sandbox"
    if refused:
        parts = [f"{f.name} ({f.detail or 'missing'}; fix: {f.fix or 'see docs/security.md'})" for f in refused]
        raise IsolationUnavailable(f"isolation is not complete, {why}: " + "; ".join(parts))
