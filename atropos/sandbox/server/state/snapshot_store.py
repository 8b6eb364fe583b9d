"""Which snapshots exist, their layers, and who uses those: plain counting, without I/O.

A snapshot is a stack of layers, topmost first. A layer is kept while a snapshot or a live sandbox uses it and is
returned as soon as none does. Bounds: a number of snapshots, their bytes together, and `MAX_LAYERS` in a stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from atropos.errors import NotSupported, PoolFull, SlotLost
from atropos.sandbox.contract import SnapshotLayer
from atropos.wire import SnapshotInfo

MAX_LAYERS = 16
"""Deepest stack of layers; overlayfs itself allows more, but every lookup walks them."""
MIB = 1024 * 1024


@dataclass(slots=True)
class StoredSnapshot:
    """A stack that leases can start from.

    Attributes:
        base: the base it was taken on; a fork must start on the same.
        users: leases that use it now.
        touched_at: when its owner or a user last needed it.
    """

    id: str
    layers: tuple[SnapshotLayer, ...]
    owner: str
    base: str | None
    users: int = 0
    touched_at: float = 0.0

    @property
    def info(self) -> SnapshotInfo:
        """It as clients see it."""
        size = sum(layer.bytes for layer in self.layers)
        return SnapshotInfo(snapshot_id=self.id, layers=len(self.layers), bytes=size, users=self.users, base=self.base)


@dataclass(slots=True)
class SnapshotStore:
    """All snapshots and layers of one server.

    Args:
        max_count: snapshots kept at once.
        max_bytes: bytes of all layers together.
        max_layers: layers kept at once, where each needs a cell on disk.
    """

    max_count: int
    max_bytes: int
    max_layers: int | None = None
    by_id: dict[str, StoredSnapshot] = field(default_factory=dict[str, StoredSnapshot])
    pending: set[str] = field(default_factory=set[str])
    """Ids of snapshots that are being taken or imported."""
    _references: Counter[SnapshotLayer] = field(default_factory=Counter[SnapshotLayer])

    @property
    def bytes(self) -> int:
        """What all layers hold together."""
        return sum(layer.bytes for layer in self._references)

    @property
    def full(self) -> str:
        """Which bound is reached; empty: none."""
        if len(self.by_id) + len(self.pending) >= self.max_count:
            return f"{self.max_count} snapshots are kept (max_snapshots)"
        if self.max_layers is not None and len(self._references) + len(self.pending) >= self.max_layers:
            return f"{self.max_layers} layers of snapshots are on disk"
        if self.bytes >= self.max_bytes:
            return f"snapshots hold {self.bytes // MIB} MiB of {self.max_bytes // MIB} (max_snapshot_mib)"
        return ""

    def reserve(self, snapshot_id: str, below: Sequence[SnapshotLayer]) -> None:
        """Check that one more snapshot on `below` may be taken, before anything is frozen; then `commit` or `abandon`.

        Raises:
            NotSupported: the stack would be too deep, or another snapshot of this id is under way.
            PoolFull: there are too many snapshots or bytes; one has to be dropped first.
        """
        check_depth(below)
        if snapshot_id in self.pending:
            raise NotSupported(f"snapshot {snapshot_id!r} is being taken of another workspace; choose another id")
        if reason := self.full:
            raise PoolFull(f"{reason}; drop one first")
        # Counts towards the bounds at once: two freezes side by side must not both get the last place.
        self.pending.add(snapshot_id)

    def commit(
        self,
        snapshot_id: str,
        top: SnapshotLayer,
        below: Sequence[SnapshotLayer],
        owner: str,
        base: str | None,
        now: float,
    ) -> StoredSnapshot:
        """Add a snapshot of a frozen layer, and end the reservation."""
        self.pending.discard(snapshot_id)
        snapshot = StoredSnapshot(snapshot_id, (top, *below), owner, base, touched_at=now)
        self.by_id[snapshot_id] = snapshot
        # In the same step as `by_id`: a layer without a user is dropped.
        self.hold(snapshot.layers)
        return snapshot

    def abandon(self, snapshot_id: str) -> None:
        """Cancel a reservation, if there (still) is one."""
        self.pending.discard(snapshot_id)

    def get(self, snapshot_id: str) -> StoredSnapshot:
        """A snapshot by its id.

        Raises:
            SlotLost: there is none (any more).
        """
        snapshot = self.by_id.get(snapshot_id)
        if snapshot is None:
            raise SlotLost(f"snapshot {snapshot_id!r} is not on this server (dropped, or taken on another)")
        return snapshot

    def hold(self, layers: Sequence[SnapshotLayer]) -> None:
        """Count one more user of these layers."""
        self._references.update(layers)

    def release(self, layers: Sequence[SnapshotLayer]) -> list[SnapshotLayer]:
        """Count one user less of these layers. Returns the unused ones, topmost first."""
        unused: list[SnapshotLayer] = []
        for layer in layers:
            self._references[layer] -= 1
            if not self._references[layer]:
                del self._references[layer]
                unused.append(layer)
        return unused

    def drop(self, snapshot_id: str) -> list[SnapshotLayer]:
        """Drop a snapshot; leases that use it keep it. Returns the unused layers."""
        snapshot = self.by_id.pop(snapshot_id, None)
        return [] if snapshot is None else self.release(snapshot.layers)


def check_depth(below: Sequence[SnapshotLayer]) -> None:
    """Check that a snapshot on these layers is not too deep.

    Raises:
        NotSupported: it is.
    """
    if len(below) >= MAX_LAYERS:
        raise NotSupported(f"a snapshot may have at most {MAX_LAYERS} layers")
