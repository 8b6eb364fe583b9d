"""Giving back what was leased, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from atropos.errors import LeaseExpired, SandboxError, SlotLost
from atropos.slots.slot import Slot

if TYPE_CHECKING:
    from atropos.slots.pool import SlotPool

log = logging.getLogger("atropos.slots")

WAIT_S = 10.0
"""How long `Slot.release` waits for the server's word; the release itself goes on behind it."""
TRIES = 6
"""Attempts to give a slot back before its container is taken for broken."""


class Returns:
    """The releases of a pool."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool

    async def release(self, slot: Slot) -> None:
        """As `Slot.release`."""
        task = self.begin(slot)
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=WAIT_S)  # which cancels nothing when it is cancelled

    def begin(self, slot: Slot) -> asyncio.Task[None] | None:
        """Start giving a slot back. Returns the task that does, once and for all; None when there is nothing to."""
        if slot.releasing is None and slot.lost is None:
            slot.end(LeaseExpired(f"slot {slot.name} was released"))
            slot.releasing = self._pool.tasks.spawn(self._return(slot), f"release {slot.name}")
        return slot.releasing

    async def _return(self, slot: Slot) -> None:
        """Give a slot back until the server confirms it; a server that never does is replaced."""
        link = slot.link
        for attempt in range(TRIES):
            if link.gone is not None:
                return
            try:
                result = await link.client.release(slot.lease)
            except (LeaseExpired, SlotLost):
                self._returned(slot, clean=False)
                return
            except SandboxError as error:
                log.info("slot %s could not be given back yet: %s", slot.name, error)
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            self._pool.counters.reset_s.append(result.reset_s)
            self._returned(slot, clean=result.clean and result.released)
            return
        await self._pool.keeper.condemn(link, f"slot {slot.name} could not be given back")

    def _returned(self, slot: Slot, *, clean: bool) -> None:
        link = slot.link
        self._pool.counters.releases += 1
        if link.slots.pop(slot.lease.lease_id, None) is None:
            return
        self._pool.fleet.returned(link.seat, clean=clean, now=self._pool.now())
        if not clean:
            link.look()
        self._pool.serve()
