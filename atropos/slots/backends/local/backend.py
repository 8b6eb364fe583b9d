"""Containers as subprocesses of this one: the same server, the host's /usr as base; no engine is needed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import re
import secrets
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.slots.backends.base import Backend, Container
from atropos.slots.backends.local.server_process import COMMAND, ServerProcess, start_time
from atropos.slots.task_owner import Tasks

if TYPE_CHECKING:
    from atropos.slots.config import SlotPoolConfig

log = logging.getLogger("atropos.slots.local")

BACKOFF_S = (0.1, 10.0)
"""First and longest pause before a server that ended is started anew."""
PROVEN_S = 10.0
"""A server that ran this long was sound: the next start is without a pause."""
HOPELESS = 5
"""Failed starts in a row, with no server ever ready, after which the fault is taken to be in the set-up."""
DRAIN_S = 30.0
"""How long leases may go on in a server that is being replaced."""
STOP_S, STOP_SLOT_S = 1.5, 0.05
"""How long a server may take to end in order when the pool stops: in any case, and for each of its slots."""


class LocalBackend(Backend):
    """Supervised sandbox servers on this machine. They end with this process, however it ends."""

    name = "local"

    def __init__(self, config: SlotPoolConfig, *, command: Sequence[str] = COMMAND) -> None:
        self.config = config
        self.command = command
        self.scratch: Path | None = None
        self.ever_ready = False
        self._places: dict[int, _Place] = {}
        self._ending: set[_Place] = set()
        self._tasks = Tasks("local backend")
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def _stop_s(self) -> float:
        return STOP_S + STOP_SLOT_S * self.config.slots_per_container

    async def start(self) -> None:
        """Make a scratch folder of our own, and remove those of processes that are no more."""
        remove_stale_scratch()
        self.scratch = make_scratch()

    async def scale(self, count: int) -> None:
        """One supervised server for each index below `count`."""
        if self.scratch is None:
            raise BackendUnavailable("the local backend is not started")
        for index in range(count):
            if index not in self._places:
                self._open(index)
        for index in [index for index in self._places if index >= count]:
            self._end(self._places.pop(index), DRAIN_S)
        self.news()

    def _open(self, index: int) -> None:
        place = self._places[index] = _Place(self, index)
        self._tasks.spawn(place.keep(), f"container {index}")

    def _end(self, place: _Place, grace_s: float) -> None:
        self._ending.add(place)
        place.end(grace_s)

    def containers(self) -> Sequence[Container]:
        """What runs, comes or ends."""
        places = [*self._places.values(), *self._ending]
        return [place.container for place in places if place.container is not None]

    async def changed(self) -> None:
        """For one waiter at a time."""
        await self._news.wait()
        self._news.clear()

    def trouble(self) -> str:
        """The last words of the servers that do not come up."""
        if self._failure is not None:
            return str(self._failure)
        return "; ".join(place.trouble for place in self._places.values() if place.trouble)

    def failure(self) -> Exception | None:
        """A server refused its configuration or this host, or none ever came up."""
        return self._failure

    async def retire(self, container: Container) -> None:
        """End it and start another in its place."""
        place = self._places.get(container.index)
        if place is not None and place.container is not None and place.container.id == container.id:
            self._end(place, self._stop_s)
            self._open(container.index)
            self.news()

    async def aclose(self, *, purge: bool) -> None:
        """End all servers, whether `purge` or not: local ones live no longer than their pool."""
        del purge
        for place in self._places.values():
            self._end(place, self._stop_s)
        self._places.clear()
        try:
            await self._tasks.settle(self._stop_s + 0.2)  # then those that still drain are killed
        finally:
            if self.scratch is not None:
                remove_scratch(self.scratch)
            self.news()

    # ------------------------------------------------------------------------------------------- for the places

    def news(self) -> None:
        """`containers()` may answer differently."""
        self._news.set()

    def give_up(self, failure: Exception) -> None:
        """No server will ever come."""
        if self._failure is None:
            self._failure = failure
        self.news()

    def ended(self, place: _Place) -> None:
        """Nothing of it is left."""
        self._ending.discard(place)
        self.news()


class _Place:
    """One index of the scaling order: a server runs there, and if it ends by itself another takes over."""

    def __init__(self, backend: LocalBackend, index: int) -> None:
        self.container: Container | None = None
        self.trouble = ""
        self._backend = backend
        self._index = index
        self._over = asyncio.Event()
        self._grace_s = STOP_S
        self._runs = 0

    def end(self, grace_s: float) -> None:
        """End the server, which may take `grace_s` for its leases; `keep` then returns."""
        self._grace_s = grace_s
        self._over.set()
        if self.container is not None:
            self.container = replace(self.container, state="ending")

    async def keep(self) -> None:
        """Keep a server running until it is to end; a hopeless start is reported and not tried again."""
        failures, (pause, longest) = 0, BACKOFF_S
        loop = asyncio.get_running_loop()
        try:
            while not self._over.is_set():
                began = loop.time()
                try:
                    await self._run()
                    return
                except (BackendUnavailable, ConfigError, IsolationUnavailable) as error:
                    if not isinstance(error, BackendUnavailable) and not self._backend.ever_ready:
                        self.trouble = str(error)
                        self._backend.give_up(error)
                        return
                    # a host that has carried servers can carry them again: whatever this one says passes
                    if loop.time() - began > PROVEN_S:
                        failures, pause = 0, BACKOFF_S[0]
                    failures += 1
                    wait = pause * random.uniform(0.7, 1.3)
                    pause = min(pause * 2, longest)
                    self.trouble = f"container {self._index}: {error} (failed {failures} times in a row)"
                    log.warning("%s", self.trouble)
                    if failures >= HOPELESS and not self._backend.ever_ready:
                        self._backend.give_up(BackendUnavailable(self.trouble))
                        return
                    self._backend.news()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._over.wait()
        finally:
            self.container = None
            self._backend.ended(self)

    async def _run(self) -> None:
        """One server from start to end. Returns when it was stopped; raises when it ended by itself."""
        scratch = self._backend.scratch
        assert scratch is not None
        self._runs += 1
        state_dir = scratch / f"{self._index}-{secrets.token_hex(4)}"
        state_dir.mkdir(mode=0o755)
        token = secrets.token_urlsafe(32)
        config = self._backend.config.server_config(
            token, die_with_parent=True, state_dir=str(state_dir), drain_s=DRAIN_S
        )
        server = await ServerProcess.start(config, self._backend.command)
        try:
            self.container = Container(server.id, self._index, None, token, "starting")
            self._backend.news()
            if not await self._unless_over(server.ready(self._backend.config.start_timeout_s)):
                return
            self._backend.ever_ready = True
            self.trouble = ""
            self.container = replace(self.container, url=f"http://127.0.0.1:{server.port}", state="running")
            self._backend.news()
            if await self._unless_over(server.wait()):
                raise server.failure()
        finally:
            grace_s = self._grace_s if self._over.is_set() else 0.0
            try:
                await server.stop(grace_s)
            finally:
                self.container = None
                remove_scratch(state_dir)
                self._backend.news()
            await server.tidy()

    async def _unless_over(self, work: Coroutine[Any, Any, None]) -> bool:
        """Await `work`; False when the end was asked for first."""
        task = asyncio.ensure_future(work)
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for one in (task, over):
                one.cancel()
            await asyncio.gather(task, over, return_exceptions=True)


# -------------------------------------------------------------------------------------------------------------- scratch

_SCRATCH = re.compile(r"atropos-(\d+)-(\d+)-")
_locks: dict[Path, int] = {}


def make_scratch() -> Path:
    """An empty folder, named after this process and locked by it, in which servers mount what only they can see."""
    pid = os.getpid()
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"atropos-{pid}-{start_time(pid)}-"))
        path.chmod(0o755)  # the server passes through it as another user
        if lock(path):
            return path


def lock(path: Path) -> bool:
    """Lock a folder until it is removed or this process ends. False when another holds it, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        kept = False
    if kept:
        _locks[path] = fd
    else:
        os.close(fd)
    return kept


def remove_scratch(path: Path) -> None:
    """Remove empty folders only: should a mount ever show here, what is in it stays."""
    for folder, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    if (fd := _locks.pop(path, None)) is not None:
        os.close(fd)


def remove_stale_scratch() -> None:
    """Remove what was left by processes that were killed.

    The name says whose it was, but a process of another container may seem gone from here: its lock tells. Removing a
    folder detaches what is mounted on it elsewhere.
    """
    for path in Path(tempfile.gettempdir()).glob("atropos-*"):
        if (match := _SCRATCH.match(path.name)) and start_time(int(match[1])) != int(match[2]) and lock(path):
            remove_scratch(path)
