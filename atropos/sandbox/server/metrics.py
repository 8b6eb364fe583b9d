"""What the server says of itself: one consistent count of everything, as a model and for Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from atropos.metrics import Family, Histogram, build_info, counter, exposition, gauge
from atropos.wire import Status, client_name

if TYPE_CHECKING:
    from atropos.sandbox.server.core import Core

_ENDED = "leases_ended_"
_GAUGES = {"journal_bytes": "Bytes of answers kept for their clients.", "streams": "Open streams."}


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
        histograms = (self.acquire, self.fork, self.operation, self.snapshot, self.prepare, self.reset)
        faults = counter("atropos_faults_total", "Calls without a result, by code.", dict(self.faults), "code")
        return [faults, *(each.family() for each in histograms)]


def counters_of(core: Core) -> dict[str, float]:
    """Everything that only grows, and the journals' size."""
    return {
        **{name: float(count) for name, count in sorted(core.counters.items())},
        "sandboxes_started": float(core.warm_pool.started),
        "journal_bytes": float(core.clients.journal_bytes),
        "streams": float(len(core.streams)),
    }


def status_of(core: Core) -> Status:
    """One consistent count: taken between two awaits, so that its numbers fit together."""
    table = core.table
    now = core.now()
    leases = tuple(
        {
            "client": client_name(held.client_id),
            "trajectory_id": held.request.trajectory_id,
            "slot": f"slot-{held.slot}",
            "epoch": held.epoch,
            "state": held.state,
            "age_s": round(now - held.granted_at, 3),
            "expires_in_s": round(core.table.expires_at(held) - now, 3),
            "calls": run.lanes.queued if (run := core.runs[held.lease_id]).lanes is not None else 0,
        }
        for held in table.held.values()
    )
    return Status(
        boot_id=core.boot_id,
        slots=table.slots,
        free=table.free,
        free_mib=table.free_mib,
        leased=len(table.held),
        warming=core.warm_pool.warming,
        retired=len(table.retired),
        retired_mib=table.retired_mib,
        draining=bool(table.draining),
        clients=len(core.clients),
        live=tuple(map(client_name, core.clients.live(now))),
        connected=tuple(map(client_name, core.clients.connected())),
        leases=leases,
        snapshots=tuple(snapshot.info for snapshot in core.snapshots.by_id.values()),
        uptime_s=round(now - core.started_at, 3),
        counters=counters_of(core),
    )


def metrics_text(core: Core) -> str:
    """The same, and what `Meters` has, in Prometheus' text format."""
    status = status_of(core)
    slots = {name: getattr(status, name) for name in ("free", "leased", "retired")}
    ended = {name.removeprefix(_ENDED): count for name, count in status.counters.items() if name.startswith(_ENDED)}
    families = [
        build_info(),
        gauge("atropos_slots", "Slots by state.", slots, "state"),
        gauge("atropos_warm_sandboxes", "Sandboxes started ahead.", core.warm_pool.ready),
        gauge("atropos_warming_sandboxes", "Sandboxes being started.", status.warming),
        gauge("atropos_clients", "Clients whose stream is open.", len(status.connected)),
        gauge("atropos_snapshots", "Snapshots kept.", len(status.snapshots)),
        gauge("atropos_snapshot_bytes", "Bytes that snapshots hold.", core.snapshots.bytes),
        gauge("atropos_draining", "Whether new leases are refused.", int(status.draining)),
        gauge("atropos_broken", "Whether the server ends because it can't go on.", int(bool(core.broken))),
        gauge("atropos_uptime_seconds", "Since the server started.", status.uptime_s),
        counter("atropos_leases_ended_total", "Leases that ended, by reason.", ended, "reason"),
        *core.meters.families(),
    ]
    for name, value in status.counters.items():
        if name in _GAUGES:
            families.append(gauge(f"atropos_{name}", _GAUGES[name], value))
        elif not name.startswith(_ENDED):
            families.append(counter(f"atropos_{name}_total", f"{name.replace('_', ' ').capitalize()}.", value))
    return exposition(families)
