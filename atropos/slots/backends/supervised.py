"""Backends that start sandbox servers themselves: one for each index, restarted when it ends by itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from atropos.aio import Backoff, Tasks, outlive, race, set_within
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from atropos.slots.backends.engines import ChangeFlag
from atropos.slots.config import SlotPoolConfig

log = logging.getLogger("atropos.slots.servers")

BACKOFF_S = (0.1, 10.0)
"""First and longest pause before a server that ended is restarted."""
PROVEN_S = 10.0
"""The end of a server that ran this long resets the back-off."""
HOPELESS_STARTS = 5
"""Failed starts of one server in a row, with none ever ready and all others failed, after which no more are tried."""
DRAIN_S = 30.0
"""How long leases may last in a server that is being replaced."""
STOP_S, STOP_SLOT_S = 1.5, 0.05
"""How long a server may take to end in order when the pool stops: a constant, and the time for each slot."""


class SupervisedServer(Protocol):
    """One run of a sandbox server."""

    @property
    def id(self) -> str:
        """A unique name of this run."""
        ...

    @property
    def place(self) -> str:
        """What an operator finds it by."""
        ...

    @property
    def url(self) -> str:
        """Its address as seen from here, once it is ready."""
        ...

    async def ready(self, timeout_s: float) -> None:
        """Wait until it listens.

        Raises:
            ConfigError, IsolationUnavailable: it refused, with its reason.
            BackendUnavailable: it ended, can't be reached, or isn't ready in time.
        """
        ...

    async def ended(self) -> Exception:
        """Wait until it has ended. Returns why: one of the errors of `ready`."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`; returns when it is gone."""
        ...

    async def tidy(self) -> None:
        """After its end, remove what it left."""
        ...


class SupervisedBackend(Backend):
    """Keeps a server running for each index. Servers end with this process, however it ends."""

    stop_more_s = 0.0
    """Extra time for the end of a server that isn't on this machine, in seconds."""

    def __init__(self, config: SlotPoolConfig) -> None:
        self.config = config
        self.ever_ready = False
        self._places: dict[int, _Place] = {}
        self._ending: set[_Place] = set()
        self._tasks = Tasks(f"{self.name} backend")
        self._news = ChangeFlag()
        self._failure: Exception | None = None

    @abstractmethod
    async def launch(self, index: int, token: str) -> SupervisedServer:
        """Start a server, which need not be ready.

        Raises:
            BackendUnavailable: it can't be started.
        """

    def remote_config(self, token: str) -> ServerConfig:
        """The configuration of a server elsewhere: without its pool, it ends when the leases have."""
        unattended_s = max(self.config.lease_ttl_s, self.config.start_timeout_s)
        return self.config.server_config(token, drain_s=DRAIN_S, unattended_s=unattended_s)

    @property
    def _stop_s(self) -> float:
        return STOP_S + STOP_SLOT_S * self.config.slots_per_container + self.stop_more_s

    async def scale(self, count: int) -> None:
        """One supervised server for each index below `count`."""
        for index in range(count):
            if index not in self._places:
                self._open(index)
        for index in [index for index in self._places if index >= count]:
            # Popped at once, so that the index is free: growing again starts a new server beside the one that drains.
            self._end(self._places.pop(index), DRAIN_S)
        self.news()

    def _open(self, index: int) -> None:
        place = self._places[index] = _Place(self, index)
        self._tasks.spawn(place.keep(), f"container {index}")

    def _end(self, place: _Place, grace_s: float) -> None:
        self._ending.add(place)
        place.end(grace_s)

    def containers(self) -> Sequence[Container]:
        """The servers that run, start or end."""
        places = [*self._places.values(), *self._ending]
        return [place.container for place in places if place.container is not None]

    async def changed(self) -> None:
        """See `Backend`; one waiter at a time."""
        await self._news.wait()

    def trouble(self) -> str:
        """The reasons of the servers that don't start."""
        if self._failure is not None:
            return str(self._failure)
        return "; ".join(place.trouble for place in self._places.values() if place.trouble)

    def failure(self) -> Exception | None:
        """A server refused its configuration or this host, or none ever started."""
        return self._failure

    async def retire(self, container: Container) -> None:
        """End it and start another with its index."""
        place = self._places.get(container.index)
        # By id: the place may have a new server by now, which nobody has complained of.
        if place is not None and place.container is not None and place.container.id == container.id:
            self._end(place, self._stop_s)
            self._open(container.index)
            self.news()

    async def aclose(self, *, purge: bool) -> None:
        """End all servers, whatever `purge` is."""
        del purge
        for place in self._places.values():
            self._end(place, self._stop_s)
        self._places.clear()
        try:
            # Two tenths more than each server has, so that it is the server's own `stop` that kills.
            await self._tasks.settle(self._stop_s + 0.2)  # then servers that still drain are killed
        finally:
            self.news()

    # ------------------------------------------------------------------------------------------- for the places

    @property
    def none_starts(self) -> bool:
        """Whether no server was ever ready, and each has failed."""
        return not self.ever_ready and all(place.trouble for place in self._places.values())

    def news(self) -> None:
        """`containers()` may have changed."""
        self._news.set()

    def give_up(self, failure: Exception) -> None:
        """No server will ever start."""
        # The first reason: the others are given up for the same one.
        if self._failure is None:
            self._failure = failure
        self.news()

    def ended(self, place: _Place) -> None:
        """Its server is gone."""
        self._ending.discard(place)
        self.news()


