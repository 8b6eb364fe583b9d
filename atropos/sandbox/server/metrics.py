"""What the server says of itself: one consistent count of everything, as a model and for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atropos.wire import Status, client_name

if TYPE_CHECKING:
    from atropos.sandbox.server.core import Core


def counters_of(core: Core) -> dict[str, float]:
    """Everything that only grows, and the journals' size."""
    return {
        **{name: float(count) for name, count in sorted(core.counters.items())},
        "reset_seconds": core.reset_seconds,
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
    """The same in Prometheus' text exposition format, version 0.0.4."""
    status = status_of(core)
    lines = [
        "# HELP atropos_slots Slots by state.",
        "# TYPE atropos_slots gauge",
        *(f'atropos_slots{{state="{name}"}} {getattr(status, name)}' for name in ("free", "leased", "retired")),
        "# HELP atropos_warm_sandboxes Sandboxes started ahead.",
        "# TYPE atropos_warm_sandboxes gauge",
        f"atropos_warm_sandboxes {core.warm_pool.ready}",
        "# HELP atropos_snapshots Snapshots kept.",
        "# TYPE atropos_snapshots gauge",
        f"atropos_snapshots {len(status.snapshots)}",
        "# HELP atropos_snapshot_bytes Bytes that snapshots hold.",
        "# TYPE atropos_snapshot_bytes gauge",
        f"atropos_snapshot_bytes {core.snapshots.bytes}",
        "# HELP atropos_draining Whether new leases are refused.",
        "# TYPE atropos_draining gauge",
        f"atropos_draining {int(status.draining)}",
    ]
    gauges = {"journal_bytes", "streams"}
    for name, value in status.counters.items():
        metric = f"atropos_{name}" if name in gauges else f"atropos_{name}_total"
        lines += [f"# TYPE {metric} {'gauge' if name in gauges else 'counter'}", f"{metric} {value:g}"]
    return "\n".join(lines) + "\n"
