"""One run of the sandbox server: host, probe, listening, the ready line, draining, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

from atropos.aio import outlive, set_within
from atropos.config import ServerConfig
from atropos.errors import IsolationUnavailable
from atropos.images.manifests import MACHINE
from atropos.net.sockets import listen
from atropos.sandbox.contract import Host
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.snapshots.layer_tar import has_zstd
from atropos.sandbox.server.state.state import ServerState
from atropos.sandbox.server.upkeep import pulse
from atropos.wire import Capabilities, Feature

if TYPE_CHECKING:
    import socket

log = logging.getLogger(__name__)
STATEFUL = frozenset({"sessions"})
"""The features that sessions living between calls need."""


class Server:
    """One sandbox server from start to end.

    Args:
        config: its settings.
        make_host: makes the machinery, within the event loop; raises IsolationUnavailable.
        out: where the ready line goes.
    """

    def __init__(self, config: ServerConfig, make_host: Callable[[], Host], out: TextIO | None = None) -> None:
        self._config = config
        self._make_host = make_host
        self._out = out or sys.stdout
        self._stop = asyncio.Event()
        self._end_by: float | None = None
        """When the leases end, in the loop's time."""
        self.core: Core | None = None
        self.port = 0
        self._clean = False

    async def run(self) -> int:
        """Serve until stopped. Returns the exit code.

        Raises:
            ConfigError: the address can't be listened on.
            IsolationUnavailable: the host can't do what is promised or required.
        """
        # Before the set-up, which a signal must not break off halfway.
        self._handle_signals()
        # The port is bound before the host is set up: a wrong address costs nothing. It answers only once it is ready.
        with listen(self._config.host, self._config.port) as listener:
            self.port = int(listener.getsockname()[1])
            return await self._serve(listener, self._make_host())

    async def _serve(self, listener: socket.socket, host: Host) -> int:
        core = self.core = Core(self._config, host)
        tasks = core.state.tasks
        upkeep = tasks.spawn(pulse(core), "upkeep")
        probing = tasks.spawn(host.probe(), "probe", awaited=True)
        site = contextlib.AsyncExitStack()
        try:
            # Beside the probe: the first leases find their sandboxes started.
            core.leasing.warm_pool.fill()
            # Loading the HTTP library takes as long as starting a slot, so the one is done beside the other.
            listening = await asyncio.to_thread(import_module, "atropos.sandbox.server.http.listening")
            if not gc.isenabled():  # as `__main__` leaves it
                gc.freeze()
                gc.enable()
            capabilities = self._publish(core.state, await probing)
            await site.enter_async_context(listening.listening(listener, core, capabilities, self.stop))
            self._ready(core)
            await self._until_stopped(core)
            await self._drained(core)
        finally:
            # It would end leases while they are being ended.
            upkeep.cancel()
            await outlive(self._close(core, probing, site))
        return 0 if self._clean and not core.leasing.broken else 1

    async def _close(
        self, core: Core, probing: asyncio.Task[Sequence[Feature]], site: contextlib.AsyncExitStack
    ) -> None:
        """End everything; the site last, so that clients are notified and calls are answered."""
        # Waited for, not cancelled: its throw-away sandbox is to be stopped in order.
        await asyncio.wait([probing])
        if not probing.cancelled():
            probing.exception()  # retrieved, so that asyncio logs nothing: an earlier error is what is raised
        async with site:
            self._clean = await core.aclose()

    def stop(self, deadline_s: float | None = None) -> None:
        """Begin to drain: no new leases; existing ones have `deadline_s` (None: the configured time).

        Asked again, it may only end sooner.
        """
        assert self.core is not None
        now = asyncio.get_running_loop().time()
        end_by = now + (self._config.drain_s if deadline_s is None else deadline_s)
        # A second SIGTERM, or a shorter deadline, brings the end forward; nothing puts it off.
        self._end_by = end_by if self._end_by is None else min(self._end_by, end_by)
        self.core.leasing.drain(self._end_by - now)
        self._stop.set()

    # --------------------------------------------------------------------------------------------------------- inside

    def _handle_signals(self) -> None:
        """SIGTERM and SIGINT begin the end; repeated, they change nothing."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: a test's in-process server
                loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.core is None:  # it ends once its set-up is complete
            self._stop.set()
        else:
            self.stop()

    def _publish(self, state: ServerState, features: Sequence[Feature]) -> Capabilities:
        """What the start-up probe found, for clients; each lease names the limits that are missing."""
        config = self._config
        check_required(config, features)
        missing = [feature for feature in features if not feature.ok]
        state.limit_note = "; ".join(f"{f.name}: {f.detail or 'missing'}" for f in missing) or None
        return Capabilities(
            boot_id=state.boot_id,
            kernel=os.uname().release,
            architecture=MACHINE,
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

    def _ready(self, core: Core) -> None:
        with contextlib.suppress(OSError):  # nobody listens: the server serves all the same
            print(
                json.dumps({"ready": True, "port": self.port, "boot_id": core.state.boot_id}),
                file=self._out,
                flush=True,
            )

    async def _until_stopped(self, core: Core) -> None:
        """Until a signal, until a broken server has lost its last lease, or until it was unattended for too long."""
        loop, limit_s = asyncio.get_running_loop(), core.state.config.unattended_s
        attended_at = loop.time()
        # Half a second: neither a broken server's last lease nor a lack of clients sets an event.
        while not await set_within(self._stop, 0.5):
            if core.leasing.broken and not core.state.runs:
                return
            if core.state.streams or core.state.runs:
                attended_at = loop.time()
            elif limit_s is not None and loop.time() > attended_at + limit_s:
                log.warning("no client was connected for unattended_s (%g s): the server ends", limit_s)
                return

    async def _drained(self, core: Core) -> None:
        """Until no lease is left, or their time is over."""
        if self._end_by is None:
            self.stop()
        assert self._end_by is not None
        loop = asyncio.get_running_loop()
        while core.state.runs and (remaining_s := self._end_by - loop.time()) > 0:
            await set_within(core.leasing.idle, min(0.25, remaining_s))  # the time may be shortened meanwhile


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
        parts = [f"{f.name} ({f.detail or 'missing'}; fix: {f.fix or 'see docs/limits.md'})" for f in refused]
        raise IsolationUnavailable(f"isolation is not complete, {why}: " + "; ".join(parts))
