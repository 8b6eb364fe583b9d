"""What serves one lease, from its grant to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from atropos.errors import LeaseExpired
from atropos.sandbox.contract import PrivateNetwork, Sandbox, SnapshotLayer, Stopped
from atropos.sandbox.server.calls.lanes import Lanes
from atropos.sandbox.server.state.lease_table import EndedLease, HeldLease
from atropos.sandbox.server.state.snapshot_store import StoredSnapshot
from atropos.sandbox.server.warm_pool import stop
from atropos.wire import Lease, MountRequest, OpError, SlotLimits, SnapshotInfo, ViewInfo


@dataclass(slots=True, eq=False)
class LeaseGroup:
    """Leases that share a network, and end together.

    Attributes:
        runs: the one that was joined, and those that joined it.
        mounts: what each path of a lease shows of another's: see `MountRequest`.
    """

    network: PrivateNetwork
    runs: list[LeaseRun]
    mounts: dict[tuple[str, str], MountRequest] = field(default_factory=dict[tuple[str, str], "MountRequest"])
    _ending: asyncio.Future[list[str | BaseException]] | None = None

    async def end_programs(self) -> None:
        """End the programs of all: none may still write where another's files are removed.

        What can't be confirmed gone is found again, and reported, when its own sandbox is stopped.
        """
        # Once for all members, whichever ends first.
        if self._ending is None:
            sandboxes = [run.sandbox for run in self.runs if run.sandbox is not None]
            self._ending = asyncio.gather(*(each.end_programs() for each in sandboxes), return_exceptions=True)
        await asyncio.shield(self._ending)

    def leave(self, run: LeaseRun) -> None:
        """A lease has ended; the last one takes the network with it."""
        self.runs.remove(run)
        if not self.runs:
            self.network.close()


@dataclass(slots=True, eq=False)
class LeaseRun:
    """What serves one lease."""

    held: HeldLease
    base: str | None = None
    limits: SlotLimits | None = None
    """Its own; None: as every slot's."""
    on_disk: bool = False
    """Whether what it writes has a place on disk."""
    sandbox: Sandbox | None = None
    viewed: Sandbox | None = None
    """The one that `sandbox` is a view of, while it is one."""
    lanes: Lanes | None = None
    layers: tuple[SnapshotLayer, ...] = ()
    view_layers: tuple[SnapshotLayer, ...] = ()
    """The layers of its views instead of `layers`; empty: those."""
    snapshot: StoredSnapshot | None = None
    starting: asyncio.Task[Lease] | None = None
    ending: asyncio.Task[EndedLease] | None = None
    viewing: asyncio.Task[ViewInfo] | None = None
    mounting: set[asyncio.Task[OpError | None]] = field(default_factory=set["asyncio.Task[OpError | None]"])
    group: LeaseGroup | None = None
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while another one joins it."""
    cpu_s: float = 0.0
    """CPU time of its sandboxes that have ended."""
    egress_bytes: int = 0
    """What they moved through the egress proxy."""
    freezing: dict[str, asyncio.Task[SnapshotInfo]] = field(default_factory=dict[str, "asyncio.Task[SnapshotInfo]"])

    def check_active(self) -> None:
        """Check that the lease takes calls.

        Raises:
            LeaseExpired: it doesn't.
        """
        if self.held.state != "active":
            raise LeaseExpired(f"lease {self.held.lease_id!r} is over")

    async def stop(self) -> Stopped:
        """Stop its sandboxes; `clean` when all are confirmed gone. With what all sandboxes of the lease have used."""
        # A view and the slot under it: either may be what can't be confirmed gone.
        held = [sandbox for sandbox in (self.sandbox, self.viewed) if sandbox is not None]
        results = await asyncio.gather(*map(stop, held))
        for each in results:
            self.count(each)
        first = next((each for each in results if not each.clean), Stopped(clean=True, seconds=0))
        return replace(first, cpu_s=self.cpu_s, egress_bytes=self.egress_bytes)

    def count(self, stopped: Stopped) -> None:
        """Add what a sandbox of the lease has used that has ended."""
        self.cpu_s += stopped.cpu_s or 0.0
        self.egress_bytes += stopped.egress_bytes
