"""Leases from their grant to their end: carries out what `LeaseTable` decides, on sandboxes of the warm pool.

One `LeaseRun` a lease. Its end runs as a task of its own, so that nobody's cancellation interrupts a reset.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from atropos.aio import Tasks
from atropos.errors import (
    BackendUnavailable,
    ConfigError,
    LeaseExpired,
    NotSupported,
    SandboxError,
    SlotLost,
)
from atropos.sandbox.contract import RootUnchanged, Sandbox, Stopped
from atropos.sandbox.server.calls.lanes import Lanes
from atropos.sandbox.server.snapshots.images import Images
from atropos.sandbox.server.snapshots.layers import Layers
from atropos.sandbox.server.state.clients import ClientState, Connection
from atropos.sandbox.server.state.lease_run import LeaseGroup, LeaseRun
from atropos.sandbox.server.state.lease_table import EndedLease, HeldLease
from atropos.sandbox.server.state.state import ServerState
from atropos.sandbox.server.warm_pool import WarmPool
from atropos.wire import Capacity, Draining, Hello, Joining, Lease, LeaseEnded, LeaseRequest, ReleaseResult

log = logging.getLogger(__name__)
START_S = 30.0
"""Longest an acquire waits for a sandbox to start, in seconds."""


class Leasing:
    """Grants leases, watches them and ends them.

    Attributes:
        broken: why the server can't go on; empty while it can.
        idle: set while there is no lease.
    """

    def __init__(self, state: ServerState, layers: Layers, images: Images) -> None:
        self._state = state
        self._table = state.table
        self._runs = state.runs
        self._layers = layers
        self._images = images
        self._config = config = state.config
        self.broken = ""
        self.idle = asyncio.Event()
        self.idle.set()
        self._confirming = Tasks("leasing")
        # Some beside the free slots: a slot that is given back is leased again before its next sandbox has started.
        spare = config.warm if config.warm is not None else min(4, max(1, config.slots // 4))
        self.warm_pool = WarmPool(
            state.host,
            target=lambda: 0 if self._table.draining else self._table.free + spare,
            broken=self.mark_broken,
            network=config.allow_network,
        )

    # --------------------------------------------------------------------------------------------------------- leasing

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Grant a lease.

        Raises:
            PoolFull: there is no room for this client now.
            NotSupported: the server lacks the requested base, network or limits.
            BackendUnavailable: draining, or no sandbox could be started.
            LeaseExpired: a lease of this id is over.
        """
        base = self._check(request)
        try:
            room, for_joins = self._config.room(request.limits), self._config.kept_room(request.limits)
            held = self._table.grant(request, self._state.now(), room, for_joins)
        except SandboxError:
            self._state.counters["leases_refused"] += 1
            raise
        # A repeated request (its answer was lost) finds the lease that the first one got.
        run = self._runs.get(request.lease_id)
        if run is None:
            self.idle.clear()
            limits = None if request.limits is None else self._config.limits_of(request.limits)
            on_disk = self._config.on_disk(request.limits)
            run = self._runs[request.lease_id] = LeaseRun(held, base, limits, on_disk)
            run.starting = self._state.tasks.spawn(self._start(run), "start a lease", awaited=True)
            self._state.clients.of(request.client_id)
            if request.ttl_s < 4:
                self._state.short_ttl.set()
        assert run.starting is not None
        # A client that goes away doesn't interrupt the start: its lease ends in order, by its TTL or the next hello.
        return await asyncio.shield(run.starting)

    def _check(self, request: LeaseRequest) -> str | None:
        if request.network and not self._config.allow_network:
            raise NotSupported("network: this server gives no slot a network (allow_network is false)")
        if request.limits is not None:
            try:
                self._config.check_room(request.limits, self._config.slots)
            except ConfigError as error:
                raise NotSupported(str(error)) from None
        if self._config.require_sandbox and (unbounded := self._unbounded(request)):
            raise NotSupported(f"{unbounded}; require_sandbox refuses that")
        return self._images.base_of(request)

    def _unbounded(self, request: LeaseRequest) -> str:
        """Which limits of a lease can't be held here, and why; empty: none."""
        if not self._config.on_disk(request.limits) or not self._state.host.no_quota:
            return ""
        return f"disk_mib, inodes: nothing bounds files on disk here ({self._state.host.no_quota})"

    async def _start(self, run: LeaseRun) -> Lease:
        held = run.held
        began, warm = time.monotonic(), self.warm_pool.has(network=held.request.network)
        try:
            sandbox = await self._sandbox_for(run)
            if held.request.joins is not None:
                await self._join(run, sandbox, held.request.joins)
        except BaseException as error:
            code = error.code if isinstance(error, SandboxError) else BackendUnavailable.code
            self._measure_grant(held, began, code, warm=warm)
            self._layers.leave(run)
            # Unless somebody ends it already: then `_end` waits for this task, and finishes it.
            if self._table.begin_end(held, code, str(error)):
                self._finish(run, Stopped(clean=True, seconds=0))
            if not isinstance(error, SandboxError | asyncio.CancelledError):
                log.exception("slot-%d: its lease could not be started", held.slot)
                raise BackendUnavailable(f"the sandbox could not be started: {error!r}") from error
            raise
        run.sandbox = sandbox
        if held.state == "ending":  # released during the start; its end waits for this task and stops the sandbox
            raise LeaseExpired("the lease was released before it was granted")
        client = self._state.clients.of(held.client_id)
        starts, meters = self._state.starts, self._state.meters
        run.lanes = Lanes(sandbox, client.journal, client.answered, client.wait_for_room, starts, meters)
        held.state = "active"
        # Its time begins with its use, not with the request: a cold start may take longer than a short TTL.
        held.renewed_at = self._state.now()
        self.watch(run, sandbox)
        self._measure_grant(held, began, "ok", warm=warm)
        self._state.counters["leases_granted"] += 1
        # A sandbox was taken, or one room less is free.
        # One was taken: the next lease shall find another.
        self.warm_pool.fill()
        return self.lease_of(held)

    async def _join(self, run: LeaseRun, sandbox: Sandbox, joining: Joining) -> None:
        """Connect the sandbox of a lease with those of the group that it joins."""
        try:
            joined = self._state.active_run(joining.lease_id, None)
            # One after the other: the first makes the group, and two at once would make two.
            async with joined.joining:
                group = joined.group or await self._new_group(joined, joining)
                await group.network.join(sandbox, joining.names, joining.networks)
                joined.check_active()
                if run.held.state != "starting":
                    group.network.leave(sandbox)
                    raise LeaseExpired("the lease was released before it was granted")
        except BaseException:
            # It may have a device in the network, so that no other lease may get it.
            self.warm_pool.drop(sandbox, "it could not join its group")
            raise
        run.group = group
        group.runs.append(run)

    async def _new_group(self, joined: LeaseRun, joining: Joining) -> LeaseGroup:
        joined.check_active()
        opening = joined.viewing is not None and not joined.viewing.done()
        if joined.sandbox is None or joined.viewed is not None or opening:
            raise NotSupported("joins: a lease with a view, or whose workspace is being frozen, can't be joined")
        group = joined.group = LeaseGroup(self._state.host.private_network(), [joined])  # from here on without views
        try:
            await group.network.join(joined.sandbox, joining.its_names, joining.its_networks)
            joined.check_active()
        except BaseException:
            joined.group = None
            group.network.close()
            raise
        return group

    def _measure_grant(self, held: HeldLease, began: float, result: str, *, warm: bool) -> None:
        took = time.monotonic() - began
        if held.request.snapshot is not None:
            self._state.meters.fork.observe(took, result)
        else:
            self._state.meters.acquire.observe(took, "warm" if warm else "cold", result)

    async def _sandbox_for(self, run: LeaseRun) -> Sandbox:
        request = run.held.request
        if request.snapshot is not None:
            snapshot = self._state.snapshots.get(request.snapshot)
            if run.base is not None and run.base != snapshot.base:
                raise NotSupported(f"the snapshot is of base {snapshot.base!r}, not {run.base!r}")
            run.base = snapshot.base
            self._layers.use(run, snapshot)
        return await self.take(run)

    async def take(self, run: LeaseRun, old: Sandbox | None = None) -> Sandbox:
        """A sandbox with the lease's limits, layers, base, network and GPUs; in place of `old`, with its hosts."""
        try:
            return await self._take_one(run, old)
        except RootUnchanged as error:  # for example, its PID 1 was killed
            log.warning("slot-%d: %s; another sandbox is used", run.held.slot, error)
            return await self._take_one(run, old)

    async def _take_one(self, run: LeaseRun, old: Sandbox | None) -> Sandbox:
        # Limits, then disk, then root, then what programs run for: each needs the one before, and `resize` refuses once
        # a call runs.
        sandbox = await self.warm_pool.take(START_S, network=run.held.request.network)
        try:
            if run.limits is not None:
                sandbox.resize(run.limits)
            if run.on_disk:
                await sandbox.move_to_disk(old)
            if run.layers or run.base is not None or run.on_disk:
                await sandbox.change_root(run.layers, run.base)
            if old is not None and old.hosts is not None:
                await sandbox.set_network(old.hosts)
            if run.held.request.secrets:
                await sandbox.add_secrets(run.held.request.secrets)
            if run.held.gpus:
                await sandbox.add_gpus(run.held.gpus)
        except BaseException:
            self.warm_pool.drop(sandbox, "it could not be set up for its lease")
            raise
        return sandbox

    def lease_of(self, held: HeldLease) -> Lease:
        """The lease as its client sees it."""
        return Lease(
            lease_id=held.lease_id,
            slot=f"slot-{held.slot}",
            epoch=held.epoch,
            boot_id=self._state.boot_id,
            ttl_s=held.request.ttl_s,
            limit_note="; ".join(filter(None, [self._state.limit_note, self._unbounded(held.request)])) or None,
            image=self._images.image(self._runs[held.lease_id].base),
        )

    def watch(self, run: LeaseRun, sandbox: Sandbox) -> None:
        """End the lease when this sandbox of it dies."""

        def died(future: asyncio.Future[str]) -> None:
            # A sandbox that the lease has replaced, by a snapshot, dies on purpose.
            if not future.cancelled() and sandbox in (run.sandbox, run.viewed):
                self._state.counters["sandboxes_died"] += 1
                self.end(run.held, SlotLost.code, f"the sandbox ended: {future.result()}")

        sandbox.died.add_done_callback(died)

    def renew(self, lease_id: str, epoch: int | None) -> Lease:
        """Renew one lease.

        Raises:
            LeaseExpired: it is over.
        """
        run = self._state.active_run(lease_id, epoch)
        run.held.renewed_at = self._state.now()
        return self.lease_of(run.held)

    # ---------------------------------------------------------------------------------------------------------- ending

    async def release(self, lease_id: str, epoch: int | None) -> ReleaseResult:
        """End a lease at its holder's request. Idempotent; `released=False` for a lease that ended otherwise."""
        run = self._table.find(lease_id, epoch)
        if run is None:
            # The acquire may still be on its way, over another connection.
            self._table.refuse_later(lease_id, self._state.now())
            return ReleaseResult(released=False)
        if isinstance(run, HeldLease):
            # The reset goes on where the client doesn't wait for it.
            run = await asyncio.shield(self.end(run, "released", "the lease was released"))
        return ReleaseResult(
            released=run.code == "released",
            clean=run.clean,
            reset_s=run.reset_s,
            cpu_s=run.cpu_s,
            egress_bytes=run.egress_bytes,
        )

    def end(self, held: HeldLease, code: str, message: str) -> asyncio.Task[EndedLease]:
        """End a lease, whatever runs in it, with all of its group.

        Returns the task that resets its slot; the same one when asked again.
        """
        run = self._runs[held.lease_id]
        if run.ending is None:
            run.ending = self._begin_end(run, code, message)
            for other in run.group.runs if run.group is not None else ():
                if other.ending is None:
                    other.ending = self._begin_end(other, code, f"a lease of its group ended: {message}")
        return run.ending

    def _begin_end(self, run: LeaseRun, code: str, message: str) -> asyncio.Task[EndedLease]:
        held = run.held
        # Synchronously, before any task runs: from here on no call of this lease starts.
        self._table.begin_end(held, code, message)
        self._state.counters[f"leases_ended_{code}"] += 1
        if code != "released":
            self._state.clients.send(
                held.client_id, LeaseEnded(lease_id=held.lease_id, epoch=held.epoch, code=code, message=message)
            )
        if run.lanes is not None:
            # Answers first, sandbox later: a call must not report the kill as its own end.
            run.lanes.close(LeaseExpired.code if code == "released" else code, message)
        return self._state.tasks.spawn(self._end(run), "end a lease")

    async def _end(self, run: LeaseRun) -> EndedLease:
        began = time.monotonic()
        # A start is not interrupted: half of one could leave what nobody knows of.
        if run.starting is not None and not run.starting.done():
            await asyncio.wait([run.starting])
        changing: list[asyncio.Task[Any]] = [*run.freezing.values()]
        if run.viewing is not None:
            changing.append(run.viewing)
        for each in (run,) if run.group is None else run.group.runs:  # what they mount may be this one's
            changing += each.mounting
        if changing:
            await asyncio.wait(changing)
        if run.group is not None:
            # Before any volume is removed: members may have each other's folders mounted (decision 29).
            await run.group.end_programs()
        stopped = await run.stop()
        if run.group is not None:
            run.group.leave(run)
            if run.held.request.joins is None and run.group.runs:  # its end is that of all
                await asyncio.wait([each.ending for each in run.group.runs if each.ending is not None])
        # After the sandbox, whose root stands on them.
        self._layers.leave(run)
        return self._finish(run, replace(stopped, seconds=time.monotonic() - began))

    def _finish(self, run: LeaseRun, stopped: Stopped) -> EndedLease:
        held = run.held
        ended = self._table.finish_end(held, self._state.now(), stopped)
        del self._runs[held.lease_id]
        # Not forgotten: answers of the lease's last calls may still be asked for.
        self._state.clients.of(held.client_id).journal.trim_lease(held.lease_id)
        self._state.counters["resets"] += 1
        self._state.meters.reset.observe(stopped.seconds, "ok" if stopped.clean else "retired")
        if not stopped.clean:
            self._retire(run, stopped.detail)
        self.warm_pool.fill()
        self._offer()
        if not self._runs:
            self.idle.set()
        return ended

    def _offer(self) -> None:
        """Notify refused clients that a slot is free."""
        clients = self._state.clients
        if self._table.free and not self._table.draining:
            for client_id in self._table.offer(self._state.now(), clients.is_connected):
                clients.send(client_id, Capacity(room=self._table.room))

    def _retire(self, run: LeaseRun, detail: str) -> None:
        log.error("slot-%d is retired: its sandbox could not be confirmed gone: %s", run.held.slot, detail)
        self._state.counters["slots_retired"] += 1
        # With half of the slots gone something is wrong with the host: a new container is better.
        limit = self._config.max_retired or max(1, self._config.slots // 2)
        if len(self._table.retired) >= limit:
            self.mark_broken(
                f"{len(self._table.retired)} of {self._config.slots} slots are retired; the last: {detail}"
            )
        elif run.sandbox is not None:
            self._confirming.spawn(self._confirm_later(run), f"confirm slot-{run.held.slot}")

    async def _confirm_later(self, run: LeaseRun) -> None:
        """Use a retired slot again once its old sandbox is confirmed gone."""
        # A process in an uninterruptible wait ends when its disk or device answers; longer than this, hardly ever.
        for pause in (0.5, 2.0, 10.0, 60.0):
            await asyncio.sleep(pause)
            if (await run.stop()).clean:
                log.info("slot-%d is confirmed empty and back in use", run.held.slot)
                self._table.restore(run.held.slot)
                self.warm_pool.fill()
                self._offer()
                return

    def mark_broken(self, reason: str) -> None:
        """Stop granting leases; the server ends after the last one."""
        if not self.broken:
            log.error("the server is broken: %s", reason)
            self.broken = reason
            self.drain(None)

    def drain(self, deadline_s: float | None) -> None:
        """Stop granting leases, and notify the clients."""
        if not self._table.draining:
            self._table.draining = f"the server is broken: {self.broken}" if self.broken else "the server is draining"
        self._state.clients.send_all(Draining(deadline_s=deadline_s))

    # ---------------------------------------------------------------------------------------------------- connections

    def connect(self, hello: Hello, connection: Connection) -> ClientState | None:
        """Register the stream of a client: see `ClientTable.connect`. Leases that the client does not know end."""
        client = self._state.clients.connect(hello, connection)
        if client is None:
            return None
        if hello.holds is not None:
            # None: a client that tells nothing of its leases loses none.
            self._end_unheld(client, frozenset(hello.holds))
        if self._table.draining:
            connection.send(Draining())
        return client

    def _end_unheld(self, client: ClientState, holds: frozenset[str]) -> None:
        """End the leases that their client doesn't know: the answer to its acquire was lost, or it was restarted.

        Their answers are dropped as well: they would never be acknowledged, and too many stop the client's calls.
        """
        for held in list(self._table.held.values()):
            if held.client_id == client.client_id and held.lease_id not in holds and held.state != "ending":
                self.end(held, LeaseExpired.code, "its client no longer holds it")
        for lease_id in client.journal.lease_ids():
            if lease_id not in holds:
                for entry in client.journal.give_up(lease_id):
                    client.answered(entry)
        client.signal_room()

    # ---------------------------------------------------------------------------------------------------------- close

    async def aclose(self) -> list[Stopped]:
        """End every lease and stop every sandbox. Returns how those of the warm pool stopped."""
        # First, so that nothing is granted while the rest ends.
        self.drain(0)
        await self._confirming.cancel()
        ends = [self.end(run.held, SlotLost.code, "the sandbox server ended") for run in list(self._runs.values())]
        if ends:
            await asyncio.wait(ends)
        return await self.warm_pool.aclose()
