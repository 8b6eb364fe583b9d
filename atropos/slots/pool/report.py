"""What a pool says of itself: its counts, metrics and state in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from atropos.metrics import Family, gauge
from atropos.slots.containers.keeper import Keeper
from atropos.slots.containers.link import ContainerLink
from atropos.slots.containers.state import SharedState
from atropos.slots.pool.stats import Percentiles, PoolStats, gauges


class PoolReport:
    """Looks at the parts of a pool, and changes none."""

    def __init__(self, state: SharedState, links: Mapping[str, ContainerLink], keeper: Keeper) -> None:
        self._state, self._links, self._keeper = state, links, keeper
        self._config, self._backend = state.config, state.backend

    def stats(self) -> PoolStats:
        """One consistent count of everything."""
        counters = self._state.counters
        return replace(
            self._counts(), acquire=Percentiles.of(counters.acquire_s), reset=Percentiles.of(counters.reset_s)
        )

    def _counts(self) -> PoolStats:
        """As `stats`, without percentiles, which sort thousands of samples."""
        fleet, counters = self._state.fleet, self._state.counters
        return PoolStats(
            containers=self._keeper.containers,
            ready=fleet.ready,
            slots=sum(seat.slots for seat in fleet.seats.values()),
            free=fleet.free,
            # A grant under way counts as leased, or free + leased + retired would drop for each round trip.
            leased=fleet.leased + fleet.reserved,
            retired=sum(seat.retired for seat in fleet.seats.values()),
            waiting=fleet.waiting + fleet.pinned_waiting,
            snapshots=sum(len(link.snapshots) for link in self._links.values()),
            leases=counters.leases,
            releases=counters.releases,
            lost=counters.lost,
            timeouts=counters.timeouts,
            trouble=self.trouble(),
        )

    def metrics(self) -> list[Family]:
        """The same for Prometheus."""
        families = [*gauges(self._counts(), self._containers()), *self._state.counters.families()]
        if self._config.gpus:
            leased = sum(seat.leased_room.gpus for seat in self._state.fleet.seats.values())
            text = "GPUs that this pool has leased, by type."
            families.append(gauge("atropos_pool_gpus_leased", text, {self._config.gpu_type or "": leased}, "type"))
        return families

    def _containers(self) -> dict[str, int]:
        """How many containers there are in each state, the same states each time."""
        # All states, the empty ones too: an alert or a sum over a series that is missing has no value.
        states: dict[str, int] = dict.fromkeys(("starting", "connecting", "ready", "draining", "ending", "dead"), 0)
        for container in self._backend.containers():
            state: str = container.state
            if state == "running":
                seat = self._state.fleet.seats.get(container.id)
                state = "connecting" if seat is None else "ready" if seat.open else "draining"
            states[state] += 1
        return states

    def trouble(self) -> str:
        """Why containers are not coming; empty when all is well."""
        failure = self._state.failure()
        return (str(failure) if failure else "") or self._backend.trouble() or self._keeper.trouble

    def awaited(self) -> str:
        """What is waited for where neither the backend nor the keeper has trouble: a container that starts."""
        for container in self._backend.containers():
            if container.state == "starting" and container.detail:
                return f"container {container.id} is starting: {container.detail}"
            if container.url is not None:
                return f"no server answers at {container.url}: can that address be reached from here?"
            return f"container {container.id} has not started yet"
        return "the backend has no container yet"

    def situation(self) -> str:
        """Containers, slots and acquires in a line, and why there are not more."""
        s = self._counts()
        text = (
            f"{s.ready} of {s.containers} containers ready (at most {self._config.max_containers}), "
            f"{s.slots} slots ({s.free} free, {s.leased} leased, {s.retired} retired), {s.waiting} waiting"
        )
        # `awaited` explains a wait for the first container only; with one ready, the others just aren't needed yet.
        reason = s.trouble or (self.awaited() if s.containers and not s.ready else "")
        return f"{text}; backend: {reason}" if reason else text
