"""The server's pulse: expired leases end, dead streams are cut, what nobody needs is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from atropos.errors import LeaseExpired

if TYPE_CHECKING:
    from atropos.sandbox.server.core import Core

log = logging.getLogger(__name__)
SILENT_BEATS = 3
"""A stream that was silent for this many heartbeats is dead."""
LONGEST_TICK_S = 1.0
SHORTEST_TICK_S = 0.02
ASLEEP_S = 2.0
"""A tick that comes this much too late means that the process did not run; that time is forgiven to all leases."""
FORGET_EVERY_S = 10.0


async def pulse(core: Core) -> None:
    """Run until cancelled."""
    forgotten_at = core.now()
    while True:
        tick = _tick_s(core)
        began = time.monotonic()
        core.short_ttl.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(tick):
                await core.short_ttl.wait()
        late = time.monotonic() - began - tick
        if late > ASLEEP_S:
            log.warning("the server did not run for %.1f s; leases are not charged for it", late)
            core.forgive(late)
        try:
            beat(core)
            if core.now() - forgotten_at > FORGET_EVERY_S:
                forgotten_at = core.now()
                forget(core)
        except Exception:
            log.exception("upkeep failed")


def beat(core: Core) -> None:
    """Cut streams that went silent, end leases that are over."""
    for stream in list(core.streams):
        if stream.silent_s > SILENT_BEATS * core.config.heartbeat_s:
            stream.abort(f"nothing came for {stream.silent_s:.1f} s")
        elif stream.paused and stream.client is not None:
            core.table.seen(stream.client.client_id, core.now())
    for held in core.table.due(core.now()):
        core.end(held, LeaseExpired.code, f"the lease was not renewed for {held.request.ttl_s:g} s")


def forget(core: Core) -> None:
    """Drop clients long gone, the snapshots they left, and images that nobody stands on."""
    gone = set(core.clients.forget_stale(core.now()))
    for snapshot in list(core.snapshots.by_id.values()):
        if snapshot.owner in gone and not snapshot.users:
            core.workspaces.drop(snapshot.id)
    core.images.forget_unused()


def _tick_s(core: Core) -> float:
    """Short leases need a finer pulse: a lease ends at the latest a quarter of its time late."""
    shortest = min((held.request.ttl_s for held in core.table.held.values()), default=LONGEST_TICK_S * 4)
    return max(SHORTEST_TICK_S, min(LONGEST_TICK_S, shortest / 4, core.config.heartbeat_s))
