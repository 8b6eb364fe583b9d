"""What the server knows of the machinery that makes sandboxes: two protocols, so that each side is tested alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atropos.errors import SandboxError

if TYPE_CHECKING:
    import asyncio

    from atropos.images.store import ImageStore
    from atropos.wire import (
        EgressSecret,
        Feature,
        ImageInfo,
        Operation,
        OpError,
        OpResult,
        SlotLimits,
        ViewFolders,
        ViewInfo,
    )

    OnResult = Callable[[OpResult | Exception], None]
    """Called with how an operation ended."""


class HostBroken(SandboxError):
    """No sandbox can be started by this server any more."""


class RootUnchanged(SandboxError):
    """The root of a sandbox could not be changed. The sandbox must be stopped; another one may work."""


@dataclass(frozen=True)
class SnapshotLayer:
    """A frozen volume.

    `path` is its upper directory, ready to be a lower one; no other layer of a server ever has it.
    """

    path: str
    bytes: int


@dataclass(frozen=True)
class Stopped:
    """What stopping a sandbox found. Not `clean`: something could not be confirmed gone, so its slot is retired.

    Attributes:
        cpu_s: CPU time of its processes; None: not known.
        egress_bytes: what they moved through the egress proxy, both ways.
    """

    clean: bool
    seconds: float
    detail: str = ""
    cpu_s: float | None = None
    egress_bytes: int = 0


class PrivateNetwork(Protocol):
    """The network of leases that belong together; nothing else is reached there."""

    async def join(self, sandbox: Sandbox, names: Sequence[str], networks: Sequence[str] = ()) -> None:
        """Connect a sandbox. All that are connected know each other by their names from then on.

        Of two that name `networks`, and none in common, neither reaches the other, nor knows its names.

        Raises:
            NotSupported: this machine can make no such network, or a root can't hold the names.
        """
        ...

    def leave(self, sandbox: Sandbox) -> None:
        """Forget a sandbox that failed to join: those that join later don't get its name."""
        ...

    def close(self) -> None:
        """Give it up, once its sandboxes have ended."""
        ...


