"""The server's status: one consistent count of everything, as a wire model and as Prometheus metrics."""

from __future__ import annotations

from atropos.metrics import build_info, counter, exposition, gauge
from atropos.sandbox.server.core import Core
from atropos.wire import LeaseStatus, Status, client_name

_ENDED = "leases_ended_"


def _counters(core: Core) -> dict[str, float]:
    """Everything that only grows."""
    counters = {name: float(count) for name, count in sorted(core.state.counters.items())}
    return {**counters, "sandboxes_started": float(core.leasing.warm_pool.started)}


def status_of(core: Core) -> Status:
    """One consistent count, made without an await."""
    state, table = core.state, core.state.table
    now = state.now()
    leases = tuple(
        LeaseStatus(
            client=client_name(held.client_id),
            trajectory_id=held.request.trajectory_id,
            slot=f"slot-{held.slot}",
            epoch=held.epoch,
            state=held.state,
            age_s=round(now - held.granted_at, 3),
            expires_in_s=round(table.expires_at(held) - now, 3),
            # A lease that is starting has no lanes yet.
            calls=run.lanes.queued if (run := state.runs[held.lease_id]).lanes is not None else 0,
        )
        for held in table.held.values()
    )
    return Status(
        boot_id=state.boot_id,
        slots=table.slots,
        free=table.free,
        room=table.room,
        leased=len(table.held),
        warming=core.leasing.warm_pool.warming,
        retired=len(table.retired),
        retired_room=table.retired_room,
        draining=bool(table.draining),
        clients=len(state.clients),
        live=tuple(map(client_name, state.clients.live())),
        connected=tuple(map(client_name, state.clients.connected())),
        leases=leases,
        snapshots=tuple(snapshot.info for snapshot in state.snapshots.by_id.values()),
        uptime_s=round(now - state.started_at, 3),
        counters={
            **_counters(core),
            "journal_bytes": float(state.clients.journal_bytes),
            "streams": float(len(state.streams)),
        },
    )


def metrics_text(core: Core) -> str:
    """The status and `Meters`, in Prometheus' text format."""
    state, status = core.state, status_of(core)
    slots = {name: getattr(status, name) for name in ("free", "leased", "retired")}
    counters = _counters(core)
    ended = {name.removeprefix(_ENDED): count for name, count in counters.items() if name.startswith(_ENDED)}
    families = [
        build_info(),
        gauge("atropos_slots", "Slots by state.", slots, "state"),
        gauge("atropos_warm_sandboxes", "Sandboxes started ahead.", core.leasing.warm_pool.ready),
        gauge("atropos_warming_sandboxes", "Sandboxes being started.", status.warming),
        gauge("atropos_clients", "Clients whose stream is open.", len(status.connected)),
        gauge("atropos_snapshots", "Snapshots kept.", len(status.snapshots)),
        gauge("atropos_snapshot_bytes", "Bytes that snapshots hold.", state.snapshots.bytes),
        gauge("atropos_draining", "Whether new leases are refused.", int(status.draining)),
        gauge("atropos_broken", "Whether the server ends because it can't go on.", int(bool(core.leasing.broken))),
        gauge("atropos_uptime_seconds", "Since the server started.", status.uptime_s),
        gauge("atropos_journal_bytes", "Bytes of answers kept for their clients.", state.clients.journal_bytes),
        gauge("atropos_streams", "Open streams.", len(state.streams)),
        counter("atropos_leases_ended_total", "Leases that ended, by reason.", ended, "reason"),
        *state.meters.families(),
    ]
    if state.config.gpus:
        leased = sum(len(held.gpus) for held in state.table.held.values())
        text = "GPUs leased, by type; those that leases share once for each."
        families.append(gauge("atropos_gpus_leased", text, {state.config.gpu_type or "": leased}, "type"))
    for name, value in counters.items():
        if not name.startswith(_ENDED):
            families.append(counter(f"atropos_{name}_total", f"{name.replace('_', ' ').capitalize()}.", value))
    return exposition(families)
