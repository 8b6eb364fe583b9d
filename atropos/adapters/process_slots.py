"""Slots that live in the event loop of the process, whatever loops their hosts start, until the process ends."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from atropos.adapters.sharing import SLEEP, HeldSlot, SandboxGoneError, SlotRequest
from atropos.aio import Tasks
from atropos.event_loop import event_loop, in_event_loop, release

_leased: WeakValueDictionary[str, HeldSlot] = WeakValueDictionary()
"""Slots of `lease_until_exit` by their leases' ids."""


async def lease_until_exit(request: SlotRequest, name: str) -> HeldSlot:
    """`HeldSlot.lease` with the image's ENTRYPOINT, in the process's event loop; given back before the process ends.

    Raises:
        SandboxError: there is none.
    """
    held = await HeldSlot.lease(request, name, waits=SLEEP)
    event_loop().hold(held, held.release)
    _leased[held.slot.lease.lease_id] = held
    return held


def held_by_lease(lease_id: str | None) -> HeldSlot | None:
    """The slot of `lease_until_exit` that a serialized state names; None: not of this process, given back or lost."""
    held = None if lease_id is None else _leased.get(lease_id)
    return None if held is None or held.slot.lost is not None else held


async def release_and_wait(held: HeldSlot) -> None:
    """Give back a slot of `lease_until_exit`, in any event loop; a cancellation stops the wait alone. Idempotent."""
    if (given_back := release(held)) is not None:
        await asyncio.shield(asyncio.wrap_future(given_back))


class LazySlot:
    """A slot that is leased when it is first used, once, and given back by `close`.

    Args:
        request: which one.
        name: for the server's status and logs.
    """

    def __init__(self, request: SlotRequest, name: str) -> None:
        self._request = request
        self._name = name
        self._tasks = Tasks(f"slot {name}")
        self._leasing: asyncio.Task[HeldSlot] | None = None
        self._closed = False

    async def get(self) -> HeldSlot:
        """The slot; in the process's event loop. A cancelled caller leaves it to the others.

        Raises:
            SandboxError: there is none; asked again, it is tried again.
            SandboxGoneError: it was given back.
        """
        if self._closed:
            raise SandboxGoneError("the slot was given back")
        if self._leasing is None or (self._leasing.done() and self._failed(self._leasing)):
            self._leasing = self._tasks.spawn(lease_until_exit(self._request, self._name), "lease", awaited=True)
        return await asyncio.shield(self._leasing)

    @staticmethod
    def _failed(leasing: asyncio.Task[HeldSlot]) -> bool:
        return leasing.cancelled() or leasing.exception() is not None

    @property
    def lease_id(self) -> str | None:
        """Its lease's id, once it is leased."""
        if self._leasing is None or not self._leasing.done() or self._failed(self._leasing):
            return None
        return self._leasing.result().slot.lease.lease_id

    @in_event_loop
    async def close(self) -> None:
        """Give the slot back, with all that runs in it. Idempotent."""
        self._closed = True
        if self._leasing is not None:
            self._leasing.cancel()  # where it still waits for a slot
            await asyncio.wait([self._leasing])
            if not self._failed(self._leasing):
                await release_and_wait(self._leasing.result())
