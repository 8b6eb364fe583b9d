"""The server's leases at work: carries out what `leases` decides, on sandboxes from `warm`.

One `LeaseRun` a lease. Its end runs as a task of its own, so that nobody's cancellation interrupts a reset.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from atropos.config import ServerConfig
from atropos.errors import (
    BackendUnavailable,
    LeaseExpired,
    LimitTooLarge,
    NotSupported,
    PoolFull,
    SandboxError,
    SlotLost,
    from_code,
)
from atropos.sandbox.contract import Host, NoOtherRoot, Sandbox, Stopped
from atropos.sandbox.server.clients import ClientTable
from atropos.sandbox.server.images import Images
from atropos.sandbox.server.lanes import Lanes
from atropos.sandbox.server.lease_run import LeaseRun
from atropos.sandbox.server.leases import EndedLease, HeldLease, LeaseGrant, LeaseTable
from atropos.sandbox.server.metrics import Meters
from atropos.sandbox.server.snapshot_store import MIB, SnapshotStore
from atropos.sandbox.server.warm_pool import WarmPool
from atropos.sandbox.server.workspaces import Workspaces
from atropos.wire import Capacity, Feature, Lease, LeaseRequest, ReleaseResult

if TYPE_CHECKING:
    from atropos.sandbox.server.file_streams import FileStreams
    from atropos.sandbox.server.stream import Stream

log = logging.getLogger(__name__)
START_S = 30.0
"""Longest an acquire waits for a sandbox to start, in seconds."""
PARALLEL_IMPORTS = 2
"""Snapshots unpacked at once; 26 at once delayed calls of neighbours by seconds."""
PARALLEL_STARTS = 4
"""Sandboxes started at once: measured on 2 cores, more only makes each slower."""


class Core:
    """All state of one sandbox server.

    Args:
        config: the server's settings.
        host: makes the sandboxes.
        clock: monotonic seconds; tests step it.
    """

    def __init__(self, config: ServerConfig, host: Host, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.host = host
        self.boot_id = uuid.uuid4().hex
        self.features: Sequence[Feature] = ()
        self.limit_note: str | None = None
        self.table = LeaseTable(config.slots, config.limits.memory_mib)
        self.runs: dict[str, LeaseRun] = {}
        self.snapshots = SnapshotStore(config.max_snapshots, config.max_snapshot_mib * MIB, host.max_layers)
        self.clients = ClientTable(self)
        self.images = Images(self)
        self.workspaces = Workspaces(self)
        self.arriving: dict[str, asyncio.Event] = {}
        """Snapshots that are being imported, each with what is set when that is over."""
        self.unpacking = asyncio.Semaphore(PARALLEL_IMPORTS)
        self.counters: Counter[str] = Counter()
        self.meters = Meters()
        self.broken = ""
        self.idle = asyncio.Event()
        self.idle.set()
        self.short_ttl = asyncio.Event()
        self.streams: set[Stream] = set()
        self._clock = clock
        self._asleep_s = 0.0
        self.started_at = clock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._later: set[asyncio.Task[Any]] = set()
        spare = config.warm if config.warm is not None else min(4, max(1, config.slots // 4))
        self.warm_pool = WarmPool(
            host,
            target=lambda: self._wanted_warm(spare),
            parallel=PARALLEL_STARTS,
            broken=self.breaks,
            network=config.allow_network,
        )

    # ----------------------------------------------------------------------------------------------------------- time

    def now(self) -> float:
        """Seconds of a monotonic clock that stands still while this process was stopped: see `forgive`."""
        return self._clock() - self._asleep_s

    def forgive(self, gap_s: float) -> None:
        """The whole process slept (SIGSTOP, a frozen machine): that time counts against nobody's lease.

        What was heard since it woke up has the time before this: left so, a client that died then would live on as long.
        """
        self._asleep_s += gap_s
        self.table.awoke(self.now())
        for stream in self.streams:
            stream.heard_at = min(stream.heard_at, self.now())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something of the server's own; `aclose` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _wanted_warm(self, spare: int) -> int:
        return 0 if self.table.draining else self.table.free + spare

    # --------------------------------------------------------------------------------------------------------- leasing

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Grant a lease, or tell why not.

        Raises:
            PoolFull: there is no room for this client now.
            NotSupported: the server doesn't do what is asked for (base, network, limits).
            BackendUnavailable: draining, or no sandbox could be started.
            LeaseExpired: a lease of this id is over.
        """
        base = self._check(request)
        decision = self.table.grant(request, self.now(), self.config.room_mib(request.limits))
        if not isinstance(decision, LeaseGrant):
            self.counters["leases_refused"] += 1
            if decision.code == PoolFull.code:
                raise PoolFull(decision.message, free_mib=decision.free_mib)
            raise from_code(decision.code, decision.message)
        if decision.new:
            self.idle.clear()
            limits = None if request.limits is None else self.config.limits_of(request.limits)
            run = self.runs[request.lease_id] = LeaseRun(decision.held, base, limits)
            run.starting = self.spawn(self._start(run))
            self.clients.of(request.client_id)
            if request.ttl_s < 4:
                self.short_ttl.set()
        starting = self.runs[request.lease_id].starting
        assert starting is not None
        return await asyncio.shield(starting)

    def _check(self, request: LeaseRequest) -> str | None:
        if request.network and not self.config.allow_network:
            raise NotSupported("network: this server gives no slot a network (allow_network is false)")
        if request.limits is not None:
            try:
                self.config.check_room(request.limits, self.config.slots)
            except LimitTooLarge as error:
                raise NotSupported(str(error)) from None
        return self.images.base_of(request)

    async def _start(self, run: LeaseRun) -> Lease:
        held = run.held
        began, warm = time.monotonic(), self.warm_pool.has(network=held.request.network)
        try:
            sandbox = await self._sandbox_for(run)
        except BaseException as error:
            code = error.code if isinstance(error, SandboxError) else BackendUnavailable.code
            self._granted(held, began, code, warm=warm)
            self.workspaces.leave(run)
            if self.table.begin_end(held, code, str(error)):
                self._finish(run, Stopped(clean=True, seconds=0))
            if not isinstance(error, SandboxError | asyncio.CancelledError):
                log.exception("lease %s could not be started", held.lease_id)
                raise BackendUnavailable(f"the sandbox could not be started: {error!r}") from error
            raise
        run.sandbox = sandbox
        if held.state == "ending":  # released while it started; its end waits for this task and stops the sandbox
            raise LeaseExpired("the lease was released before it was granted")
        client = self.clients.of(held.client_id)
        run.lanes = Lanes(sandbox, client.journal, client.answered, client.room, self.meters)
        held.state = "active"
        held.renewed_at = self.now()
        self.watch(run, sandbox)
        self._granted(held, began, "ok", warm=warm)
        self.counters["leases_granted"] += 1
        self.warm_pool.fill()
        return self.lease_of(held)

    def _granted(self, held: HeldLease, began: float, result: str, *, warm: bool) -> None:
        took = time.monotonic() - began
        if held.request.snapshot is not None:
            self.meters.fork.observe(took, result)
        else:
            self.meters.acquire.observe(took, "warm" if warm else "cold", result)

    async def _sandbox_for(self, run: LeaseRun) -> Sandbox:
        request = run.held.request
        if request.snapshot is not None:
            snapshot = self.snapshots.get(request.snapshot)
            if run.base is not None and run.base != snapshot.base:
                raise NotSupported(f"the snapshot stands on base {snapshot.base!r}, not {run.base!r}")
            run.base = snapshot.base
            self.workspaces.stand_on(run, snapshot)
        return await self.take(run)

    async def take(self, run: LeaseRun, hosts: tuple[str, ...] | None = None) -> Sandbox:
        """A sandbox of the lease's size, on its layers and base, and with what its network was narrowed to."""
        try:
            return await self._take_one(run, hosts)
        except NoOtherRoot as error:  # its PID 1 was killed meanwhile, say
            log.warning("lease %s: %s; another sandbox is taken", run.held.lease_id, error)
            return await self._take_one(run, hosts)

    async def _take_one(self, run: LeaseRun, hosts: tuple[str, ...] | None) -> Sandbox:
        sandbox = await self.warm_pool.take(START_S, network=run.held.request.network)
        try:
            if run.limits is not None:
                sandbox.resize(run.limits)
            if run.layers or run.base is not None:
                await sandbox.stand_on(run.layers, run.base)
            if hosts is not None:
                await sandbox.set_network(hosts)
        except BaseException:
            self.warm_pool.drop(sandbox, "it did not become what was asked for")
            raise
        return sandbox

    def lease_of(self, held: HeldLease) -> Lease:
        """The lease as its client sees it."""
        return Lease(
            lease_id=held.lease_id,
            slot=f"slot-{held.slot}",
            epoch=held.epoch,
            boot_id=self.boot_id,
            ttl_s=held.request.ttl_s,
            limit_note=self.limit_note,
            image=self.images.image(self.runs[held.lease_id].base),
        )

    def watch(self, run: LeaseRun, sandbox: Sandbox) -> None:
        """End the lease when this sandbox of it dies."""

        def died(future: asyncio.Future[str]) -> None:
            if not future.cancelled() and sandbox in (run.sandbox, run.agent):
                self.counters["sandboxes_died"] += 1
                self.end(run.held, SlotLost.code, f"the sandbox ended: {future.result()}")

        sandbox.died.add_done_callback(died)

    def renew(self, lease_id: str, epoch: int | None) -> Lease:
        """Renew one lease.

        Raises:
            LeaseExpired: it is over.
        """
        run = self.run_of(lease_id, epoch)
        self.check_active(run)
        run.held.renewed_at = self.now()
        return self.lease_of(run.held)

    def streams_of(self, lease_id: str, epoch: int | None) -> FileStreams:
        """The file streams of a lease.

        Raises:
            LeaseExpired: it is over.
        """
        run = self.run_of(lease_id, epoch)
        if run.lanes is None:
            raise LeaseExpired(f"lease {lease_id!r} has not been granted yet")
        return run.lanes.streams

    def run_of(self, lease_id: str, epoch: int | None) -> LeaseRun:
        """What serves a lease.

        Raises:
            LeaseExpired: it is over.
        """
        if not isinstance(self.table.find(lease_id, epoch), HeldLease) or lease_id not in self.runs:
            raise LeaseExpired(f"lease {lease_id!r} is over or was never granted")
        return self.runs[lease_id]

    def check_active(self, run: LeaseRun) -> None:
        """Raise `LeaseExpired` unless the lease takes calls."""
        if run.held.state != "active":
            raise LeaseExpired(f"lease {run.held.lease_id!r} is over")

    # ---------------------------------------------------------------------------------------------------------- ending

    async def release(self, lease_id: str, epoch: int | None) -> ReleaseResult:
        """Give a slot back. Again and again with the same answer; a lease that is over answers `released=False`."""
        found = self.table.find(lease_id, epoch)
        if found is None:
            self.table.refuse_later(lease_id, self.now())
            return ReleaseResult(released=False)
        if isinstance(found, HeldLease):
            found = await asyncio.shield(self.end(found, "released", "the lease was released"))
        return ReleaseResult(released=found.code == "released", clean=found.clean, reset_s=found.reset_s)

    def end(self, held: HeldLease, code: str, message: str) -> asyncio.Task[EndedLease]:
        """End a lease, whatever runs in it. Returns the task that resets its slot; the same one when asked again."""
        run = self.runs[held.lease_id]
        if run.ending is None:
            self.table.begin_end(held, code, message)
            self.counters[f"leases_ended_{code}"] += 1
            if code != "released":
                self.clients.tell_ended(held.client_id, held.lease_id, held.epoch, code, message)
            if run.lanes is not None:
                run.lanes.close(LeaseExpired.code if code == "released" else code, message)
            run.ending = self.spawn(self._end(run))
        return run.ending

    async def _end(self, run: LeaseRun) -> EndedLease:
        began = time.monotonic()
        if run.starting is not None and not run.starting.done():
            await asyncio.wait([run.starting])
        changing = [*run.freezing.values(), *([run.viewing] if run.viewing is not None else [])]
        if changing:
            await asyncio.wait(changing)
        if run.held.lease_id not in self.runs:  # its start failed and ended it
            return self.table.ended[run.held.lease_id]
        stopped = await run.stop()
        if run.lanes is not None:
            await run.lanes.join()
        self.workspaces.leave(run)
        return self._finish(run, Stopped(stopped.clean, time.monotonic() - began, stopped.detail))

    def _finish(self, run: LeaseRun, stopped: Stopped) -> EndedLease:
        held = run.held
        ended = self.table.finish_end(held, self.now(), clean=stopped.clean, reset_s=stopped.seconds)
        del self.runs[held.lease_id]
        self.clients.of(held.client_id).journal.trim_lease(held.lease_id)
        self.counters["resets"] += 1
        self.meters.reset.observe(stopped.seconds, "ok" if stopped.clean else "retired")
        if not stopped.clean:
            self._retire(run, stopped.detail)
        self.warm_pool.fill()
        self._offer()
        if not self.runs:
            self.idle.set()
        return ended

    def _offer(self) -> None:
        """Tell the clients that were refused that asking again is worth it."""
        if self.table.free and not self.table.draining:
            for client_id in self.table.offer(self.now(), self.clients.hears):
                self.clients.tell(client_id, Capacity(free_mib=self.table.free_mib))

    def _retire(self, run: LeaseRun, detail: str) -> None:
        log.error("slot-%d is retired, its sandbox could not be confirmed gone: %s", run.held.slot, detail)
        self.counters["slots_retired"] += 1
        limit = self.config.max_retired or max(1, self.config.slots // 2)
        if len(self.table.retired) >= limit:
            self.breaks(f"{len(self.table.retired)} of {self.config.slots} slots are retired; the last: {detail}")
        elif run.sandbox is not None:
            self._later.add(self.spawn(self._confirm_later(run)))

    async def _confirm_later(self, run: LeaseRun) -> None:
        """A retired slot comes back only when its old sandbox is confirmed gone after all."""
        for pause in (0.5, 2.0, 10.0, 60.0):
            await asyncio.sleep(pause)
            if (await run.stop()).clean:
                log.info("slot-%d is confirmed empty and back in use", run.held.slot)
                self.table.restore(run.held.slot)
                self.warm_pool.fill()
                self._offer()
                return

    def breaks(self, reason: str) -> None:
        """The server can't go on: it takes no new leases, and ends when the last one has."""
        if not self.broken:
            log.error("the server is broken: %s", reason)
            self.broken = reason
            self.drain(None)

    def drain(self, deadline_s: float | None) -> None:
        """Take no new leases; tell the clients."""
        if not self.table.draining:
            self.table.draining = f"the server is broken: {self.broken}" if self.broken else "the server is draining"
        self.clients.tell_draining(deadline_s)
        if not self.runs:
            self.idle.set()

    # ----------------------------------------------------------------------------------------------------------- close

    async def aclose(self) -> bool:
        """End every lease, stop every sandbox, undo the host. False when something could not be confirmed gone."""
        self.drain(0)
        for task in self._later:
            task.cancel()
        ends = [self.end(r.held, SlotLost.code, "the sandbox server ended") for r in list(self.runs.values())]
        if ends:
            await asyncio.wait(ends)
        found = await self.warm_pool.aclose()
        for snapshot_id in list(self.snapshots.by_id):
            self.workspaces.drop(snapshot_id)
        self.clients.close()
        pending = [task for task in self._tasks if task is not asyncio.current_task()]
        if pending:
            for task in (await asyncio.wait(pending, timeout=2))[1]:
                task.cancel()
        await self.host.aclose()
        return all(each.clean for each in found) and not self.table.retired
