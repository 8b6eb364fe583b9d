"""Frozen workspaces that slots start from, in the containers that have them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Self

from atropos import wire
from atropos.errors import SandboxError, SlotLost
from atropos.resources import Resources
from atropos.slots.containers.link import ContainerLink
from atropos.slots.containers.seats import Seat, Ticket
from atropos.slots.slot.arguments import named_if_wrong
from atropos.slots.slot.processes import SlotProcesses
from atropos.slots.slot.results import ExecResult


class Snapshot:
    """A frozen workspace. `pool.lease(id, snapshot=it)` starts slots from it, copy-on-write.

    It is in one container at first; a fork that lands in another one brings it there, once.
    """

    __slots__ = ("_bringing", "_dropped", "_places", "info", "limits", "state", "stays_because", "ticket")

    def __init__(
        self, link: ContainerLink, info: wire.SnapshotInfo, limits: wire.LeaseLimits | None, ticket: Ticket
    ) -> None:
        self.state = link.state
        self.info = info
        self.limits = limits
        """Of the slot that it was taken of; forks have them, too, unless their lease says otherwise."""
        self.ticket = ticket
        """The acquire of that slot: whose it is, and what it started from; for the pool alone."""
        ticket.share.snapshots.add(self)
        self._places: list[ContainerLink] = []
        self._bringing: dict[ContainerLink, asyncio.Task[None]] = {}
        self._dropped = False
        self.stays_because = ""
        """Why it can't be copied to another container; empty: nothing is known against it."""
        self.add(link)

    @property
    def id(self) -> str:
        """Its name on the servers."""
        return self.info.snapshot_id

    @property
    def places(self) -> list[ContainerLink]:
        """The living containers that have it; for the pool alone."""
        self._places = [link for link in self._places if link.gone is None]
        return self._places

    def __repr__(self) -> str:
        state = "dropped" if self._dropped else f"{self.info.layers} layers, {self.info.bytes:,} bytes"
        where = ", ".join(link.container.id for link in self.places) or "no container any more"
        return f"<Snapshot {self.id} in {where}: {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()

    async def drop(self) -> None:
        """Delete it; slots that started from it keep what they need. Idempotent."""
        self.start_drop()
        # One turn, so that the task has begun; its end is not waited for.
        await asyncio.sleep(0)

    def start_drop(self) -> None:
        """Delete it in the background; for the pool alone."""
        if not self._dropped:
            self._dropped = True
            self.ticket.share.snapshots.discard(self)
            self.state.give_back(self._drop(), f"drop {self.id}")

    async def _drop(self) -> None:
        if self._bringing:
            # A copy that arrives later would be nobody's.
            await asyncio.wait(list(self._bringing.values()))
        for link in self.places:
            if self in link.snapshots:
                link.seat.unpin(self.state.now())
                with contextlib.suppress(SandboxError):  # the keeper drops it when it connects to the server again
                    await link.client.drop_snapshot(self.id)
                    link.snapshots.discard(self)

    def add(self, link: ContainerLink) -> None:
        """Note that a container has it."""
        if link.gone is None:
            self._places.append(link)
            link.snapshots.add(self)
            # A container with snapshots is in use: shrinking would lose them.
            link.seat.pin()

    def pin(self, room: Resources) -> Seat | None:
        """The only container for a fork that takes `room`; None: any, since the snapshot will be copied to it.

        Raises:
            SlotLost: it was dropped, or no container has it any more.
        """
        places = self.places
        if self._dropped or not places:
            how = "was dropped" if self._dropped else "is lost: its container is gone"
            raise SlotLost(f"snapshot {self.id} {how}")
        here = [link.seat for link in places if link.seat.open]
        if ready := next((seat for seat in here if seat.has_room(room)), None):
            return ready
        # Not between architectures: its files may be programs.
        config, travels = self.state.config, not self.stays_because and not self.state.fleet.mixed
        if travels and self.info.bytes <= config.travel_mib * 1024 * 1024 and config.max_containers > 1:
            return None
        if not here:
            raise SlotLost(f"the container that holds snapshot {self.id} is ending")
        # It waits there: nowhere else can it be had.
        return here[0]

    async def bring(self, link: ContainerLink) -> None:
        """Copy it to a container that lacks it; concurrent calls share one copy.

        Raises:
            SandboxError: it could not be copied.
        """
        if link in self.places:
            return
        task = self._bringing.get(link)
        if task is None:
            task = self._bringing[link] = self.state.tasks.spawn(self._copy(link), f"copy {self.id}", awaited=True)
            # A failed copy may be tried again.
            task.add_done_callback(lambda _: self._bringing.pop(link, None))
        await asyncio.shield(task)

    async def _copy(self, link: ContainerLink) -> None:
        if self._dropped or not self.places:
            raise SlotLost(f"snapshot {self.id} is gone")
        source = self.places[0]
        try:
            await source.client.copy_snapshot(self.id, link.client)
        except SandboxError as error:
            if not any(end.gone or end.client.lost.is_set() for end in (source, link)):  # otherwise others may take it
                self.stays_because = str(error)
            raise
        self.add(link)


