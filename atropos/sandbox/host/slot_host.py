"""Creates slots, layers, and bases from images on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ImageUnavailable, IsolationUnavailable, NotSupported, SandboxError
from atropos.images.reference import base_name
from atropos.sandbox.boot.root_phase import Entered
from atropos.sandbox.contract import Sandbox, SnapshotLayer
from atropos.sandbox.host.files import skeleton, volumes
from atropos.sandbox.host.group_network import GroupNetwork
from atropos.sandbox.host.host_state import HostState
from atropos.sandbox.host.process.prestart import Prestarted
from atropos.sandbox.host.slot import SlotSandbox
from atropos.sandbox.host.slot_network import SlotNetwork
from atropos.sandbox.linux import cgroups, host_limits, slot_cgroup, syscalls
from atropos.trees import remove_tree
from atropos.wire import Feature, ImageInfo, OpError, SlotLimits, ViewFolders, ViewInfo

if TYPE_CHECKING:
    from atropos.images.store import ImageStore

_OF_PATHS: dict[int, Literal["not_found", "not_directory", "is_directory", "bad_path", "permission"]] = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_directory",
    errno.EISDIR: "is_directory",
    errno.ELOOP: "bad_path",
    errno.ENAMETOOLONG: "bad_path",
    errno.EROFS: "permission",
}
"""What errors of a mount say of its paths, which are the client's."""


