"""What the server measures while it works."""

from __future__ import annotations

from collections import Counter

from atropos.metrics import Family, Histogram, counter


class Meters:
    """What the server measures; bounded.

    Attributes:
        acquire: grants of empty slots, by `start` (warm: a sandbox was there; cold: it had to start) and result.
        fork: grants on a snapshot, by result.
        operation: calls from their start, waiting in line not among it, by operation and outcome.
        snapshot: freezes, by result.
        prepare: images, by result.
        reset: ends of leases; retired where the sandbox could not be confirmed gone.
        faults: calls that got no result, by code.
    """

    def __init__(self) -> None:
        self.acquire = Histogram("atropos_acquire_seconds", "Time to grant an empty slot.", "start", "result")
        self.fork = Histogram("atropos_fork_seconds", "Time to grant a slot on a snapshot.", "result")
        self.operation = Histogram("atropos_operation_seconds", "Time of operations in slots.", "operation", "result")
        self.snapshot = Histogram("atropos_snapshot_seconds", "Time to freeze a workspace.", "result")
        self.prepare = Histogram("atropos_prepare_seconds", "Time to pull and unpack an image.", "result")
        self.reset = Histogram("atropos_reset_seconds", "Time to reset a slot after its lease.", "result")
        self.faults: Counter[str] = Counter()

    def families(self) -> list[Family]:
        """Everything measured so far."""
        faults = counter("atropos_faults_total", "Calls without a result, by code.", dict(self.faults), "code")
        return [faults, *(each.family() for each in vars(self).values() if isinstance(each, Histogram))]
