"""Snapshots between servers: their layers leave as a tar stream and arrive as layers of another server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from atropos.errors import NotSupported
from atropos.sandbox.contract import Sandbox, SnapshotLayer
from atropos.sandbox.server.snapshots.images import Images
from atropos.sandbox.server.snapshots.layer_tar import packed_layers, unpack_layers
from atropos.sandbox.server.snapshots.layers import Layers
from atropos.sandbox.server.state.snapshot_store import MAX_LAYERS, StoredSnapshot
from atropos.sandbox.server.state.state import ServerState
from atropos.wire import SnapshotInfo

PARALLEL = 2
"""Snapshots that arrive, and copies that are made, at once; 26 at once delayed calls of neighbours by seconds."""


@dataclass(frozen=True)
class IncomingSnapshot:
    """A snapshot that is being sent here."""

    snapshot_id: str
    layers: int
    base: str | None
    owner: str
    compressed: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has arrived, or will not."""


class SnapshotTransfer:
    """Sends, receives and copies the layers of snapshots."""

    def __init__(self, state: ServerState, layers: Layers, images: Images) -> None:
        self._state = state
        self._layers = layers
        self._images = images
        self._imports = asyncio.Semaphore(PARALLEL)
        self._copies = asyncio.Semaphore(PARALLEL)
        """Not the same: an import takes as long as its sender, and the end of a lease waits for its copy."""
        self._arriving: dict[str, IncomingSnapshot] = {}

    @property
    def bases(self) -> set[str | None]:
        """The bases of snapshots that are being imported."""
        return {arriving.base for arriving in self._arriving.values()}

    @contextlib.asynccontextmanager
    async def exported(self, snapshot: StoredSnapshot, *, compress: bool) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The archive of a snapshot, which is kept while it is read.

        Raises:
            NotSupported: zstd is asked for and not installed.
        """
        # Before the program starts, which takes a while: a layer dropped in the meantime would be packed as an
        # empty one.
        self._layers.hold(snapshot.layers)
        snapshot.touched_at = self._state.now()
        try:
            paths = [layer.path for layer in snapshot.layers]
            async with packed_layers(paths, f"snapshot {snapshot.id}", compress=compress) as chunks:
                yield chunks
        finally:
            self._layers.release(snapshot.layers)

    async def copy(self, sandbox: Sandbox) -> SnapshotLayer:
        """A layer of what a slot has written so far; its programs keep running.

        Raises:
            SandboxError: it doesn't fit, or a file was cut while it was read.
        """
        what = f"what {sandbox.name} wrote"

        async def fill(folder: str) -> None:
            async with packed_layers([sandbox.upper], what) as chunks:
                await unpack_layers([folder], what, chunks)

        async with self._copies:
            return await self._state.host.import_layer(fill)

    async def receive(self, wanted: IncomingSnapshot, chunks: AsyncIterator[bytes]) -> SnapshotInfo:
        """Make a snapshot of an archive, after those before it. Under an id that is here already, the one that is here.

        Raises:
            NotSupported: too many layers, an unknown base, or zstd is not installed.
            PoolFull: a bound on snapshots is reached.
            InvalidSnapshot: no server exported such an archive, or it broke off; nothing is left of it.
            SandboxError: it doesn't fit, or could not be written; nothing is left of it.
        """
        while (arriving := self._arriving.get(wanted.snapshot_id)) is not None:
            await arriving.over.wait()  # the connection broke, and the sender repeats it
        known = self._state.snapshots.by_id.get(wanted.snapshot_id)
        if known is not None:
            return known.info
        if not 1 <= wanted.layers <= MAX_LAYERS:
            raise NotSupported(f"layers: {wanted.layers} is not between 1 and {MAX_LAYERS}")
        # Before the bytes come: without its base the layers mean nothing here.
        self._images.ensure_base(wanted.base)
        self._layers.reserve(wanted.snapshot_id, ())
        self._arriving[wanted.snapshot_id] = wanted
        # Its own task: a client that goes away ends the stream, and so the import, but doesn't interrupt the tidying.
        try:
            layers = await asyncio.shield(
                self._state.tasks.spawn(self._unpack(wanted, chunks), "unpack a snapshot", awaited=True)
            )
            snapshot = self._state.snapshots.commit(
                wanted.snapshot_id, layers[0], layers[1:], wanted.owner, wanted.base, self._state.now()
            )
        except BaseException:
            self._state.snapshots.abandon(wanted.snapshot_id)
            raise
        finally:
            del self._arriving[wanted.snapshot_id]
            wanted.over.set()
        self._state.counters["snapshots_imported"] += 1
        return snapshot.info

    async def _unpack(self, wanted: IncomingSnapshot, chunks: AsyncIterator[bytes]) -> list[SnapshotLayer]:
        """Feed one program that fills all layers at once: each level of nesting holds one more folder open."""
        layers: list[SnapshotLayer] = []

        async def level(folders: list[str]) -> None:
            if len(folders) == wanted.layers:
                await unpack_layers(folders, f"snapshot {wanted.snapshot_id}", chunks, compressed=wanted.compressed)
                return
            layers.append(await self._state.host.import_layer(lambda folder: level([*folders, folder])))

        try:
            async with self._imports:
                await level([])
        except BaseException:
            self._layers.drop(layers)
            raise
        layers.reverse()  # the innermost, which is the last folder and the lowest layer, was done first
        return layers
