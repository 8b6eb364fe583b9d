"""The workspaces of held leases: their snapshots, views and layers."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable

from atropos.errors import NotSupported, SandboxError, SlotLost
from atropos.sandbox.contract import Sandbox
from atropos.sandbox.server.leasing.leasing import Leasing
from atropos.sandbox.server.snapshots.layers import Layers
from atropos.sandbox.server.snapshots.snapshot_transfer import SnapshotTransfer
from atropos.sandbox.server.state.lease_run import LeaseRun
from atropos.sandbox.server.state.snapshot_store import check_depth
from atropos.sandbox.server.state.state import ServerState
from atropos.sandbox.server.warm_pool import stop
from atropos.wire import MountRequest, MountResult, OpError, SnapshotInfo, ViewFolders, ViewInfo

log = logging.getLogger(__name__)
AGAIN_S = 0.2
"""Pause before a failed start of a view is retried."""


class Workspaces:
    """Takes snapshots of workspaces and opens views of them.

    Args:
        state: the server's state.
        leasing: replaces a lease's sandbox, and ends a lease whose workspace was lost.
        layers: the workspaces' layers.
        transfer: copies what a running slot wrote.
    """

    def __init__(self, state: ServerState, leasing: Leasing, layers: Layers, transfer: SnapshotTransfer) -> None:
        self._state = state
        self._leasing = leasing
        self._layers = layers
        self._transfer = transfer

    async def snapshot(
        self, lease_id: str, snapshot_id: str | None, epoch: int | None, *, beside: bool = False
    ) -> SnapshotInfo:
        """Freeze a lease's workspace and continue above it; runs alone, after the calls before it.

        Args:
            lease_id: whose workspace it is.
            snapshot_id: the snapshot's name; None: a new one.
            epoch: the lease's, where the caller knows it.
            beside: copy the written files instead: the slot goes on, and the lease's views use the copy.

        Raises:
            LeaseExpired, SlotLost: the lease is over, or was lost by the attempt.
            NotSupported, PoolFull: a bound of `SnapshotStore`.
        """
        # A repeated request: it was taken, and the answer lost.
        known = self._state.snapshots.by_id.get(snapshot_id or "")
        if known is not None:
            return known.info
        run = self._state.run_of(lease_id, epoch)
        name = snapshot_id or f"snap-{uuid.uuid4().hex}"
        task = run.freezing.get(name)
        if task is None:
            run.check_active()
            # Before anything is frozen: a workspace must not be ended for a snapshot that has no room.
            self._layers.reserve(name, run.layers)
            task = run.freezing[name] = self._state.tasks.spawn(
                self._queue_freeze(run, name, beside=beside), f"freeze {name}", awaited=True
            )
            task.add_done_callback(lambda _: run.freezing.pop(name, None))
        return await asyncio.shield(task)

    async def _queue_freeze(self, run: LeaseRun, name: str, *, beside: bool) -> SnapshotInfo:
        assert run.lanes is not None
        try:
            async with run.lanes.barrier(beside=beside):
                _check_alone(run)
                return await (self._copy(run, name) if beside else self._freeze(run, name))
        except BaseException:
            self._state.snapshots.abandon(name)
            raise

    async def _freeze(self, run: LeaseRun, name: str) -> SnapshotInfo:
        assert run.sandbox is not None
        assert run.lanes is not None
        check_depth(run.layers)  # again: other snapshots may have been requested before this one's turn
        if run.viewed is not None:  # the view ends: its slot is frozen
            if not (stopped := await stop(run.sandbox)).clean:  # the end of the lease retires the slot
                self._leasing.end(run.held, SlotLost.code, f"the view could not be confirmed gone: {stopped.detail}")
                raise SlotLost(f"the view could not be confirmed gone: {stopped.detail}")
            run.count(stopped)
            run.sandbox, run.viewed = run.viewed, None
        request, old, below = run.held.request, run.sandbox, run.layers
        run.sandbox = None  # from here on the freeze ends it, so its death is expected
        began = time.monotonic()
        try:
            layer = await old.freeze()
            run.count(await old.stop())  # `freeze` has ended it
        except BaseException as error:
            self._state.meters.snapshot.observe(time.monotonic() - began, "error")
            run.sandbox = old  # so that the end of the lease stops it, or retires the slot
            self._leasing.end(run.held, SlotLost.code, f"the snapshot failed, and the workspace with it: {error}")
            raise
        snapshot = self._state.snapshots.commit(name, layer, below, request.client_id, run.base, self._state.now())
        # After `commit`, which holds the new stack: the layers below are in it, and must not become unused in between.
        self._layers.leave(run)
        self._layers.use(run, snapshot)
        try:
            sandbox = await self._leasing.take(run, old)
        except BaseException as error:
            # The client gets an error, and so would not know of a snapshot to drop.
            self._layers.drop_snapshot(name)
            self._leasing.end(run.held, SlotLost.code, f"the workspace did not start again above its snapshot: {error}")
            raise
        self._state.meters.snapshot.observe(time.monotonic() - began, "ok")
        # Before the barrier ends, so that the next call runs in the new one.
        run.sandbox = run.lanes.sandbox = sandbox
        self._leasing.watch(run, sandbox)
        self._leasing.warm_pool.fill()
        self._state.counters["snapshots_taken"] += 1
        return snapshot.info

    async def _copy(self, run: LeaseRun, name: str) -> SnapshotInfo:
        copied = run.viewed or run.sandbox
        assert copied is not None
        layer = await self._transfer.copy(copied)
        snapshot = self._state.snapshots.commit(
            name, layer, run.layers, run.held.request.client_id, run.base, self._state.now()
        )
        # Held before the old ones are released: both may have layers in common.
        self._layers.hold(snapshot.layers)
        self._layers.release(run.view_layers)
        run.view_layers = snapshot.layers
        return snapshot.info

    async def view(self, lease_id: str, folders: ViewFolders, epoch: int | None) -> ViewInfo:
        """Run a lease's calls in a view of its slot from now on; one that has a view keeps it.

        Raises:
            LeaseExpired: the lease is over.
            NotSupported: a folder can't be shown; the lease goes on as before.
            SandboxError: no view could be started; the lease goes on as before.
        """
        run = self._state.active_run(lease_id, epoch)
        # One view a lease (decision 8); a failed one may be asked for again.
        if run.viewing is None or (run.viewing.done() and run.viewed is None):
            run.viewing = self._state.tasks.spawn(self._open_view(run, folders), "open a view", awaited=True)
        return await asyncio.shield(run.viewing)

    async def _open_view(self, run: LeaseRun, folders: ViewFolders) -> ViewInfo:
        assert run.lanes is not None
        async with run.lanes.barrier():
            _check_alone(run)
            assert run.sandbox is not None
            view, info = await self._start_view(run, run.sandbox, folders)
            # Together, without an await: `_end` stops whatever the run names.
            run.viewed, run.sandbox = run.sandbox, view
            run.lanes.sandbox = view
            self._leasing.watch(run, view)
        self._state.counters["views_opened"] += 1
        return info

    async def mount(self, lease_id: str, wanted: MountRequest) -> MountResult:
        """Have a lease see what another one of its group has; what it sees at that path already stays.

        Raises:
            LeaseExpired: one of the two is over.
            NotSupported: they are of no group, or this machine can't mount there.
        """
        run, other = self._state.active_run(lease_id, wanted.epoch), self._state.active_run(wanted.of, None)
        if run is not other and (run.group is None or other.group is not run.group):
            raise NotSupported("mounts: the two leases are not of one group; one joins the other first")
        task = self._state.tasks.spawn(self._mount(run, other, wanted), "mount", awaited=True)
        # The end of either lease waits for it.
        run.mounting.add(task)
        task.add_done_callback(run.mounting.discard)
        return MountResult(refused=await asyncio.shield(task))

    async def _mount(self, run: LeaseRun, other: LeaseRun, wanted: MountRequest) -> OpError | None:
        assert run.lanes is not None
        group, lease_id = run.group, run.held.lease_id
        async with run.lanes.barrier():
            # A repeated request must not mount once more on top.
            if group is not None and group.mounts.get((lease_id, wanted.path)) == wanted:
                return None
            assert run.sandbox is not None
            assert other.sandbox is not None
            refused = await self._state.host.share(
                other.sandbox, wanted.source, run.sandbox, wanted.path, read_only=wanted.read_only
            )
            if group is not None and refused is None:
                group.mounts[lease_id, wanted.path] = wanted
        return refused

    async def _start_view(self, run: LeaseRun, sandbox: Sandbox, folders: ViewFolders) -> tuple[Sandbox, ViewInfo]:
        def start() -> Awaitable[tuple[Sandbox, ViewInfo]]:
            layers = run.view_layers or run.layers
            name = f"view of {sandbox.name}"
            return self._state.host.view(sandbox, name, layers, run.base, folders, gpus=run.held.gpus)

        try:
            return await start()
        except SandboxError as error:  # for example, one of its processes was killed
            # Neither gets better by another try.
            if isinstance(error, NotSupported) or sandbox.died.done():
                raise
            log.warning("slot-%d: no view: %s; it is retried", run.held.slot, error)
            await asyncio.sleep(AGAIN_S)
            return await start()


def _check_alone(run: LeaseRun) -> None:
    """Refuse what would take a sandbox out of its group, or show only a part of what it sees."""
    if run.group is not None:
        raise NotSupported("a lease that shares its network with others has neither snapshots nor views")