class SlotHost:
    """Makes sandboxes on this machine; made within the event loop.

    Raises:
        IsolationUnavailable: this machine can't make slots; the message says what to change.
        ConfigError: a base is not there.
    """

    def __init__(self, config: ServerConfig, entered: Entered, prestarted: Prestarted) -> None:
        _check_disk(config, entered)
        self.state = HostState(config, entered, prestarted)
        self.max_layers = self.state.cells.max_layers
        self.disk_mib = self.state.cells.mib
        self.no_quota = self.state.entered.no_cells if self.state.entered.cells is None else ""
        self._serial = itertools.count(1)
        self._importing = 0
        self._store: ImageStore | None = None

    def __repr__(self) -> str:
        return f"<SlotHost {len(self.state.live)} live, {len(self.state.layers)} layers>"

    # ------------------------------------------------------------------------------------------------------------ slots

    async def start(
        self,
        name: str,
        *,
        network: bool = False,
        limits: SlotLimits | None = None,
        joins: SlotNetwork | None = None,
    ) -> SlotSandbox:
        """Start a sandbox on a fresh volume; see `contract.Host.start`.

        Args:
            name: for messages.
            network: whether it gets egress.
            limits: instead of the configured ones.
            joins: another slot's network to join; the volume is then in memory.
        """
        if network and self.state.egress is None:
            raise NotSupported("network=True: this server gives no slot a network (allow_network is false)")
        base = self.state.bases[None]
        unique = f"{next(self._serial)}"
        on_disk = self.state.config.volume == "disk" and joins is None
        # Limits of its own are the probe's and a view's, which `joins` tells apart where it matters.
        probe, limits = limits is not None, limits or self.state.config.limits
        disk = await self.state.cells.acquire(unique, limits.disk_mib, probe=probe) if on_disk else None
        most_cores = slot_cgroup.ceiling(limits, self.state.config.slots)
        folder = f"{self.state.scratch}/slots/{unique}"
        # Until the sandbox exists, whose `stop` undoes all of this.
        with contextlib.ExitStack() as undo:
            undo.callback(self.state.cells.release, disk)
            try:
                cgroup = slot_cgroup.SlotCgroup(
                    self.state.entered.cgroups,
                    f"slot{unique}",
                    limits,
                    most_cores,
                    self.state.ready_cgroups,
                    f"{self.state.ceilings}/{unique}",
                )
                undo.callback(cgroup.remove)
                gateway = self.state.gateway is not None and (network if joins is None else joins.has_egress)
                volume = volumes.create(folder, base, limits, self.state.files, disk, cgroup.mounts(), gateway=gateway)
            except OSError as error:
                raise SandboxError(f"slot {name} could not be created: {error}{host_limits.named()}") from error
            undo.pop_all()
        sandbox = SlotSandbox(self.state, name, volume, cgroup, limits, network=network, joins=joins)
        # Before its start: what was half started has to be ended by `aclose` as well.
        self.state.live.add(sandbox)
        try:
            await sandbox.start(base)
        except BaseException as error:
            # BaseException, and shielded: a cancelled start may have left processes, mounts and a cgroup.
            await asyncio.shield(sandbox.stop())
            if isinstance(error, (OSError, ValueError)):
                raise SandboxError(f"slot {name} could not be started: {error}") from error
            raise
        return sandbox

    async def view(
        self,
        of: Sandbox,
        name: str,
        layers: Sequence[SnapshotLayer],
        base: str | None,
        folders: ViewFolders,
        *,
        gpus: Sequence[int] = (),
    ) -> tuple[SlotSandbox, ViewInfo]:
        """Start a view of a slot; see `contract.Host.view`."""
        assert isinstance(of, SlotSandbox)
        sandbox = await self.start(name, limits=of.limits, joins=of.network)
        # Servers of the agent run in the slot: what they ran out of belongs to the tests' result.
        sandbox.watch.viewed = of.watch
        try:
            view = of.view_of(folders, layers, base)
            await sandbox.change_root(layers, base, view=view)
            if gpus:
                await sandbox.add_gpus(gpus)
            await sandbox.add_authority()
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox, view.info()

    def private_network(self) -> GroupNetwork:
        """A new network; see `contract.Host.private_network`."""
        return GroupNetwork()

    async def share(self, of: Sandbox, source: str, sandbox: Sandbox, path: str, *, read_only: bool) -> OpError | None:
        """Mount what one slot has in another; see `contract.Host.share`."""
        assert isinstance(of, SlotSandbox)
        assert isinstance(sandbox, SlotSandbox)
        # A warm slot that was given another root has its files there; the first one is empty.
        root = of.volume.next_root if of.volume.restacked else of.volume.root
        try:
            await self.state.roots.share(root, source, sandbox.first_process, path, read_only=read_only)
        except OSError as error:
            message = f"{source} can't be mounted at {path}: {error.strerror}"
            if error.errno in _OF_PATHS:
                return OpError(error=_OF_PATHS[error.errno], message=message)
            if error.errno == errno.ENOSPC and volumes.exhausted(sandbox.volume):
                return OpError(error="no_space", message=message)
            if error.errno in host_limits.USED_UP:
                raise BackendUnavailable(f"mounts: {message}{host_limits.named()}") from error
            raise NotSupported(f"mounts: {message}") from error
        return None

    # ----------------------------------------------------------------------------------------------------------- images

    @property
    def store(self) -> ImageStore:
        """The host's images; see `contract.Host.store`."""
        if self._store is None:
            from atropos.images.store import ImageStore  # few servers need it

            if self.state.entered.image_folder is None:
                raise NotSupported(self.state.entered.no_images)
            try:
                self._store = ImageStore(
                    self.state.config.image_store, self.state.entered.image_folder, self.state.entered.slot_ids
                )
            except OSError as error:
                raise NotSupported(f"image_store.folder: {error}") from error
        return self._store

    def add_base(self, name: str, image: ImageInfo) -> None:
        """Make an image a base of this name, and keep it until `drop_base`.

        Raises:
            ImageUnavailable: it is no longer there.
            NotSupported: it was built on a base that this server lacks.
        """
        if name in self.state.bases:
            return
        # Held (a lock on each layer) before it is looked at: the store may remove unused images at any time.
        folders, below = self.store.hold(image)
        try:
            root = skeleton.root_of(folders) if below is None else {}
            base = skeleton.Base(folders.pop()) if below is None else self.state.base(base_name(below))
            if self.state.entered.slot_ids == 1:  # there is only root
                # Its user has no id here; programs then run as the only one that exists.
                image = image.model_copy(update={"user": None})
            layers = (*folders, *base.layers)
            base = self.state.completed(replace(base, image=image, layers=layers, root=root, addition=None))
        except BaseException as error:
            self.store.release(image.id)
            if isinstance(error, OSError):
                raise ImageUnavailable(f"{image.source}: {error}") from error
            raise
        self.state.bases[name] = base

    def drop_base(self, name: str) -> None:
        """Forget an unused base; the store may then remove its image."""
        base = self.state.bases.pop(name)
        assert base.image is not None
        if base.addition is not None:
            remove_tree(base.addition)
        self.store.release(base.image.id)

    def base_image(self, source: str) -> ImageInfo:
        """A base of the server; see `contract.Host.base_image`. Its id changes when its programs do."""
        return ImageInfo(id=skeleton.identity(self.state.base(base_name(source))), source=source, bytes=0)

    async def import_layer(self, fill: Callable[[str], Awaitable[None]]) -> SnapshotLayer:
        """Make a layer of what `fill` writes into a folder; see `contract.Host.import_layer`."""
        if self.max_layers is not None and len(self.state.layers) + self._importing >= self.max_layers:
            raise SandboxError(f"no cell is free for a layer, with {self.max_layers} layers on disk")
        self._importing += 1
        try:
            volume = await self._blank_volume()
            try:
                await fill(volume.upper)
                # Before it is measured and listed: from here on nobody can change what leases will start from.
                volumes.remount_read_only(volume)
                layer = SnapshotLayer(volume.upper, await asyncio.to_thread(volumes.used_bytes, volume))
            except BaseException:
                await self.state.disposer.submit(volume.detach(), volume.disk)
                raise
            self.state.layers[layer] = volume
        finally:
            self._importing -= 1
        return layer

    async def _blank_volume(self) -> volumes.Volume:
        unique = f"{next(self._serial)}"
        limits = self.state.config.limits
        disk = await self.state.cells.acquire(unique, limits.disk_mib) if self.state.config.volume == "disk" else None
        try:
            return volumes.blank(f"{self.state.scratch}/slots/{unique}", limits, disk)
        except OSError as error:
            self.state.cells.release(disk)
            raise SandboxError(f"a layer could not be created: {error}") from error

    async def drop_layer(self, layer: SnapshotLayer) -> None:
        """Drop an unused layer."""
        volume = self.state.layers.pop(layer, None)
        if volume is not None:
            try:
                await self.state.disposer.submit(volume.detach(), volume.disk)
            except OSError as error:
                raise SandboxError(f"layer {layer.path} could not be dropped: {error}") from error

    async def probe(self) -> Sequence[Feature]:
        """Try every isolation property from inside a throw-away sandbox."""
        from atropos.sandbox.host import probe

        return await probe.run(self.state, self.start)

    async def aclose(self) -> None:
        """Undo what was set up for the server as a whole."""
        # Slots first, then layers, spawner and proxy: each of these has users among the ones before.
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self.state.live)))
        for volume in self.state.layers.values():
            with contextlib.suppress(OSError):  # cells are removed as a whole, with this server
                await self.state.disposer.submit(volume.detach(), None if self.state.entered.cells else volume.disk)
        self.state.layers.clear()
        await self.state.disposer.aclose()
        if self._store is not None:
            await self._store.aclose()
        if self.state.entered.disk is not None:
            await asyncio.to_thread(remove_tree, self.state.entered.disk)
        if self.state.egress is not None:
            await self.state.egress.aclose()
        self.state.roots.close()
        await self.state.spawner.aclose()
        with contextlib.suppress(OSError):
            # The server may not be allowed to, where root mounted it; then it goes with the mount namespace.
            syscalls.umount(self.state.scratch)
        cgroups.release(self.state.entered.cgroups)


def _check_disk(config: ServerConfig, entered: Entered) -> None:
    """Refuse a limit that this machine can't enforce."""
    if config.volume != "disk" or entered.cells is not None:
        return
    for name in ("disk_mib", "inodes"):
        if getattr(config.limits, name) != SlotLimits.model_fields[name].default:
            raise IsolationUnavailable(
                f"limits.{name}: volume='disk' can't be limited here ({entered.no_cells}); leave it out to run without "
                "a limit, or start the server as root with loop devices and e2fsprogs, or use volume='memory'"
            )