class Sandbox(Protocol):
    """One live sandbox on one volume, from its start to its end; never reused."""

    name: str
    died: asyncio.Future[str]
    """Done, with the reason, when the sandbox ended without `stop` being asked."""

    @property
    def upper(self) -> str:
        """The upper folder of its root's overlay: what was written in it."""
        ...

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The allowed hosts that its programs may reach; None: all of them."""
        ...

    async def set_network(self, hosts: tuple[str, ...] | None) -> None:
        """Change `hosts`; open connections are cut.

        Raises:
            ConfigError: an entry can't be read.
            NotSupported: it has no network.
            SandboxError: it can't be confirmed; the sandbox must be stopped.
        """
        ...

    def begin(self, call_id: str, operation: Operation, done: OnResult, *, stream: int = -1) -> None:
        """Start an operation; one with a stream gets a copy of the descriptor of its far end.

        `done` is called once, and not before this returns: with the result; with `OutcomeUnknown` when the sandbox
        ended while the operation ran; or with `SlotLost` when the host killed programs of the slot for want of memory,
        with which the sandbox ends.

        Raises:
            SlotLost: the sandbox has ended, or broke its protocol; `done` is not called.
        """
        ...

    def cancel(self, call_id: str) -> None:
        """Kill what the call started; its result then says `cancelled`."""
        ...

    def forget(self, call_id: str) -> None:
        """Kill what the call started; its `done` is not called any more."""
        ...

    def resize(self, limits: SlotLimits) -> None:
        """Before the first operation, replace the configured limits.

        Raises:
            NotSupported: this host can't change one of them.
            SandboxError: it failed; the sandbox must be stopped.
        """
        ...

    async def move_to_disk(self, beside: Sandbox | None) -> None:
        """Before the first operation and `change_root`, have what is written from then on kept on disk.

        Args:
            beside: another sandbox, now a layer, in whose place on disk it goes on; None: in a place of its own.

        Raises:
            SandboxError: there is no place for it; the sandbox must be stopped.
        """
        ...

    async def change_root(self, layers: Sequence[SnapshotLayer], base: str | None = None) -> None:
        """Before the first operation, change the root to `layers` (topmost first) over a base.

        Raises:
            NotSupported: there is no such base.
            RootUnchanged: it failed; the sandbox must be stopped.
        """
        ...

    async def add_gpus(self, gpus: Sequence[int]) -> None:
        """Before the first operation, once the root is its last, add GPUs of the server, by their numbers.

        Raises:
            RootUnchanged: it failed; the sandbox must be stopped.
        """
        ...

    async def add_secrets(self, secrets: Sequence[EgressSecret]) -> None:
        """Once the root is its last, have its requests carry secrets of their hosts.

        Raises:
            NotSupported: it has no network, or TLS can't be ended here.
            SandboxError: it can't be confirmed; the sandbox must be stopped.
        """
        ...

    async def end_programs(self) -> str:
        """Kill everything in it, and wait until it is gone; what could not be confirmed, which `stop` reports again."""
        ...

    async def stop(self) -> Stopped:
        """Kill everything in it, confirm, detach its mounts, remove its cgroups. Bounded in time.

        Asked again, it returns the same; after an end that was not clean, it tries again.
        """
        ...

    async def freeze(self) -> SnapshotLayer:
        """End the sandbox and turn its volume into a read-only layer.

        Raises:
            SandboxError: a writer was left, so that the volume can't be trusted; it is dropped.
        """
        ...


class Host(Protocol):
    """Makes sandboxes on this machine. One a server."""

    max_layers: int | None
    """Layers that there is room for at once; None: as many as fit into their bound of bytes."""
    disk_mib: int
    """Files of leases that fit on the disk together."""
    no_quota: str
    """Why nothing bounds what is written there; empty: it is bounded."""

    async def probe(self) -> Sequence[Feature]:
        """Try every isolation property from inside a throw-away sandbox."""
        ...

    async def start(self, name: str, *, network: bool = False) -> Sandbox:
        """Start a sandbox on a fresh volume over the default base.

        Raises:
            HostBroken: none can be started any more.
            SandboxError: it could not be started; nothing of it is left.
        """
        ...

    async def view(
        self,
        of: Sandbox,
        name: str,
        layers: Sequence[SnapshotLayer],
        base: str | None,
        folders: ViewFolders,
        *,
        gpus: Sequence[int] = (),
    ) -> tuple[Sandbox, ViewInfo]:
        """Start a sandbox beside one that runs: in its network, on a root of its own, and with some of its folders.

        The folders show what is in them now and later; what the view writes there, it alone sees. From then on the
        other one gets the CPU time that others leave.

        Args:
            of: the sandbox whose folders are shown.
            name: for messages.
            layers: the layers of its root, topmost first.
            base: the lowest one.
            folders: what is shown.
            gpus: numbers of the GPUs that it has too.

        Returns:
            The sandbox, and what it shows.

        Raises:
            NotSupported: a folder can't be shown on this root.
            SandboxError: it could not be started; nothing of it is left.
        """
        ...

    def private_network(self) -> PrivateNetwork:
        """A new network, without any sandbox."""
        ...

    async def share(self, of: Sandbox, source: str, sandbox: Sandbox, path: str, *, read_only: bool) -> OpError | None:
        """Mount a folder or file of one sandbox in another; of the same one, to make it read-only there.

        Before programs run in them, which could put others in its place. What was mounted there so isn't seen.

        Returns:
            Why one of the paths can't be used; None: it is mounted.

        Raises:
            BackendUnavailable: this machine has no room for it now.
            NotSupported: it can't mount there.
        """
        ...

    async def import_layer(self, fill: Callable[[str], Awaitable[None]]) -> SnapshotLayer:
        """Make a layer of what `fill` writes into the folder whose path it is given; nothing is left if it raises."""
        ...

    @property
    def store(self) -> ImageStore:
        """The host's images.

        Raises:
            NotSupported: there is no folder for them.
        """
        ...

    def add_base(self, name: str, image: ImageInfo) -> None:
        """Make an image a base of this name; it stays until `drop_base`."""
        ...

    def base_image(self, source: str) -> ImageInfo:
        """A base of the server (`atropos-base:NAME`) as what images are built on.

        Raises:
            NotSupported: there is no such base.
        """
        ...

    def drop_base(self, name: str) -> None:
        """Forget an unused base that `add_base` made."""
        ...

    async def drop_layer(self, layer: SnapshotLayer) -> None:
        """Drop an unused layer."""
        ...

    async def aclose(self) -> None:
        """Undo what was set up for the server as a whole. Every sandbox has been stopped before."""
        ...
