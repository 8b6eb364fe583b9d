"""Periodic upkeep: ends expired leases, cuts dead streams, forgets unneeded clients, snapshots and images."""

from __future__ import annotations

import logging
import time

from atropos.aio import set_within
from atropos.errors import LeaseExpired
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.state.clients import FORGET_S
from atropos.sandbox.server.state.state import ServerState

log = logging.getLogger(__name__)
SILENT_BEATS = 3
"""A stream that was silent for this many heartbeats is dead."""
LONGEST_TICK_S = 1.0
SHORTEST_TICK_S = 0.02
ASLEEP_S = 2.0
"""A tick that is this late means that the process did not run; all leases are extended by that time."""
FORGET_EVERY_S = 10.0


async def pulse(core: Core) -> None:
    """Run until cancelled."""
    state = core.state
    forgotten_at = state.now()
    while True:
        tick = _tick_s(state)
        # The real clock, not `state.now`, from which such gaps are taken out.
        began = time.monotonic()
        state.short_ttl.clear()
        await set_within(state.short_ttl, tick)
        # An event that came early makes it negative, which is not late.
        late = time.monotonic() - began - tick
        if late > ASLEEP_S:
            log.warning("the server did not run for %.1f s; leases are extended by that time", late)
            state.forgive(late)
        try:
            beat(core)
            if state.now() - forgotten_at > FORGET_EVERY_S:
                forgotten_at = state.now()
                forget(core)
        # Upkeep must go on: without it no lease would ever end again.
        except Exception:
            log.exception("upkeep failed")


def beat(core: Core) -> None:
    """Cut silent streams, end expired leases."""
    state = core.state
    for stream in list(state.streams):
        if stream.silent_s > SILENT_BEATS * state.config.heartbeat_s:
            stream.abort(f"nothing came for {stream.silent_s:.1f} s")
        elif stream.paused and stream.client is not None:
            state.table.seen(stream.client.client_id, state.now())
    # After the streams: those that are paused have renewed their client's leases just now.
    for held in state.table.due(state.now()):
        core.leasing.end(held, LeaseExpired.code, f"the lease was not renewed for {held.request.ttl_s:g} s")


def forget(core: Core) -> None:
    """Drop clients that are long gone, their snapshots, and unused images."""
    state = core.state
    now = state.now()
    state.clients.forget_stale()
    for snapshot in list(state.snapshots.by_id.values()):
        if not (snapshot.users or snapshot.owner in state.clients) and now - snapshot.touched_at > FORGET_S:
            core.layers.drop_snapshot(snapshot.id)
    core.images.forget_unused(core.transfer.bases)


def _tick_s(state: ServerState) -> float:
    """Short leases need a finer pulse: a lease ends at the latest a quarter of its time late."""
    shortest = min((held.request.ttl_s for held in state.table.held.values()), default=LONGEST_TICK_S * 4)
    return max(SHORTEST_TICK_S, min(LONGEST_TICK_S, shortest / 4, state.config.heartbeat_s))
