"""The parts of one sandbox server, put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from atropos.config import ServerConfig
from atropos.sandbox.contract import Host
from atropos.sandbox.server.leasing.intake import CallIntake
from atropos.sandbox.server.leasing.leasing import Leasing
from atropos.sandbox.server.leasing.workspaces import Workspaces
from atropos.sandbox.server.snapshots.images import Images
from atropos.sandbox.server.snapshots.layers import Layers
from atropos.sandbox.server.snapshots.snapshot_transfer import SnapshotTransfer
from atropos.sandbox.server.state.state import CLOSE_S, ServerState


class Core:
    """A sandbox server without its HTTP site: what routes, streams and upkeep call."""

    def __init__(self, config: ServerConfig, host: Host, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = state = ServerState(config, host, clock)
        self.layers = Layers(state)
        self.images = Images(state, self.layers)
        self.transfer = SnapshotTransfer(state, self.layers, self.images)
        self.leasing = Leasing(state, self.layers, self.images)
        self.workspaces = Workspaces(state, self.leasing, self.layers, self.transfer)
        self.calls = CallIntake(state)

    async def aclose(self) -> bool:
        """End every lease, stop every sandbox, undo the host. False when something could not be confirmed gone."""
        state = self.state
        # Leases before snapshots: they stand on their layers.
        stopped = await self.leasing.aclose()
        for snapshot_id in list(state.snapshots.by_id):
            self.layers.drop_snapshot(snapshot_id)
        # After the leases, so that clients still hear how these ended.
        state.clients.close()
        await state.tasks.settle(CLOSE_S, CLOSE_S)
        await state.host.aclose()
        return all(each.clean for each in stopped) and not state.table.retired
