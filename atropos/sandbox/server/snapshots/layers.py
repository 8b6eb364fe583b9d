"""The layers of snapshots, leases and images: kept while one uses them, then returned to the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atropos.sandbox.contract import SnapshotLayer
from atropos.sandbox.server.state.lease_run import LeaseRun
from atropos.sandbox.server.state.snapshot_store import StoredSnapshot
from atropos.sandbox.server.state.state import ServerState

log = logging.getLogger(__name__)


class Layers:
    """Carries out what the counting of `SnapshotStore` decides."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._store = state.snapshots

    def reserve(self, snapshot_id: str, below: Sequence[SnapshotLayer]) -> None:
        """As `SnapshotStore.reserve`; at its bounds, snapshots of dead clients are dropped first, oldest first.

        Raises:
            NotSupported, PoolFull: as there.
        """
        # Living clients' snapshots are never dropped for others: a fork counts on them.
        for snapshot in sorted(self._store.by_id.values(), key=lambda each: each.touched_at):
            if not self._store.full:
                break
            if not snapshot.users and not self._state.clients.alive(snapshot.owner):
                self.drop_snapshot(snapshot.id)
        self._store.reserve(snapshot_id, below)

    def drop_snapshot(self, snapshot_id: str) -> None:
        """Drop a snapshot; leases that use it keep it."""
        self.drop(self._store.drop(snapshot_id))

    def use(self, run: LeaseRun, snapshot: StoredSnapshot) -> None:
        """Start a lease's workspace from this snapshot."""
        run.snapshot, run.layers = snapshot, snapshot.layers
        snapshot.users += 1
        snapshot.touched_at = self._state.now()
        self._store.hold(snapshot.layers)

    def leave(self, run: LeaseRun) -> None:
        """Release all layers of a lease."""
        if run.snapshot is not None:
            run.snapshot.users -= 1
            run.snapshot.touched_at = self._state.now()
            run.snapshot = None
        # Emptied in the same step: leaving twice releases nothing twice.
        layers, run.layers, run.view_layers = (*run.layers, *run.view_layers), (), ()
        self.release(layers)

    def hold(self, layers: Sequence[SnapshotLayer]) -> None:
        """Keep these layers until `release`."""
        self._store.hold(layers)

    def release(self, layers: Sequence[SnapshotLayer]) -> None:
        """Undo one `hold` of these layers."""
        self.drop(self._store.release(layers))

    def drop(self, layers: Sequence[SnapshotLayer]) -> None:
        """Give layers back to the host on which nothing stands."""
        for layer in layers:
            # In the background: freeing a million files takes a second, and callers hold locks and answers.
            self._state.tasks.spawn(self._drop(layer), "drop a layer")

    async def _drop(self, layer: SnapshotLayer) -> None:
        try:
            await self._state.host.drop_layer(layer)
        except Exception:
            log.exception("layer %s could not be dropped", layer.path)
            self._state.counters["layers_leaked"] += 1
