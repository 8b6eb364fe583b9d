"""The slot pool: trajectories in, leased slots out."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import MappingProxyType
from typing import Concatenate, ParamSpec, Protocol, Self, cast, runtime_checkable

from pydantic import ValidationError

from atropos import wire
from atropos.aio import Tasks, set_within
from atropos.errors import AcquireTimeout, BackendUnavailable, ConfigError, SandboxError
from atropos.images.reference import POOL_BASE
from atropos.metrics import Family
from atropos.resources import Resources
from atropos.sandbox.linux import host_limits
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from atropos.slots.backends.loading import make_backend
from atropos.slots.client import SandboxClient
from atropos.slots.client.call_stream import FrameLimit
from atropos.slots.config import SlotPoolConfig
from atropos.slots.containers.keeper import Keeper
from atropos.slots.containers.link import ClientFactory, ContainerLink
from atropos.slots.containers.share import Share
from atropos.slots.containers.state import SharedState
from atropos.slots.pool.grants import Grants, LeaseTerms
from atropos.slots.pool.images import PoolImages, Progress
from atropos.slots.pool.report import PoolReport
from atropos.slots.pool.stats import PoolStats
from atropos.slots.slot import Slot
from atropos.slots.slot.arguments import check_seconds, named_if_wrong
from atropos.slots.slot.snapshots import Snapshot
from atropos.wire import MAX_SECRETS, EgressSecret, ImageInfo, ImageState, LeaseLimits

P = ParamSpec("P")

log = logging.getLogger("atropos.slots")

STOP_RELEASE_S = 2.0
"""How long `stop` waits for releases, in seconds; a container that ends ends its leases anyway."""


@runtime_checkable
class Buildable(Protocol):
    """What a pool can build an image of: a task, a Dockerfile (`atropos.tasks.folder.load_task`)."""

    async def build(self, pool: SlotPool, progress: Callable[[ImageState], None]) -> ImageInfo:
        """Build it, unless that is done; the image of its last step."""
        ...


def for_a_block(
    acquire: Callable[Concatenate[SlotPool, P], Awaitable[Slot]],
) -> Callable[Concatenate[SlotPool, P], AbstractAsyncContextManager[Slot]]:
    """A method that leases a slot as another one does, for the length of an `async with` block."""

    @asynccontextmanager
    async def lease(pool: SlotPool, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Slot]:
        """A slot for the length of an `async with` block. Arguments and errors as `acquire`."""
        async with await acquire(pool, *args, **kwargs) as slot:
            yield slot

    lease.__signature__ = inspect.signature(acquire)  # pyright: ignore[reportFunctionMemberAccess]
    return lease


class SlotPool:
    """Leases slots in containers that a backend provides, and keeps as many containers as the demand asks for.

    Use it as `async with SlotPool(config) as pool`, or `start` and `stop` it. One event loop owns it.

    Args:
        config: what it is made of.
        backend: where containers come from; None: what the configuration names.
        make_client: how a container is connected to; None: `SandboxClient`.

    Raises:
        ConfigError: the backend can't be made, or is a name.
    """

    def __init__(
        self,
        config: SlotPoolConfig | None = None,
        *,
        backend: Backend | None = None,
        make_client: ClientFactory | None = None,
    ) -> None:
        self.config = SlotPoolConfig() if config is None else config
        if not isinstance(cast("object", self.config), SlotPoolConfig):
            raise ConfigError(f"config: write a SlotPoolConfig (got {type(config).__name__})")
        # Random: host names and process ids repeat in containers, and pools that share a server must not share leases.
        self.client_id = f"{os.uname().nodename[:60]}-{os.getpid()}-{secrets.token_hex(16)}"
        if isinstance(backend, str):
            raise ConfigError(
                f"backend: {backend!r} is a name; give it to the configuration: SlotPoolConfig(backend=…)"
            )
        self.backend = backend or make_backend(self.config)
        self.backend.client_id = self.client_id
        self._state = SharedState(self.config, self.backend)
        self._links: dict[str, ContainerLink] = {}
        self._keeper = Keeper(self._state, self._links, make_client or self._sandbox_client)
        self._report = PoolReport(self._state, self._links, self._keeper)
        self._images = PoolImages(self._state, self._links)
        self._grants = Grants(self._state, self._links, self._images)
        self._tasks = Tasks("pool")
        self._frames = FrameLimit(self.config.max_batch_size)
        self._stopping: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<SlotPool {self.config.backend} {self._state.phase}: {self._report.situation()}>"

    # ------------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the backend and wait for `min_containers`, or for one if the backend reports trouble with the others.

        Raises:
            ConfigError: a setting is wrong.
            IsolationUnavailable: the host or the containers can't isolate; says what is missing.
            BackendUnavailable: no container came within `start_timeout_s`; says why. Or `stop` was called. Nothing is
                left then.
        """
        if self._state.phase != "new":
            raise RuntimeError(f"the pool is {self._state.phase}: make a new pool")
        self._state.enter("starting")
        # A task of its own, so that `stop` from another task can end a start that still waits for containers.
        starting = self._tasks.spawn(self._start(), "start", awaited=True)
        try:
            # `wait` doesn't raise: whether it was stopped is asked first, as then its CancelledError is not the
            # caller's.
            await asyncio.wait([starting])
            if self._stopping is not None:
                raise BackendUnavailable("the pool was stopped")
            starting.result()
        # A cancelled start removes its containers as well: without the pool nobody knows of them.
        except BaseException:
            try:
                await self.stop()
            except Exception:
                log.exception("after a failed start, the containers could not be removed")
            raise
        self._state.enter("running")
        for image in dict.fromkeys([*filter(None, [self.config.slot_image]), *self.config.images]):
            self._tasks.spawn(self._prepare_ahead(image), f"prepare {image}")

    async def _start(self) -> None:
        await self.backend.start()
        # First: changes that come while the first containers are asked for must not be missed.
        self._tasks.spawn(self._guard(self._keeper.watch()), "watch")
        self._keeper.reconcile()
        # A job that another pool has started is joined as it is, and never scaled down by its start.
        if self._keeper.containers < self.config.min_containers:
            await self._keeper.ask(self.config.min_containers, "start")
        self._keeper.reconcile()
        await self._first_containers()
        self._tasks.spawn(self._guard(self._keeper.scale()), "scale")

    async def _first_containers(self) -> None:
        deadline = self._state.now() + self.config.start_timeout_s
        while self._state.fleet.ready < self.config.min_containers:
            # Before the state is read: what changes after that sets it again.
            self._state.news.clear()
            if (failure := self._state.failure()) is not None:
                raise failure
            # An engine that has no room for the rest may never have; the keeper goes on asking for it.
            if self._state.fleet.ready and self.backend.trouble():
                log.warning("starting with %d containers: %s", self._state.fleet.ready, self.backend.trouble())
                return
            if await set_within(self._state.news, deadline - self._state.now()):
                continue
            if self._state.fleet.ready:
                log.warning("starting with %d of %d containers", self._state.fleet.ready, self.config.min_containers)
                return
            reason = self.backend.trouble() or self._keeper.trouble or self._report.awaited()
            text = f"no container could be leased from within start_timeout_s ({self.config.start_timeout_s:g} s)"
            raise BackendUnavailable(f"{text}: {reason}{host_limits.load()}")

    async def _prepare_ahead(self, image: str) -> None:
        try:
            await self._images.prepare(image)
        except (SandboxError, ConfigError) as error:
            log.warning("%s; the next lease on it retries", error)

    async def stop(self, *, purge_job: bool | None = None) -> None:
        """End all leases, close all connections, and end or leave the containers. Idempotent; continues when cancelled.

        Args:
            purge_job: whether this pool's containers are ended; None: as `purge_job_on_shutdown` says.
        """
        if self._stopping is None:
            if self._state.phase == "new":
                self._state.enter("stopped")
                return
            purge = self.config.purge_job_on_shutdown if purge_job is None else purge_job
            self._stopping = self._tasks.spawn(self._stop(purge=purge), "stop", awaited=True)
        await asyncio.shield(self._stopping)

    async def _stop(self, *, purge: bool) -> None:
        self._state.enter("stopping")
        self._state.fail_all(BackendUnavailable("the pool was stopped"))
        # The keeper's loops end before the links do: they would replace what is ended here.
        await self._tasks.cancel()
        links = list(self._links.values())
        try:
            for link in links:
                for held in [*link.slots.values()]:
                    held.start_release()
                for snapshot in [*link.snapshots]:
                    snapshot.start_drop()
            # Given back before connections close: in a shared container the slots would stay taken until their TTL.
            await self._state.returned(STOP_RELEASE_S)
            for link in links:
                link.lose("the pool was stopped")
            self._links.clear()
            await self._state.tasks.settle(STOP_RELEASE_S)
        finally:
            try:
                # Last, and whatever failed above: containers that stay behind cost more than leases that do.
                await self.backend.aclose(purge=purge)
            finally:
                self._state.enter("stopped")
                await self._images.aclose()

    # ------------------------------------------------------------------------------------------------------ leases

    @named_if_wrong
    async def acquire(
        self,
        trajectory_id: str,
        snapshot: Snapshot | None = None,
        base: str | None = None,
        network: bool | None = None,
        *,
        image: str | None = None,
        limits: LeaseLimits | None = None,
        share: Share | None = None,
        secrets: Sequence[EgressSecret] = (),
        timeout_s: float | None = None,
    ) -> Slot:
        """Lease a slot; within a share first come, first served.

        Cancelling leaks nothing: a lease granted late is given back.

        Args:
            trajectory_id: for the server's status and logs; one trajectory may hold several slots.
            snapshot: start from this frozen workspace, in a container that has it or can get a copy.
            base: another root file system, by its name in `bases`.
            network: whether the slot gets filtered egress; None: as the pool's `allow_network`.
            image: an image as the root file system: `python:3.13-slim`, `oci-archive:FILE` …; prepared first if need
                be, for which `prepare_timeout_s` is the time. None: the pool's `slot_image`.
            limits: what the slot has instead of the pool's `limits`, up to a whole container; None: those, or the
                snapshot's.
            share: whose lease it is, where several clients with quotas share the pool: a `Share` that is kept for each.
                None: they are one client.
            secrets: what the egress proxy puts into its requests, beside what the share has; only where it has a
                network.
            timeout_s: None: `acquire_timeout_s`.

        Raises:
            AcquireTimeout: no slot came free; says how many containers, slots and waiters there are, and why.
            ImageUnavailable: the image can't be prepared; says which phase failed.
            LimitTooLarge: no container has so much.
            QuotaReached: the share has used up one of its quotas.
            SlotLost: the snapshot is gone.
            NotSupported, ConfigError: the container can't give what was asked for.
            BackendUnavailable: the pool is not running, or was stopped.
        """
        self._state.require_running()
        # A snapshot has its own root and so has a base: the pool's image is only for leases that name nothing.
        if snapshot is None and base is None:
            image = image or self.config.slot_image
        if limits is None and snapshot is not None:
            limits = snapshot.limits
        # The wire's bound (`LeaseRequest.trajectory_id`); the id is for people, so that cutting it does no harm.
        terms = self._terms(trajectory_id[:500], image, network, limits, share, secrets, snapshot, base)
        if limits is not None:
            # At once, not after `acquire_timeout_s`: no container will ever have so much.
            self.config.check_room(limits, self.config.slots_per_container)
        timeout_s = self.config.acquire_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        try:
            return await self._grants.acquire(terms, image, timeout_s)
        except TimeoutError:
            # `from None`: the asyncio.timeout inside is no cause that a reader could act on.
            raise self._timed_out(snapshot, share, timeout_s) from None

    lease = for_a_block(acquire)

    @named_if_wrong
    async def join(
        self,
        slot: Slot,
        names: Sequence[str],
        *,
        its_names: Sequence[str] = (),
        networks: Sequence[str] = (),
        its_networks: Sequence[str] = (),
        image: str | None = None,
        limits: LeaseLimits | None = None,
        network: bool | None = None,
    ) -> Slot:
        """Lease another slot beside one, on a network of their own, where each finds the others by their names.

        All slots of such a group end together, whichever is released or lost. They have neither snapshots nor views.

        Args:
            slot: the first of the group, leased with `LeaseLimits.members`, which keeps the room for the others.
            names: by which the others know the new one.
            its_names: by which all know `slot`; of the first that joins it.
            networks: names of networks within the group: of two slots that name some, and none in common, neither
                reaches the other, nor knows its names. Empty: it is on all.
            its_networks: those of `slot`; of the first that joins it.
            image: as in `acquire`.
            limits: as in `acquire`; no more than one of `members` that nothing has taken yet.
            network: as in `acquire`.

        Raises:
            NotSupported: no room is kept for it, or the container can make no such network.
            ImageUnavailable: the image can't be prepared; says which phase failed.
            LeaseExpired, SlotLost: `slot` is over, or lost.
            ConfigError: a name is none.
        """
        self._state.require_running()
        image = image or self.config.slot_image
        terms = self._terms(slot.trajectory_id, image, network, limits, slot.ticket.share)
        try:
            joins = wire.Joining(
                lease_id=slot.lease.lease_id,
                names=tuple(names),
                its_names=tuple(its_names),
                networks=tuple(networks),
                its_networks=tuple(its_networks),
            )
        except ValidationError as error:
            wrong = error.errors()[0]
            what = "network" if "networks" in str(wrong["loc"][0]) else "slot"
            raise ConfigError(f"{wrong['loc'][0]}: {wrong['input']!r:.80} can't be the name of a {what}") from None
        return await self._grants.join(terms, image, slot, joins)

    def _timed_out(self, snapshot: Snapshot | None, share: Share | None, timeout_s: float) -> AcquireTimeout:
        self._state.counters.timed_out()
        if share not in {None, self.share}:  # its client doesn't learn what others hold
            return AcquireTimeout(f"no slot came free within {timeout_s:g} s")
        why = self._report.situation()
        if snapshot is not None and snapshot.stays_because:
            why = f"{why}; the snapshot can't be copied to another container: {snapshot.stays_because}"
        return AcquireTimeout(f"no slot came free within {timeout_s:g} s: {why}")

    @named_if_wrong
    async def prepare(
        self, image: str | Buildable, *, progress: Progress | None = None, everywhere: bool = True
    ) -> ImageInfo | None:
        """Have all containers pull and unpack an image, or build one, so that leases on it begin at once.

        Args:
            image: as in `acquire`; or what is built: a task, a Dockerfile.
            progress: called with a container's id and how far it is there; of a build, with no id.
            everywhere: wait until all containers have pulled it; else until one has, while the others go on.

        Returns:
            What the image is; its `source` is what leases name. None where no container is up yet: leases on it prepare
            it then.

        Raises:
            ConfigError: it names no image, or no local one.
            ImageUnavailable: it can't be prepared; says which phase failed.
            SlotLost: the containers ended meanwhile.
        """
        self._state.require_running()
        if isinstance(image, str):
            return await self._images.prepare(image, progress, everywhere=everywhere)
        return await image.build(self, lambda state: None if progress is None else progress("", state))

    def building(self, key: str, waiting: Callable[[], None]) -> AbstractAsyncContextManager[ImageInfo | None]:
        """Context in which a builder makes and keeps (`Slot.keep`) the image of a key.

        Yields the image if it exists; else None to one builder at a time, over all processes of this machine. `waiting`
        is called repeatedly while another one builds it; it may raise to end the wait.
        """
        self._state.require_running()
        return self._images.building(key, waiting)

    async def find_built(self, key: str) -> ImageInfo | None:
        """What `Slot.keep` kept under a key, if a host of the pool's containers has it."""
        self._state.require_running()
        return await self._images.find(f"atropos-build:{key}")

    def bound_frames(self, max_batch_size: int) -> None:
        """Change the most calls in a frame, on all connections.

        Raises:
            ConfigError: it is not positive.
        """
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size: {max_batch_size} is not positive")
        self._frames.max_calls = max_batch_size

    def _terms(
        self,
        trajectory_id: str,
        image: str | None,
        network: bool | None,
        limits: LeaseLimits | None,
        share: Share | None,
        secrets: Sequence[EgressSecret] = (),
        snapshot: Snapshot | None = None,
        base: str | None = None,
    ) -> LeaseTerms:
        """What containers are asked for, once the pool's settings allow it."""
        # Its containers are the other pool's: they are not among this one's links, so that the lease would wait
        # forever.
        if snapshot is not None and snapshot.state is not self._state:
            raise ConfigError(f"snapshot {snapshot.id} is another pool's")
        if base is not None and base not in self.config.bases:
            known = ", ".join(sorted(self.config.bases)) or "none"
            raise ConfigError(f"base: {base!r} is not among the pool's bases ({known}): add it to SlotPoolConfig.bases")
        if network and not self.config.allow_network:
            raise ConfigError("network: the pool's slots have none; set SlotPoolConfig.allow_network")
        if image is not None and base is not None:
            raise ConfigError("base and image exclude each other: set one of them")
        network = self.config.allow_network if network is None else network
        if not all(isinstance(each, EgressSecret) for each in cast("Sequence[object]", secrets)):
            raise TypeError("secrets")  # `named_if_wrong` says more
        # Secrets are put in by the egress proxy, so that a slot without a network has no use for them.
        inserted = (*secrets, *(() if share is None else share.secrets)) if network else ()
        if len(inserted) > MAX_SECRETS:
            raise ConfigError(f"secrets: {len(inserted)}; at most {MAX_SECRETS} of one lease")
        if snapshot is None and base is None and image in (None, POOL_BASE):
            self.backend.note_base()
        return LeaseTerms(
            self.client_id, trajectory_id, self.config.lease_ttl_s, snapshot, base, network, limits, share, inserted
        )

    # ------------------------------------------------------------------------------------------------------- stats

    def stats(self) -> PoolStats:
        """One consistent count of everything."""
        return self._report.stats()

    def metrics(self) -> list[Family]:
        """The pool's metrics; `atropos.metrics.exposition` writes them for Prometheus."""
        return self._report.metrics()

    @property
    def share(self) -> Share:
        """The share of leases that name none."""
        return self._state.fleet.share

    @property
    def architecture(self) -> str:
        """What images are built for: its containers' architecture, as images name it.

        Raises:
            ConfigError: they are of several.
        """
        there = [name for name, count in self._state.fleet.architectures.items() if count and name]
        if len(there) > 1:
            raise ConfigError(
                f"architecture: the pool has containers of {' and '.join(sorted(there))}; name one to build images"
            )
        return there[0] if there else self.config.built_for

    @property
    def links(self) -> Mapping[str, ContainerLink]:
        """The containers that the pool is connected to, or connecting to, by id; for diagnosis."""
        return MappingProxyType(self._links)

    def trouble(self) -> str:
        """Why containers are not coming; empty when all is well."""
        return self._report.trouble()

    def outage(self) -> str:
        """Why the engine doesn't answer, while no container can be leased from; empty otherwise."""
        return self._state.outage()

    async def wait_for_engine(self) -> None:
        """Wait until the engine answers, or a container can be leased from; at most as long as `outage_s` allows.

        Raises:
            BackendUnavailable: neither happened.
        """
        while self.outage():
            self._state.require_running()
            if (failure := self._state.hopeless()) is not None:
                raise failure
            self._state.news.clear()
            await self._state.news.wait()

    async def _guard(self, loop: Coroutine[object, object, None]) -> None:
        """Run a loop that must not end: a bug in it stops the pool from granting slots, with that error."""
        try:
            await loop
        except Exception as error:
            log.exception("the pool's own loop failed")
            # Without its loops the pool would grant from what it has and never notice a lost container.
            self._state.give_up(SandboxError(f"the pool's own loop failed: {error!r}"))

    def _sandbox_client(
        self,
        container: Container,
        on_lease_ended: Callable[[wire.LeaseEnded], None],
        on_capacity: Callable[[Resources], None],
    ) -> SandboxClient:
        assert container.url is not None
        return SandboxClient(
            container.url,
            container.token,
            client_id=self.client_id,
            frames=self._frames,
            on_lease_ended=on_lease_ended,
            on_capacity=on_capacity,
            reconnect_s=self.config.reconnect_s,
            certificate=container.certificate,
            archives=self._images.archives,
        )
