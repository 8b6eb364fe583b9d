"""Containers in a Docker engine or Podman's service, the local one or the one that DOCKER_HOST names.

Containers of an earlier run are known by the labels `atropos.pool` and `atropos.spec`. A running one of the same spec
is adopted, a stopped one is removed, a running one of another spec is removed unless a live client uses it. Several
processes may share a pool: a container that another process is connected to is never removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from docker.types import CancellableStream

from atropos.aio import Backoff, Tasks
from atropos.cgroup_paths import start_time
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from atropos.slots.backends.docker.engine import (
    REMOVED,
    CreationRefused,
    DockerEngine,
    Ending,
    EngineRefused,
    ImageGone,
    ListedContainer,
)
from atropos.slots.backends.docker.settings import DockerSettings
from atropos.slots.backends.docker.survey import open_docker
from atropos.slots.backends.engines import BlockingCalls, ChangeFlag, Outage, persist
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.spec import HOPELESS_CRASHES, ContainerSpec, hopeless
from atropos.slots.backends.survey import Survey
from atropos.slots.config import SlotPoolConfig

log = logging.getLogger(__name__)
READY_S = 60.0
"""How long a server may take to answer after its container started, in seconds, unless `start_timeout_s` is longer."""
POLL_S = 15.0
"""How often containers are listed without an event, in seconds."""
LIST_LAG_S = 0.1
"""Docker's event of a container's end precedes the change of its list: list once more after this time, in seconds."""
CREATION_S = 120.0
"""A container that was created and not started within this time was abandoned by a killed process, in seconds."""
LONGEST_DRAIN_S = 3600.0
PURGE_RETRY_S, PURGE_AWAY_S = 20.0, 2.0
"""How long a purge is retried when the engine doesn't answer, in seconds, and how long where it hadn't answered for a
while before; then the containers are left, and logged."""
PURGE_S = 45.0
"""Longest purge in all, in seconds: an engine that hangs must not delay the end for longer."""
SETTLE_S = 10.0
"""How long to wait for the creation of containers that is under way, so that the purge finds them, in seconds."""


@dataclass
class _DockerMember:
    """A container of the pool."""

    container: Container
    busy: bool = False
    """Whether a task of this backend is starting or ending it."""


def missing(indexes: Iterable[int], target: int) -> list[int]:
    """The lowest free indexes for the missing containers."""
    used = set(indexes)
    free = (index for index in range(target + len(used)) if index not in used)
    return [next(free) for _ in range(target - len(used))]


class DockerBackend(Backend):
    """Keeps `scale(n)` containers of one spec running under one pool name."""

    name = "docker"

    @classmethod
    async def survey(cls, job_id: str, address: str | None) -> Survey:
        """The containers of `job_id`."""
        return await open_docker(job_id, address)

    def __init__(self, config: SlotPoolConfig) -> None:
        self._pool = config.job_id
        self._spec = ContainerSpec.from_pool(config)
        self._ready_s = max(READY_S, config.start_timeout_s)
        self._purge_on_start = config.purge_job_on_start
        self._engine = DockerEngine(self._pool, config.of(DockerSettings).docker_host)
        self._calls = BlockingCalls("docker", at_once=8)
        self._http = ServerHttp()
        self._members: dict[str, _DockerMember] = {}
        self._strangers: set[str] = set()
        self._target = 0
        self._image_id = ""
        # With the start time, as pids are used again.
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{start_time(os.getpid())}"
        self._ever_ready = False
        self._failure: Exception | None = None
        self._trouble = ""
        self._outage = Outage(config.outage_s)
        self._unremoved: dict[str, str] = {}
        """Containers whose removal failed, by name, and why."""
        self._crashes = Backoff(first_s=0.5, longest_s=15)
        self._changed = ChangeFlag()
        self._wake = ChangeFlag()
        self._stream: CancellableStream[object] | None = None
        self._tasks = Tasks(f"docker backend {self._pool}")
        self._main: asyncio.Task[None] | None = None
        """Keeps the containers in line with the target."""

    def __repr__(self) -> str:
        trouble = self.trouble() or "no trouble"
        return f"DockerBackend({self._pool}: {len(self._live())} of {self._target} containers; {trouble})"

    # ------------------------------------------------------------------------------------------------------ contract

    async def start(self) -> None:
        """Connect, find the image, adopt or remove containers of an earlier run."""
        await self._calls.run(self._engine.connect)
        # The id, not the name: all containers of a run have the same image, whatever is built under its name meanwhile.
        self._image_id = await self._calls.run(lambda: self._engine.image_id(self._spec.image))
        if self._purge_on_start:
            await self._purge()
        await self._adopt_or_remove()
        # What was adopted stays until the pool has said how many it wants.
        self._target = len(self._members)
        self._tasks.spawn(self._watch(), "events")
        self._main = self._tasks.spawn(self._reconcile(), "containers")

    async def scale(self, count: int) -> None:
        """Set the number of containers; they start and end in the background."""
        if self._main is None or self._main.done():
            raise BackendUnavailable("the Docker backend is not running")
        self._target = count
        self._wake.set()

    def containers(self) -> Sequence[Container]:
        """The pool's containers by index."""
        return sorted((member.container for member in self._members.values()), key=lambda c: (c.index, c.id))

    async def changed(self) -> None:
        """Wait until `containers()` may have changed."""
        await self._changed.wait()

    def trouble(self) -> str:
        """Why containers don't start."""
        return "; ".join(text for text in (self._outage.reason, self._trouble) if text)

    def outage(self) -> str:
        """Why the engine doesn't answer; empty while it does."""
        return self._outage.reason

    def failure(self) -> Exception | None:
        """The engine stayed away; or the servers refuse their configuration or isolation, or none ever started."""
        return self._outage.failure() or (None if self._ever_ready else self._failure)

    async def retire(self, container: Container) -> None:
        """End a container and replace it at once."""
        member = self._members.get(container.id)
        if member is None or member.container.state == "ending":
            return
        # Before the removal, which takes seconds: from now on the pool gives it no lease, and another is started.
        self._put(member, state="ending", detail="retired")
        self._tasks.spawn(self._end(member, within_s=min(5.0, self._spec.stop_s)), f"retire {container.id}")
        self._wake.set()

    async def aclose(self, *, purge: bool) -> None:
        """Stop managing the containers; with `purge`, remove those that no other live client uses.

        Containers that can't be removed because the engine doesn't answer are logged.
        """
        # First: `_reconcile` would replace what the purge removes.
        await self._tasks.cancel()
        again_s = PURGE_AWAY_S if self._outage.away_s > PURGE_RETRY_S else PURGE_RETRY_S
        # Creations go on though their callers were cancelled: the purge must find these containers.
        await self._calls.settled(min(SETTLE_S, again_s))
        try:
            if purge and self._image_id:
                async with asyncio.timeout(PURGE_S):
                    await persist(self._purge, lambda _: again_s)
        except (BackendUnavailable, TimeoutError) as error:
            why = str(error) or f"the engine did not answer within {PURGE_S:g} s"
            log.error(  # noqa: TRY400 (the message is enough)
                "containers of %s may be left: %s; `atropos pool purge --backend docker --job-id %s` removes them",
                self._pool, why, self._pool,
            )  # fmt: skip
        finally:
            await self._http.close()
            self._members.clear()
            await self._calls.run(self._engine.close)

    # --------------------------------------------------------------------------------------------------- reconciliation

    def _live(self) -> list[_DockerMember]:
        return [member for member in self._members.values() if member.container.state != "ending"]

    def _put(self, member: _DockerMember, **changes: Any) -> None:
        member.container = replace(member.container, **changes)
        self._changed.set()

    def _forget(self, member: _DockerMember) -> None:
        if self._members.pop(member.container.id, None) is not None:
            self._changed.set()
            self._wake.set()

    async def _watch(self) -> None:
        """List the containers after each event; an event only says when to list them."""
        loop = asyncio.get_running_loop()

        def on_event() -> None:
            # Events are read in the SDK's thread; asyncio's objects belong to the loop's.
            loop.call_soon_threadsafe(self._wake.set)
            loop.call_soon_threadsafe(loop.call_later, LIST_LAG_S, self._wake.set)

        def on_open(stream: CancellableStream[object]) -> None:
            self._stream = stream

        backoff = Backoff(first_s=0.2, longest_s=5)
        try:
            while True:
                try:
                    await self._calls.run(lambda: self._engine.watch(on_event, on_open))
                    backoff.worked()
                except BackendUnavailable as error:
                    # the next list shows whether the engine answers
                    log.debug("no event stream: %s", error)
                self._wake.set()
                await asyncio.sleep(backoff.failed())
        finally:
            if self._stream is not None:
                # A thread can't be cancelled: it ends with its stream.
                self._stream.close()

    async def _reconcile(self) -> None:
        unreachable = Backoff(first_s=0.2, longest_s=5)
        while True:
            try:
                containers = await self._calls.run(self._engine.found)
                unreachable.worked()
                # `trouble` and `outage` are different now, and pools wait for changes of both.
                if self._outage.over():
                    self._changed.set()
                await self._compare(containers)
            except BackendUnavailable as error:
                self._outage.noted(error)
                self._changed.set()
                await asyncio.sleep(unreachable.failed())
                continue
            self._correct()
            await self._wake.wait(min(POLL_S, self._crashes.left_s or POLL_S))

    async def _compare(self, containers: list[ListedContainer]) -> None:
        """Find containers that started or ended without this backend."""
        by_name = {item.name: item for item in containers}
        for member in list(self._members.values()):
            item = by_name.get(member.container.id)
            # A busy one is not looked at, as it is created or removed just now; its own task sees how that ends.
            if member.busy or (item is not None and item.state == "running"):
                continue
            self._lost(member, item)
        for item in containers:
            if item.state == "running" and item.name not in (self._members.keys() | self._unremoved.keys()):
                await self._adopt(item)
                # another process made it; `scale` may lower the target again. Of twins one goes, and is not replaced
                self._target = max(self._target, len({member.container.index for member in self._live()}))
        self._unremoved = {name: why for name, why in self._unremoved.items() if name in by_name}
        for name in self._unremoved:
            self._tasks.spawn(self._remove(name), f"remove {name}")

    def _lost(self, member: _DockerMember, item: ListedContainer | None) -> None:
        """A container ended by itself: its leases end now; its diagnosis and removal may take a while."""
        self._crashes.failed()
        self._forget(member)
        self._tasks.spawn(self._diagnose_and_remove(member, item), f"remove {member.container.id}")

    async def _diagnose_and_remove(
        self, member: _DockerMember, item: ListedContainer | None, ending: Ending = REMOVED
    ) -> None:
        """Log why a container ended, and remove it."""
        name = member.container.id
        if item is not None:
            try:
                ending = await self._calls.run(lambda: self._engine.ending(item.id))
            except BackendUnavailable as error:
                ending = Ending(None, str(error))
        log.warning("container %s ended: %s", name, ending.reason)
        self._trouble = f"container {name} ended: {ending.reason}"
        if not self._ever_ready:
            # Only as long as none has ever been ready: later the same ends are accidents.
            self._failure = hopeless(ending.code, self._trouble, self._crashes.failures)
        self._changed.set()
        await self._remove(name)

    def _correct(self) -> None:
        """Start missing containers, end surplus ones."""
        live = self._live()
        # After a crash none is started for a while: a server that can't start would be made anew hundreds of times.
        if len(live) < self._target and not self._crashes.left_s:
            for index in missing((member.container.index for member in live), self._target):
                member = _DockerMember(self._fresh(index), busy=True)
                self._members[member.container.id] = member
                self._changed.set()
                self._tasks.spawn(self._bring_up(member), f"start {member.container.id}")
        # Twins first, then from the highest index down.
        order = sorted(live, key=lambda m: (not self._is_twin(m), -m.container.index))
        for member in order[: max(0, len(live) - self._target)]:
            if not member.busy:
                member.busy = True
                self._tasks.spawn(self._drain(member), f"drain {member.container.id}")

    def _is_twin(self, member: _DockerMember) -> bool:
        """Whether it is the one to go of two with the same index, which two processes started at once.

        It goes once the other runs: with none left, its process would start a third.
        """
        mine, others = member.container, [m.container for m in self._live()]
        return any(c.index == mine.index and c.id < mine.id and c.state == "running" for c in others)

    def _fresh(self, index: int) -> Container:
        name = f"{self._pool}-{index}-{secrets.token_hex(3)}"
        return Container(id=name, index=index, url=None, token=secrets.token_hex(32), state="starting")

    async def _bring_up(self, member: _DockerMember) -> None:
        """Create a container and wait until its server answers."""
        container = member.container
        try:
            await self._calls.run(
                lambda: self._engine.create(self._spec, container, image_id=self._image_id, owner=self._owner),
                changes=True,
            )
        except BackendUnavailable as error:
            self._trouble = str(error)
            self._crashes.failed()
            # It may exist although its creation failed: the request was lost, or the start refused.
            await self._remove(container.id)
            # Not hopeless: `docker image prune` removes what no container uses.
            if isinstance(error, ImageGone):
                await self._find_image()
            elif isinstance(error, CreationRefused) or (
                isinstance(error, EngineRefused) and self._crashes.failures >= HOPELESS_CRASHES
            ):
                self._failure = error
            self._forget(member)
            return
        if await self._until_ready(member):
            self._crashes.worked()
            self._trouble = ""
            self._ever_ready = True
            self._put(member, state="running", detail="")
            self._wake.set()
        member.busy = False

    async def _find_image(self) -> None:
        """The image was removed from the engine, as may happen while no container runs: use what its name means now."""
        try:
            self._image_id = await self._calls.run(lambda: self._engine.image_id(self._spec.image))
        except (BackendUnavailable, ConfigError) as error:
            self._trouble = str(error)
        else:
            log.warning(
                "the image of pool %s was removed; new containers use what %s is now", self._pool, self._spec.image
            )

    async def _until_ready(self, member: _DockerMember) -> bool:
        """Whether the server answered in time; a container that ended instead is removed."""
        name = member.container.id
        deadline = asyncio.get_running_loop().time() + self._ready_s
        while asyncio.get_running_loop().time() < deadline:
            try:
                containers = await self._calls.run(self._engine.found)
            except BackendUnavailable as error:  # the container may have started
                log.debug("container %s: its state can't be read: %s", name, error)
                await asyncio.sleep(LIST_LAG_S)
                continue
            item = next((item for item in containers if item.name == name), None)
            if item is None or item.state not in {"running", "created"}:
                self._lost(member, item)
                return False
            if item.url is not None:
                self._put(member, url=item.url)
                if await self._http.until_healthy(item.url, within_s=1.0):
                    return True
        self._crashes.failed()
        self._forget(member)
        await self._diagnose_and_remove(
            member, None, Ending(None, f"its server did not answer within {self._ready_s:g} s")
        )
        return False

    async def _drain(self, member: _DockerMember) -> None:
        """End a surplus container once its last lease has ended.

        One that another process is connected to is kept, and not drained: that process, or this one, may soon use it.
        But not a twin, or each would keep it for the other.
        """
        container = member.container
        # Asked before the drain, as a drain can't be taken back.
        used = (
            container.url
            and not self._is_twin(member)
            and await self._http.used_by_others(container.url, container.token, self.client_id)
        )
        member.busy = False
        # The target may have been raised, or the container retired, while its server was asked.
        if used or len(self._live()) <= self._target or member.container.state == "ending":
            return
        self._put(member, state="ending", detail="no longer needed")
        if container.url is not None:
            await self._http.drain(container.url, container.token, LONGEST_DRAIN_S)
            await self._http.until_idle(container.url, container.token)
        await self._end(member, within_s=self._spec.stop_s)

    async def _end(self, member: _DockerMember, *, within_s: float) -> None:
        member.busy = True
        await self._remove(member.container.id, within_s=within_s)
        self._forget(member)

    async def _remove(self, name: str, *, within_s: float = 0) -> None:
        try:
            await self._calls.run(lambda: self._engine.end(name, within_s=within_s))
            self._unremoved.pop(name, None)
        except BackendUnavailable as error:
            # `_compare` tries again after each list; until then it is not adopted as another process's.
            self._unremoved[name] = str(error)

    # ------------------------------------------------------------------------------------ containers of other processes

    async def _adopt_or_remove(self) -> None:
        """Apply the rules of the module's docstring to the containers that exist at the start."""
        for item in await self._calls.run(self._engine.found):
            if item.state == "running":
                await self._adopt(item)
            elif item.state != "created" or item.age_s > CREATION_S:
                await self._remove(item.name)

    async def _adopt(self, item: ListedContainer) -> None:
        """Adopt a running container, or remove it; one that may still be starting, or is in use, is kept."""
        token = await self._calls.run(lambda: self._engine.token(item.id))
        same = item.spec == self._spec.fingerprint(self._image_id)
        if token and item.url and same and await self._http.healthy(item.url):
            container = Container(item.name, item.index, item.url, token, "running", "adopted")
            self._members[item.name] = _DockerMember(container)
            self._changed.set()
        elif token and item.url and await self._http.used_by_others(item.url, token, self.client_id):
            if item.name not in self._strangers:
                log.warning("container %s has another spec and is in use: it is kept", item.name)
            self._strangers.add(item.name)
        # A young one may be another process's that is starting: it has no address or doesn't answer yet.
        elif item.age_s > self._ready_s:
            await self._remove(item.name, within_s=1)

    async def _purge(self) -> None:
        """Remove every container of the pool that no live client uses."""

        async def one(item: ListedContainer) -> None:
            token = await self._calls.run(lambda: self._engine.token(item.id)) if item.url else None
            if token and item.url and await self._http.used_by_others(item.url, token, self.client_id):
                log.warning("container %s is in use by another client: not purged", item.name)
                return
            # The leases are this pool's own, or dead clients'; a server that doesn't answer has none.
            # A drained server ends its slots in order; one that didn't answer is killed at once.
            drained = bool(token and item.url) and await self._http.drain(item.url or "", token or "", 0)
            await self._remove(item.name, within_s=self._spec.stop_s if drained else 0)

        containers = await self._calls.run(self._engine.found)
        names = {item.name for item in containers}
        self._unremoved = {name: why for name, why in self._unremoved.items() if name in names}
        mine = (
            each
            for each in containers
            if each.state != "created" or each.age_s > CREATION_S or each.owner == self._owner
        )
        # All of them, although one fails: the others should not be left for its sake.
        for result in await asyncio.gather(*(one(item) for item in mine), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if self._unremoved:
            raise BackendUnavailable("; ".join(f"{name}: {why}" for name, why in self._unremoved.items()))
