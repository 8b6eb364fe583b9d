"""Frozen workspaces that slots start from, in the containers that have them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from atropos.errors import SandboxError, SlotLost

if TYPE_CHECKING:
    from atropos import wire
    from atropos.slots.container_link import Link
    from atropos.slots.pool import SlotPool
    from atropos.slots.slot import Slot


class Snapshot:
    """A frozen workspace. `pool.lease(id, snapshot=it)` starts slots that stand on it, copy-on-write.

    It is in one container at first; a fork that lands in another one brings it there, once.
    """

    __slots__ = ("_bringing", "_dropped", "_places", "info", "pool", "stays")

    def __init__(self, link: Link, info: wire.SnapshotInfo) -> None:
        self.pool = link.pool
        self.info = info
        self._places: list[Link] = []
        self._bringing: dict[Link, asyncio.Task[None]] = {}
        self._dropped = False
        self.stays = False
        self.add(link)

    @property
    def id(self) -> str:
        """Its name on the servers."""
        return self.info.snapshot_id

    @property
    def places(self) -> list[Link]:
        """The living containers that have it; for the pool alone."""
        self._places = [link for link in self._places if link.gone is None]
        return self._places

    @property
    def dropped(self) -> bool:
        """Whether it was given up."""
        return self._dropped

    def __repr__(self) -> str:
        state = "dropped" if self._dropped else f"{self.info.layers} layers, {self.info.bytes:,} bytes"
        where = ", ".join(link.container.id for link in self.places) or "no container any more"
        return f"<Snapshot {self.id} in {where}: {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()

    async def drop(self) -> None:
        """Give it up; slots that stand on it keep what they need. Idempotent."""
        if not self._dropped:
            self._dropped = True
            dropping = self.pool.tasks.spawn(self._drop(), f"drop {self.id}")
            self.pool.snapshots.dropping.add(dropping)
            dropping.add_done_callback(self.pool.snapshots.dropping.discard)
            await asyncio.sleep(0)

    async def _drop(self) -> None:
        if self._bringing:
            await asyncio.wait(list(self._bringing.values()))
        for link in self.places:
            if self in link.snapshots:
                link.snapshots.discard(self)
                link.seat.pins -= 1
                link.seat.idle_since = self.pool.now()
                with contextlib.suppress(SandboxError):  # an unknown or lost one is as good as dropped
                    await link.client.drop_snapshot(self.id)

    def add(self, link: Link) -> None:
        """A container has it."""
        if link.gone is None:
            self._places.append(link)
            link.snapshots.add(self)
            link.seat.pins += 1

    async def bring(self, link: Link) -> None:
        """See to it that a container has it: copied from another one, once however many ask.

        Raises:
            SandboxError: it could not be copied.
        """
        if link in self.places:
            return
        task = self._bringing.get(link)
        if task is None:
            task = self._bringing[link] = self.pool.tasks.spawn(self._copy(link), f"copy {self.id}", awaited=True)
            task.add_done_callback(lambda _: self._bringing.pop(link, None))
        await asyncio.shield(task)

    async def _copy(self, link: Link) -> None:
        if self._dropped or not self.places:
            raise SlotLost(f"snapshot {self.id} is gone")
        await self.places[0].client.copy_snapshot(self.id, link.client)
        self.add(link)


class Snapshots:
    """Taking snapshots, and choosing where forks of them go."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.dropping: set[asyncio.Task[None]] = set()
        """Snapshots that servers are being told to forget."""

    async def take(self, slot: Slot) -> Snapshot:
        """As `Slot.snapshot`."""
        if slot.lost is not None:
            raise type(slot.lost)(*slot.lost.args)
        task = self._pool.tasks.spawn(self._freeze(slot), f"snapshot {slot.name}", awaited=True)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)
            raise

    async def _freeze(self, slot: Slot) -> Snapshot:
        return Snapshot(slot.link, await slot.link.client.snapshot(slot.lease))

    def _unwanted(self, task: asyncio.Task[Snapshot]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._pool.tasks.spawn(task.result().drop(), "drop a snapshot that nobody waits for")
