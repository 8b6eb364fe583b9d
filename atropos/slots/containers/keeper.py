"""Keeps a pool's containers in line with its backend and its demand: two loops that carry out pure decisions."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from atropos.aio import Backoff, set_within
from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable, SandboxError
from atropos.slots.backends.container import Container
from atropos.slots.containers.link import ClientFactory, ContainerLink
from atropos.slots.containers.scaling import Limits, PoolState, plan, worn_out
from atropos.slots.containers.state import SharedState

log = logging.getLogger("atropos.slots")

ASK_AGAIN_S = 5.0
"""Pause before containers that did not appear are requested again: another process may have shrunk the job."""
RELINK_S = 5.0
"""How long a lost server may take to answer again (it may have been restarted in place) before it is replaced."""
RECONCILE_PAUSE = 10.0
"""Pause after a reconcile, in times of its CPU time: it reads all containers, and thousands may change one by one."""
ANSWER_S = 3.0
"""How long a container may take to say whether it is used; scaling waits for the answer."""
REFUSED_S = (0.5, 10.0)
"""First and longest pause after the backend refused to scale."""


class Keeper:
    """Watches the backend, connects what it has, and asks it for more or less.

    Args:
        state: the pool's.
        links: the containers that it is connected to, by id; kept here.
        make_client: how a container is connected to.
    """

    def __init__(self, state: SharedState, links: dict[str, ContainerLink], make_client: ClientFactory) -> None:
        self._state = state
        self._backend = state.backend
        self._links = links
        self._condemned: dict[str, float] = {}
        """Containers that are not connected to, and until when, by the pool's clock: the backend may be unable to
        replace them."""
        self._old_snapshots: dict[str, set[str]] = {}
        """Snapshots that containers may still have from before they were lost, by the container's id."""
        self._worn: set[str] = set()
        """Containers that were closed because of their retired slots; replaced when their leases have ended."""
        self.asked = 0
        self.trouble = ""
        config = state.config
        self._limits = Limits(
            min_containers=config.min_containers,
            max_containers=config.max_containers,
            slots_per_container=config.slots_per_container,
            idle_s=config.idle_container_s,
        )
        self._make_client = make_client
        self._seen = 0
        self._asked_at = 0.0
        self._wanted_at = 0.0
        """When an acquire last waited, or more containers were requested, by the pool's clock."""

    # -------------------------------------------------------------------------------------------------- reconcile

    async def watch(self) -> None:
        """Follow the backend's containers until cancelled."""
        self._wanted_at = self._state.now()
        while True:
            await self._backend.changed()
            # CPU time and not wall time: on a busy machine the pause would grow with other programs' work.
            began = time.thread_time()
            self.reconcile()
            self._state.changed()
            await asyncio.sleep(RECONCILE_PAUSE * (time.thread_time() - began))

    def reconcile(self) -> None:
        """Connect to what is new and running; drop what the backend says is gone.

        Unknown is not empty: a failed poll leaves `containers()` as it was.
        """
        listed = {container.id: container for container in self._backend.containers()}
        # Ending containers don't count: their replacement is asked for while they still drain.
        self._seen = sum(container.state in {"starting", "running"} for container in listed.values())
        for key, link in list(self._links.items()):
            container = listed.get(key)
            if container is None or container.state == "dead":
                self._drop(link, (container.detail if container else "") or "the backend no longer lists it")
            else:
                link.container = container
                if container.state == "ending":
                    # Its leases go on; only new ones would be cut off when it ends.
                    link.close()
        now = self._state.now()
        for key, container in listed.items():
            due = self._condemned.get(key)
            if (
                container.state == "running"
                and container.url
                and key not in self._links
                and (due is None or due <= now)
            ):
                # A condemned container has had its full time before; it is tried again in case only the engine was
                # away.
                self._connect(container, self._state.config.start_timeout_s if due is None else RELINK_S)
        # What the backend no longer lists is forgotten, so that neither table grows with the pool's life.
        self._condemned = {key: due for key, due in self._condemned.items() if key in listed and due > now}
        self._old_snapshots = {key: names for key, names in self._old_snapshots.items() if key in listed}
        self._state.replan()

    def _connect(self, container: Container, patience_s: float) -> None:
        link = self._links[container.id] = ContainerLink(self._state, container, self._make_client, self._condemn)
        link.task = self._state.tasks.spawn(self._live(link, patience_s), f"container {container.id}")

    async def _live(self, link: ContainerLink, patience_s: float) -> None:
        """Connect, join the fleet, and stay until the server is lost; runs as the link's own task."""
        try:
            async with asyncio.timeout(patience_s):
                await link.connect()
                # Before it joins: a fork could otherwise be sent to a snapshot that is about to go.
                await self._drop_old_snapshots(link)
                status = await link.client.status()
        except TimeoutError:
            await self._condemn(link, f"its sandbox server did not answer within {patience_s:g} s")
            return
        except (SandboxError, ConfigError) as error:
            if isinstance(error, IsolationUnavailable | ConfigError):
                # Every container comes from one configuration, so that the next one will most likely be refused, too.
                self._state.refuse(error)
            await self._condemn(link, f"the sandbox server did not become usable: {error}")
            return
        link.join(status)
        await link.client.lost.wait()
        # `lose` of another path has dropped it already, and may have connected to its successor.
        if link.gone is None:
            # Its leases end here in any case: a restarted server has another boot_id and knows none of them.
            self._drop(link, "the sandbox server is gone or does not answer")
            if link.container.state == "running":  # it may have been restarted in place
                self._connect(link.container, RELINK_S)

    def _drop(self, link: ContainerLink, reason: str) -> None:
        """Forget a container; its leases end as lost."""
        if self._links.pop(link.container.id, None) is not None:
            # in an outage every attempt ends so, and the outage itself was logged
            never_joined = self._backend.outage() and link.seat.key not in self._state.fleet.seats
            log.log(
                logging.DEBUG if never_joined else logging.INFO, "container %s is gone: %s", link.container.id, reason
            )
        if link.snapshots:
            # Before `lose`, which clears the link's own set.
            self._old_snapshots.setdefault(link.container.id, set()).update(each.id for each in link.snapshots)
        link.lose(reason)
        self._state.serve()
        self._state.replan()

    async def _drop_old_snapshots(self, link: ContainerLink) -> None:
        """Drop this pool's old snapshots on a server that came back: it has ended its leases, but keeps snapshots."""
        snapshot_ids = self._old_snapshots.get(link.container.id, set())
        for snapshot_id in list(snapshot_ids):
            await link.client.drop_snapshot(snapshot_id)
            snapshot_ids.discard(snapshot_id)

    async def _condemn(self, link: ContainerLink, reason: str) -> None:
        """Drop a container that is listed but can't be used, and have the backend replace it.

        If the backend can't replace it now, reconnect later: perhaps only the engine was unreachable.
        """
        if link.gone is not None:
            return
        self._condemned[link.container.id] = math.inf  # it is still listed, and must not be connected to meanwhile
        self._drop(link, reason)
        try:
            await self._backend.retire(link.container)
        except (SandboxError, NotImplementedError) as error:
            self.trouble = f"container {link.container.id} could not be replaced: {error}"
            log.log(self._refusal_level, "%s", self.trouble)
            # NotImplementedError: the backend can't replace single containers, now or later; it stays condemned.
            if isinstance(error, SandboxError):
                self._condemned[link.container.id] = self._state.now() + ASK_AGAIN_S

    @property
    def _reconnect_in_s(self) -> float:
        """Time until a container that could not be replaced is connected to again, in seconds."""
        return max(0.0, min(self._condemned.values(), default=math.inf) - self._state.now())

    # ---------------------------------------------------------------------------------------------------- scaling

    @property
    def _refusal_level(self) -> int:
        """Log level of a refusal; lower during an outage that was already logged."""
        return logging.DEBUG if self._backend.outage() else logging.WARNING

    @property
    def containers(self) -> int:
        """Asked for or seen, and not ending."""
        # Seen may lag behind what was asked for, and exceeds it where another pool of the job needs more.
        return max(self._seen, self.asked)

    def _scaling_state(self) -> PoolState:
        """The input of `plan`."""
        fleet = self._state.fleet
        return PoolState(
            containers=self.containers,
            ready=fleet.ready,
            waiting=fleet.wanted_slots,
            needed=self._needed(),
            closing=self._closing(),
            late=max(0, self.asked - self._seen) if self._state.now() > self._wanted_at + self._limits.idle_s else 0,
        )

    def _closing(self) -> int:
        """How many containers run but take no new leases."""
        if len(self._state.fleet.seats) == self._state.fleet.ready:
            return 0
        return sum(
            link.container.state == "running" and link.seat.key in self._state.fleet.seats and not link.seat.open
            for link in self._links.values()
        )

    def _needed(self) -> int:
        """The number of containers up to the highest index in use; all of them while acquires wait."""
        fleet = self._state.fleet
        # Nothing shrinks while an acquire waits, whichever container it will get.
        if fleet.wanted_slots:
            return self.containers
        limit = self._state.now() - self._limits.idle_s
        # Backends end the highest index first: all below one that is in use have to stay.
        busy = (seat.index + 1 for seat in fleet.seats.values() if seat.busy or seat.idle_since > limit)
        return max(busy, default=0)

    async def scale(self) -> None:
        """Scale the backend as `plan` decides, until cancelled; refusals are logged and retried with back-off."""
        backoff = Backoff(*REFUSED_S)
        while True:
            # Before the state is read, so that a change during the awaits below plans once more.
            self._state.demand.clear()
            # No event comes when a condemned container is due again: the clock alone says so.
            if self._reconnect_in_s == 0:
                self.reconcile()
            if self._state.fleet.wanted_slots:
                self._wanted_at = self._state.now()
            situation = self._scaling_state()
            # Before scaling: a closed container's slots no longer count when the target is decided.
            await self._replace_worn(situation)
            decided = plan(situation, self._limits)
            grow = decided.target > self.containers or self._missing(decided.target)
            if grow or (decided.target < self.containers and await self._idle_for_all(decided.target)):
                try:
                    await self.ask(decided.target, decided.reason)
                    backoff.worked()
                except BackendUnavailable as error:
                    log.log(self._refusal_level, "the backend refused %d containers: %s", decided.target, error)
                    self.trouble = str(error)
                    await asyncio.sleep(backoff.failed())
                    self._state.replan()
            elif not self._condemned:
                self.trouble = ""
            # A quarter of the idle time: a container is closed at most that much later than it could be.
            pause_s = min(ASK_AGAIN_S, max(0.05, self._limits.idle_s / 4), self._reconnect_in_s)
            if await set_within(self._state.demand, pause_s):
                await asyncio.sleep(0)  # acquires of the same turn of the loop are planned for together

    async def _replace_worn(self, situation: PoolState) -> None:
        """Close a container whose retired slots are needed, and replace closed ones that have become empty."""
        if (seat := worn_out(situation, self._limits, self._state.fleet.seats.values())) is not None:
            log.info(
                "container %s: %d of %d slots are retired; it takes no leases and is replaced",
                seat.key,
                seat.retired,
                seat.slots,
            )
            # By key: a worn container that loses its connection and comes back is still worn.
            self._worn.add(seat.key)
            self._links[seat.key].close()
        self._worn &= self._links.keys()
        for link in [self._links[key] for key in self._worn]:
            if not link.seat.busy and await self._unused(link):
                await self._condemn(link, f"{link.seat.retired} of its {link.seat.slots} slots were retired")

    def _missing(self, target: int) -> bool:
        """Whether containers that were requested a while ago have not appeared."""
        return self._seen < target and self._state.now() > self._asked_at + ASK_AGAIN_S

    async def ask(self, count: int, reason: str) -> None:
        """Request a number of containers from the backend."""
        if count != self.asked:
            level = logging.DEBUG if self._backend.outage() else logging.INFO
            log.log(level, "%d containers are requested (%d before): %s", count, self.containers, reason)
        before = self.asked
        self.asked = count
        # Set before the request: `scale` may take longer than ASK_AGAIN_S, and must not be repeated for that.
        self._asked_at = self._state.now()
        if count > before:
            self._wanted_at = self._asked_at
        try:
            await self._backend.scale(count)
        except BaseException:
            # BaseException: a cancelled request may or may not have reached the engine; asking again does no harm.
            self.asked = before
            raise
        self.trouble = ""
        self._seen = sum(container.state in {"starting", "running"} for container in self._backend.containers())

    async def _idle_for_all(self, target: int) -> bool:
        """Whether no other client holds leases in the containers that shrinking to `target` would end."""
        links = [link for link in self._links.values() if link.seat.index >= target]
        for link in links:
            if not await self._unused(link):
                # Its use by others counts like this pool's own, and postpones the next question by `idle_s`.
                link.seat.used(self._state.now())
                return False
        return not any(link.seat.busy for link in links)  # the first may have been leased from meanwhile

    async def _unused(self, link: ContainerLink) -> bool:
        """Whether no client holds a lease in a container; False if it doesn't answer within `ANSWER_S`."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await link.client.status()
        except (SandboxError, TimeoutError):
            return False
        return not status.leased and not link.seat.busy
