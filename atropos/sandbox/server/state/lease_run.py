"""What serves one lease, from its grant to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atropos.config import SlotLimits
from atropos.errors import LeaseExpired
from atropos.sandbox.contract import Layer, Sandbox, Stopped
from atropos.sandbox.server.calls.lanes import Lanes
from atropos.sandbox.server.state.lease_table import EndedLease, HeldLease
from atropos.sandbox.server.state.snapshot_store import StoredSnapshot
from atropos.sandbox.server.warm_pool import stop
from atropos.wire import Lease, SnapshotInfo, ViewInfo


@dataclass(slots=True, eq=False)
class LeaseRun:
    """What serves one lease."""

    held: HeldLease
    base: str | None = None
    limits: SlotLimits | None = None
    """Its own; None: as every slot's."""
    sandbox: Sandbox | None = None
    viewed: Sandbox | None = None
    """The one that `sandbox` is a view of, while it is one."""
    lanes: Lanes | None = None
    layers: tuple[Layer, ...] = ()
    view_layers: tuple[Layer, ...] = ()
    """The layers of its views instead of `layers`; empty: those."""
    snapshot: StoredSnapshot | None = None
    starting: asyncio.Task[Lease] | None = None
    ending: asyncio.Task[EndedLease] | None = None
    viewing: asyncio.Task[ViewInfo] | None = None
    freezing: dict[str, asyncio.Task[SnapshotInfo]] = field(default_factory=dict[str, "asyncio.Task[SnapshotInfo]"])

    def check_active(self) -> None:
        """Check that the lease takes calls.

        Raises:
            LeaseExpired: it doesn't.
        """
        if self.held.state != "active":
            raise LeaseExpired(f"lease {self.held.lease_id!r} is over")

    async def stop(self) -> Stopped:
        """Stop its sandboxes; `clean` when all are confirmed gone."""
        held = [sandbox for sandbox in (self.sandbox, self.viewed) if sandbox is not None]
        found = await asyncio.gather(*map(stop, held))
        return next((each for each in found if not each.clean), Stopped(clean=True, seconds=0))
