"""The state that the parts of one sandbox server share, and its clock and tasks."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable

from atropos.aio import Tasks
from atropos.config import ServerConfig
from atropos.errors import LeaseExpired
from atropos.sandbox.contract import Host
from atropos.sandbox.server.calls.start_queue import StartQueue
from atropos.sandbox.server.metrics import Meters
from atropos.sandbox.server.state.clients import ClientTable, Connection
from atropos.sandbox.server.state.lease_run import LeaseRun
from atropos.sandbox.server.state.lease_table import HeldLease, LeaseTable
from atropos.sandbox.server.state.snapshot_store import MIB, SnapshotStore

CLOSE_S = 2.0
"""Longest the end of the server waits for its tasks, and for those that it then cancels, in seconds."""


class ServerState:
    """What one sandbox server knows. `clock`: monotonic seconds; tests step it."""

    def __init__(self, config: ServerConfig, host: Host, clock: Callable[[], float]) -> None:
        self.config = config
        self.host = host
        # New with each process: a client sees by it that all it knew of this address is gone.
        self.boot_id = uuid.uuid4().hex
        self.limit_note: str | None = None
        self.table = LeaseTable(config.slots, config.slot_room, config.beside(config.slots, host.disk_mib), config.gpus)
        self.runs: dict[str, LeaseRun] = {}
        self.clients = ClientTable(self.table, self.now, config.heartbeat_s)
        self.snapshots = SnapshotStore(config.max_snapshots, config.max_snapshot_mib * MIB, host.max_layers)
        self.streams: set[Connection] = set()
        """Every open WebSocket, also of clients that have not said hello."""
        self.counters: Counter[str] = Counter()
        self.meters = Meters()
        self.starts = StartQueue()
        self.short_ttl = asyncio.Event()
        """Set by a lease so short that the upkeep must look sooner."""
        self._clock = clock
        self._asleep_s = 0.0
        self.started_at = clock()
        self.tasks = Tasks("sandbox server")

    # ----------------------------------------------------------------------------------------------------------- time

    def now(self) -> float:
        """Seconds of a monotonic clock without the time in which this process was stopped: see `forgive`."""
        # Clients that could not be heard while the process was stopped must not lose their leases for it.
        return self._clock() - self._asleep_s

    def forgive(self, gap_s: float) -> None:
        """Set the clock back by the time in which the process was stopped (SIGSTOP, a frozen machine).

        Times that were recorded since it woke up are set back to `now`, or a client that died then would live on for
        `gap_s`.
        """
        self._asleep_s += gap_s
        self.table.clock_set_back(self.now())
        for stream in self.streams:
            stream.heard_at = min(stream.heard_at, self.now())

    # ---------------------------------------------------------------------------------------------------------- leases

    def run_of(self, lease_id: str, epoch: int | None) -> LeaseRun:
        """What serves a lease.

        Raises:
            LeaseExpired: it is over.
        """
        if not isinstance(self.table.find(lease_id, epoch), HeldLease):
            raise LeaseExpired(f"lease {lease_id!r} is over or was never granted")
        return self.runs[lease_id]

    def active_run(self, lease_id: str, epoch: int | None) -> LeaseRun:
        """What serves a lease that takes calls.

        Raises:
            LeaseExpired: it is over, or ending.
        """
        run = self.run_of(lease_id, epoch)
        run.check_active()
        return run
