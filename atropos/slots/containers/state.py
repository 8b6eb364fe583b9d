"""What the parts of a pool share: fleet, counters, tasks, clock and waiting acquires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Literal

from atropos.aio import Tasks
from atropos.errors import BackendUnavailable
from atropos.slots.backends.base import Backend
from atropos.slots.config import SlotPoolConfig
from atropos.slots.containers.counters import Counters
from atropos.slots.containers.fleet import Fleet
from atropos.slots.containers.seats import Ticket

Phase = Literal["new", "starting", "running", "stopping", "stopped"]


class SharedState:
    """A pool's shared state.

    Parts change it, its fleet and its counters through their methods, and never call each other upwards.

    Attributes:
        tasks: all background work but the pool's own loops.
        news: set when something that `start` or `wait_for_engine` may wait for has changed; cleared by them.
        demand: set when the number of containers should be planned again; cleared by the keeper, which plans.
        room: set when leases that are not in line yet, for want of their image, may look again; cleared by them.
    """

    def __init__(self, config: SlotPoolConfig, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.phase: Phase = "new"
        self.fleet = Fleet(config.slot_room, devices=config.beside(config.slots_per_container))
        self.counters = Counters()
        self.tasks = Tasks("pool")
        self.news = asyncio.Event()
        self.demand = asyncio.Event()
        self.room = asyncio.Event()
        self._returning: set[asyncio.Task[None]] = set()
        """Releases and drops under way."""
        self._doubtful: set[str] = set()
        """Containers whose free room is not known."""
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        """The acquires in line."""
        self._refusal: Exception | None = None
        """What a container lacks that the configuration requires, until another one has joined."""
        self._broken: Exception | None = None

    def now(self) -> float:
        """The pool's clock: monotonic seconds."""
        return time.monotonic()

    def give_back(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Start a release or drop, which continues when its caller is cancelled."""
        task = self.tasks.spawn(work, name)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
        return task

    async def returned(self, within_s: float) -> None:
        """Wait until all releases and drops have ended."""
        if self._returning:
            await asyncio.wait(self._returning, timeout=within_s)

    def enter(self, phase: Phase) -> None:
        """The pool's life goes on."""
        # A waiting `start` reads the phase anew, hence the news.
        self.phase = phase
        self.news.set()

    def require_running(self) -> None:
        """Raise `BackendUnavailable` unless the pool gives slots."""
        if self.phase != "running":
            how = "start it first, or use `async with`" if self.phase == "new" else "it gives no more slots"
            raise BackendUnavailable(f"the pool is {self.phase}: {how}")

    # ------------------------------------------------------------------------------------------------------- doubts

    def doubt(self, container: str) -> None:
        """What a container has free is not known; it is polled again when an acquire waits."""
        self._doubtful.add(container)

    def trust(self, container: str) -> None:
        """It need not be polled."""
        self._doubtful.discard(container)

    def doubted(self) -> Iterator[str]:
        """The containers to poll; each is doubted no more."""
        # Popped one by one: a poll that is started here may doubt the same container again.
        while self._doubtful:
            yield self._doubtful.pop()

    # ------------------------------------------------------------------------------------------------------ waiters

    @contextmanager
    def in_line(self, ticket: Ticket) -> Generator[asyncio.Future[None]]:
        """An acquire's wait for room; the future is done when it waits no more. An error gives up what it had."""
        self._waiters[ticket] = asyncio.get_running_loop().create_future()
        self.fleet.ask(ticket)
        try:
            yield self._waiters[ticket]
        except BaseException:
            # A cancellation may come after room was reserved: then the ticket has left the line, but has a seat.
            self.fleet.withdraw(ticket)
            if ticket.seat is not None:
                self.fleet.cancel_reservation(ticket)
            self.serve()  # its room, or the room kept for it, may serve another
            raise
        finally:
            self._waiters.pop(ticket, None)

    def serve(self) -> None:
        """Give free slots to waiting acquires."""
        for ticket in self.fleet.match():
            self.wake(ticket)
        self.look_again()

    def look_again(self) -> None:
        """Wake the leases that wait for their image."""
        self.room.set()

    def wake(self, ticket: Ticket) -> None:
        """An acquire stops waiting: room is reserved for it, or its only possible container takes no leases."""
        # Resolved through a future and not an event: a ticket is woken once, by whichever of several reasons comes
        # first.
        future = self._waiters[ticket]
        if not future.done():
            future.set_result(None)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """End a waiting acquire that can't be served any more."""
        future = self._waiters[ticket]
        if not future.done():
            future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """End every waiting acquire."""
        for ticket in list(self._waiters):
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
        self._refusal = error
        self.changed()

    def accept(self) -> None:
        """Record that a container has what the configuration requires."""
        self._refusal = None
        self.changed()

    def give_up(self, error: Exception) -> None:
        """Record that the pool's own loops failed, which nothing mends."""
        self._broken = error
        self.changed()

    def failure(self) -> Exception | None:
        """Why no container will ever be usable; None while one may be."""
        # In the order of finality: a broken loop never recovers, a refusal ends with the next good container.
        return self._broken or self.backend.failure() or self._refusal

    def hopeless(self) -> Exception | None:
        """Why no waiting acquire can be served; None while a container or the engine may still serve one."""
        failure = self.failure()
        # A container that can be leased from may still serve the line, however the engine is.
        if failure is None or self.fleet.ready:
            return None
        return failure if self.outage() or not self.fleet.expected else None

    def outage(self) -> str:
        """Why the engine doesn't answer, while no container can be leased from; empty otherwise."""
        return "" if self.fleet.ready else self.backend.outage()