class _Place:
    """One index of the scaling order: its server is restarted when it ends by itself."""

    def __init__(self, backend: SupervisedBackend, index: int) -> None:
        self.container: Container | None = None
        self.trouble = ""
        self._backend = backend
        self._index = index
        self._over = asyncio.Event()
        self._grace_s = STOP_S

    def end(self, grace_s: float) -> None:
        """End the server, which may take `grace_s` for its leases; `keep` then returns."""
        self._grace_s = grace_s
        self._over.set()
        if self.container is not None:
            self.container = replace(self.container, state="ending")

    async def keep(self) -> None:
        """Keep a server running until `end` is called; a hopeless start is not retried."""
        backoff = Backoff(*BACKOFF_S)
        loop = asyncio.get_running_loop()
        try:
            while not self._over.is_set():
                began = loop.time()
                try:
                    await self._run()
                    return
                except (BackendUnavailable, ConfigError, IsolationUnavailable) as error:
                    # A refused configuration or host, which all servers share.
                    if not isinstance(error, BackendUnavailable) and not self._backend.ever_ready:
                        self.trouble = str(error)
                        self._backend.give_up(error)
                        return
                    # after a server was ready once, every error may be temporary
                    if loop.time() - began > PROVEN_S:
                        backoff.worked()
                    # Pauses grow for each place by itself: on several hosts, one that is away doesn't slow down the
                    # others.
                    wait = backoff.failed()
                    self.trouble = f"container {self._index}: {error} (failed {backoff.failures} times in a row)"
                    log.warning("%s", self.trouble)
                    if backoff.failures >= HOPELESS_STARTS and self._backend.none_starts:
                        self._backend.give_up(BackendUnavailable(self.trouble))
                        return
                    self._backend.news()
                await set_within(self._over, wait)
        finally:
            self.container = None
            self._backend.ended(self)

    async def _run(self) -> None:
        """Run one server. Returns after `end`; raises why when it ended by itself."""
        # A new one for each run: who knew the last server's has no access to this one.
        token = secrets.token_urlsafe(32)
        server = await self._backend.launch(self._index, token)
        try:
            self.container = Container(server.id, self._index, None, token, "starting", place=server.place)
            self._backend.news()
            # `_serve` never returns, so that the end of this line is always `end`'s.
            await race(self._serve(server, self.container), self._over.wait())
        finally:
            # Without `end` the server has ended already, or this task was cancelled.
            grace_s = self._grace_s if self._over.is_set() else 0.0
            try:
                await server.stop(grace_s)
            finally:
                self.container = None
                self._backend.news()
                # Cgroups that stay would count against the machine's number of them.
                await outlive(server.tidy())

    async def _serve(self, server: SupervisedServer, container: Container) -> None:
        """Wait until a server is ready, and then until it has ended; raises why."""
        await server.ready(self._backend.config.start_timeout_s)
        self._backend.ever_ready = True
        self.trouble = ""
        self.container = replace(container, url=server.url, state="running")
        self._backend.news()
        raise await server.ended()
