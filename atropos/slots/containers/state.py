"""What the parts of a pool share: fleet, counters, tasks, clock and waiting acquires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Literal

from atropos.errors import BackendUnavailable
from atropos.slots.backends.base import Backend
from atropos.slots.config import SlotPoolConfig
from atropos.slots.containers.counters import Counters
from atropos.slots.containers.fleet import Fleet, Ticket
from atropos.slots.task_owner import Tasks


class SharedState:
    """A pool's shared state. Parts change it through its methods and never call each other upwards.

    Attributes:
        tasks: all background work but the pool's own loops.
        returning: releases and drops under way; `SlotPool.stop` waits for them.
        doubtful: ids of containers whose free slots are not known; polled again when an acquire waits.
        news: set when something that `start` or `wait_for_engine` may wait for has changed.
        demand: set when the number of containers should be planned again.
        room: set when leases that are not in line yet, for want of their image, may look again.
        waiters: the acquires in line.
        refusal: what a container lacks that the configuration requires; None once another one has joined.
    """

    def __init__(self, config: SlotPoolConfig, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.phase: Literal["new", "starting", "running", "stopping", "stopped"] = "new"
        self.fleet = Fleet(config.slot_room)
        self.counters = Counters()
        self.tasks = Tasks("pool")
        self.returning: set[asyncio.Task[None]] = set()
        self.doubtful: set[str] = set()
        self.news = asyncio.Event()
        self.demand = asyncio.Event()
        self.room = asyncio.Event()
        self.waiters: dict[Ticket, asyncio.Future[None]] = {}
        self.refusal: Exception | None = None
        self._broken: Exception | None = None

    def now(self) -> float:
        """The pool's clock: monotonic seconds."""
        return time.monotonic()

    def give_back(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Start a release or drop, which continues when its caller is cancelled."""
        task = self.tasks.spawn(work, name)
        self.returning.add(task)
        task.add_done_callback(self.returning.discard)
        return task

    def require_running(self) -> None:
        """Raise `BackendUnavailable` unless the pool gives slots."""
        if self.phase != "running":
            how = "start it first, or use `async with`" if self.phase == "new" else "it gives no more slots"
            raise BackendUnavailable(f"the pool is {self.phase}: {how}")

    # ------------------------------------------------------------------------------------------------------ waiters

    def serve(self) -> None:
        """Give free slots to waiting acquires."""
        for ticket in self.fleet.match():
            self.wake(ticket)
        self.room.set()

    def wake(self, ticket: Ticket) -> None:
        """An acquire waits no more: room is reserved for it, or the only container that could serve it takes no leases."""
        future = self.waiters[ticket]
        if not future.done():
            future.set_result(None)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """End a waiting acquire that can't be served any more."""
        self.fleet.withdraw(ticket)
        future = self.waiters[ticket]
        if not future.done():
            future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """End every waiting acquire."""
        for ticket in list(self.waiters):
            self.fail(ticket, error)

    # --------------------------------------------------------------------------------------------------------- news

    def replan(self) -> None:
        """Plan the number of containers again."""
        self.demand.set()

    def changed(self) -> None:
        """Wake `start` and `wait_for_engine`; fail the waiting acquires where none can be served any more."""
        self.news.set()
        if (failure := self.hopeless()) is not None:
            self.fail_all(failure)

    def refuse(self, error: Exception) -> None:
        """Record that containers start but lack what the configuration requires."""
        self.refusal = error
        self.changed()

    def give_up(self, error: Exception) -> None:
        """Record that the pool's own loops failed, which nothing mends."""
        self._broken = error
        self.changed()

    def failure(self) -> Exception | None:
        """Why no container will ever be usable; None while one may be."""
        return self._broken or self.backend.failure() or self.refusal

    def hopeless(self) -> Exception | None:
        """Why no waiting acquire can be served; None while a container or the engine may still serve one."""
        failure = self.failure()
        if failure is None or self.fleet.ready:
            return None
        return failure if self.outage() or not self.fleet.expected else None

    def outage(self) -> str:
        """Why the engine doesn't answer, while no container can be leased from; empty otherwise."""
        return "" if self.fleet.ready else self.backend.outage()