class SlotSnapshots(SlotProcesses):
    """The part of `Slot` that freezes its workspace."""

    __slots__ = ()
    limits: wire.LeaseLimits | None
    ticket: Ticket
    _due: int

    @abstractmethod
    def _check_held(self) -> None:
        """Raise why the lease is over, if it is."""

    @abstractmethod
    async def release(self) -> None:
        """Give the slot back."""

    async def snapshot(self, *, keep_running: bool = False) -> Snapshot:
        """Freeze the workspace as it is; this slot and any number of others continue above it.

        The snapshot lives in this slot's container until it is dropped, and is copied to another one when a fork lands
        there.

        Args:
            keep_running: the slot's processes only stop for as long as what was written is copied; else they end.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted; the slot is then lost.
            NotSupported: the server makes none.
            QuotaReached: its share may keep no more.
        """
        self.ticket.share.check_snapshot(stays=keep_running)
        if not keep_running or (await self._signal_all("STOP")).exit_code != 0:
            return await self._snapshot(beside=False)
        snapshots: list[Snapshot] = []
        try:
            snapshots.append(await self._snapshot(beside=True))
        finally:
            # A task, shielded: stopped programs must go on even where the caller is cancelled.
            going_on = self.link.state.tasks.spawn(
                self._signal_all("CONT"), f"going on in {self.lease.slot}", awaited=True
            )
            try:
                await asyncio.shield(going_on)
            except BaseException:
                for snapshot in snapshots:
                    snapshot.start_drop()
                raise
        return snapshots[0]

    async def _signal_all(self, signal: str) -> ExecResult:
        return await self.exec(f"kill -{signal} -1", workdir="/", user="0:0", timeout_s=10)

    async def _snapshot(self, *, beside: bool) -> Snapshot:
        self._check_held()
        task = self.link.state.tasks.spawn(self._freeze(beside=beside), f"snapshot {self.lease.slot}", awaited=True)
        self._due += 1
        try:
            # The server freezes in any case: whoever is cancelled must not leave a snapshot that nobody drops.
            snapshot = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_drop_unwanted)
            raise
        self._due -= 1
        return snapshot

    async def settle(self) -> None:
        """Make the slot's present files part of its views' root; before untrusted programs run in it.

        Where programs run, they stop for as long as what was written is copied, and go on; else it is frozen.

        Raises:
            SandboxError: as `snapshot`.
        """
        await (await self.snapshot(keep_running=True)).drop()

    async def _freeze(self, *, beside: bool) -> Snapshot:
        info = await self.link.client.snapshot(self.lease, beside=beside)
        return Snapshot(self.link, info, self.limits, self.ticket)

    @named_if_wrong
    async def keep(self, key: str, settings: wire.ImageSettings | None = None) -> wire.ImageInfo:
        """Keep the workspace as an image of the host, a layer on the lease's; then release the slot.

        Leases get it by its source, `atropos-build:KEY`, also after the pool has ended. Its running processes end.

        Args:
            key: SHA-256, in hexadecimal, of what it was made of and how; what is kept under a key already stays.
            settings: what commands on the image start with; None: nothing of its own.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted.
            ImageUnavailable: the store has no room.
            NotSupported: the lease started from a snapshot.
        """
        request = wire.KeepRequest(key=key, **(settings or wire.ImageSettings()).model_dump())
        async with await self.snapshot() as snapshot:
            image = await self.link.client.images.keep(snapshot.id, request)
        await self.release()
        return image


def _drop_unwanted(task: asyncio.Task[Snapshot]) -> None:
    """Drop a snapshot whose caller was cancelled."""
    if not task.cancelled() and task.exception() is None:
        task.result().start_drop()
