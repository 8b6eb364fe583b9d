"""Slots on this machine: what they all share, and the making of each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atropos.config import ServerConfig, SlotLimits
from atropos.errors import ConfigError, ImageUnavailable, IsolationUnavailable, NotSupported, SandboxError
from atropos.images.reference import POOL_BASE
from atropos.sandbox.boot import root_phase
from atropos.sandbox.contract import Layer, Sandbox
from atropos.sandbox.host import bwrap, egress_supervisor, kernel_bounds, prestart, runtime, skeleton, views, volumes
from atropos.sandbox.host.root_changer import RootChanger
from atropos.sandbox.host.slot import SlotSandbox
from atropos.sandbox.host.slot_network import SlotNetwork
from atropos.sandbox.host.spawner_client import SpawnerClient
from atropos.sandbox.linux import cgroups, disks, slot_cgroup, syscalls
from atropos.wire import Feature, ImageInfo

if TYPE_CHECKING:
    from atropos.images.store import ImageStore

log = logging.getLogger(__name__)
CELL_DEADLINE_S = 20.0
"""Longest that a start waits for a place on disk that is just being emptied, in seconds."""


class SlotHost:
    """Makes sandboxes on this machine; `await SlotHost.create(config)` after `root_phase.enter(config)`."""

    def __init__(self, config: ServerConfig, entered: root_phase.Entered) -> None:
        self.config = config
        self._entered = entered
        self._scratch = entered.scratch
        self._live: set[SlotSandbox] = set()
        self._layers: dict[str, volumes.Volume] = {}
        self._bases: dict[str | None, skeleton.Base] = {}
        self._creators = list(range(entered.creators[0], sum(entered.creators)))
        self._serial = itertools.count(1)
        self._store: ImageStore | None = None
        self._bwrap = shutil.which("bwrap") or ""
        self.environment = environment(config)
        self.spawner: SpawnerClient
        self.roots = RootChanger()
        self.disposer = volumes.Disposer(self._free_cell)
        # the last of the spare uids is the proxy's own, so that it can touch neither the server nor a slot
        self.egress = (
            egress_supervisor.EgressSupervisor(config, self._creators.pop() if self._creators else None)
            if config.allow_network
            else None
        )
        self._runtime: runtime.Runtime
        self._seccomp: str
        self._empty = f"{self._scratch}/empty"
        # the last one that came free first: fewer of them ever take room on the disk
        self._cells: asyncio.LifoQueue[str] = asyncio.LifoQueue()
        self._reserved: set[str] = set()
        self.max_layers: int | None = None
        if entered.cells is not None:
            plan = disks.CellPlan.of(config)
            self.max_layers = plan.layers
            for number in reversed(range(plan.cells)):
                self._cells.put_nowait(f"{entered.cells}/{number}")

    def __repr__(self) -> str:
        return f"<SlotHost {len(self._live)} live, {len(self._layers)} layers>"

    @classmethod
    async def create(cls, config: ServerConfig) -> SlotHost:
        """Set up what all slots share.

        Raises:
            IsolationUnavailable: this machine can't make slots; the message says what to change.
            ConfigError: a base is not there.
        """
        host = cls(config, root_phase.entered())
        root_phase.check_programs()
        _check_disk(config, host._entered)
        try:
            prestarted = prestart.adopt(host._scratch, config.base)
            shared = prestarted.shared()
            host._seccomp, host._runtime = shared.seccomp, shared.runtime
            os.mkdir(f"{host._scratch}/runtime/{volumes.NEXT}", 0o755)
            for path in (host._runtime.empty, host._empty):
                volumes.read_only(path)
            host._prepare_bases(shared.skeleton)
        except OSError as error:
            raise IsolationUnavailable(f"the server's own files could not be set up: {error}") from error
        host.spawner = SpawnerClient(prestarted.spawner, prestarted.starts)
        if host.egress is not None:
            host.egress.start()
        return host

    def _prepare_bases(self, over_host: skeleton.Base | None) -> None:
        default = prestart.default_base(self.config.base)
        if over_host is not None:
            self._bases[None] = over_host
        named = {**({} if default is None else {None: default}), **self.config.bases}
        for index, (name, path) in enumerate(named.items()):
            if not os.path.isdir(path):
                field = "base" if name is None else f"bases[{name!r}]"
                raise ConfigError(f"{field}: {path} is not a folder that the server can read")
            if not self._owned(path):
                field = "base" if name is None else f"bases[{name!r}]"
                raise ConfigError(
                    f"{field}: {path} belongs to a user that slots don't have; give it to theirs (chown -R to uid "
                    f"{self._outside_root()}), or keep it on a file system that can be mounted with other ids"
                )
            # bound to a short path of ours: overlay options have their own meaning for ':' and ','
            target = f"{self._scratch}/bases/{index}"
            os.mkdir(target)
            syscalls.mount(path, target, None, syscalls.MS_BIND)
            self._bases[name] = skeleton.Base(target)

    @staticmethod
    def _owned(path: str) -> bool:
        """Whether a base's files belong to ids that slots have: an unmapped owner is shown as the overflow id."""
        return os.stat(path).st_uid != kernel_bounds.sysctl("kernel/overflowuid", 65_534)

    @staticmethod
    def _outside_root() -> str:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split()[1]

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
            joins: another slot's network to be in; the volume is then in memory.
        """
        probe = limits is not None
        limits = limits or self.config.limits
        if network and self.egress is None:
            raise NotSupported("network=True: this server gives no slot a network (allow_network is false)")
        stands_on = self._bases[None]
        unique = f"{next(self._serial)}"
        disk = await self._disk_for(unique, probe=probe) if joins is None else None
        try:
            cgroup, volume = self._make_cgroup_and_volume(unique, stands_on, limits, disk)
        except OSError as error:
            self._free_cell(disk)
            raise SandboxError(f"slot {name} could not be made: {error}") from error
        sandbox = SlotSandbox(self, name, volume, cgroup, limits, network=network, joins=joins)
        self._live.add(sandbox)
        try:
            await sandbox.start(stands_on)
        except BaseException as error:
            await asyncio.shield(sandbox.stop())
            if isinstance(error, (OSError, ValueError)):
                raise SandboxError(f"slot {name} could not be started: {error}") from error
            raise
        return sandbox

    def _make_cgroup_and_volume(
        self, unique: str, base: skeleton.Base, limits: SlotLimits, disk: str | None
    ) -> tuple[slot_cgroup.SlotCgroup, volumes.Volume]:
        most_cores = slot_cgroup.ceiling(limits, self.config.slots)
        cgroup = slot_cgroup.SlotCgroup(self._entered.cgroups, f"slot{unique}", limits, most_cores)
        folder = f"{self._scratch}/slots/{unique}"
        try:
            return cgroup, volumes.create(folder, base, limits, self._runtime.path, self._empty, disk)
        except OSError:
            cgroup.remove()
            raise

    async def view(
        self, of: Sandbox, name: str, layers: Sequence[Layer], base: str | None, folders: Sequence[str]
    ) -> SlotSandbox:
        """Start a view of a slot; see `contract.Host.view`."""
        assert isinstance(of, SlotSandbox)
        sandbox = await self.start(name, network=of.network.wanted, limits=of.limits, joins=of.network)
        try:
            await sandbox.stand_on(layers, base, view=views.View(of.layer_paths, tuple(folders), self._empty))
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        of.give_way()
        return sandbox

    async def _disk_for(self, unique: str, *, probe: bool = False) -> str | None:
        """Where on disk a volume's files go; waits for a cell that is just being emptied.

        Raises:
            SandboxError: no cell came free, or the disk has no room for one.
        """
        entered = self._entered
        if entered.disk is None:
            return None
        if entered.cells is None:
            return f"{entered.disk}/{unique}"
        if probe:
            return f"{entered.cells}/{disks.PROBE}/{unique}"
        try:
            async with asyncio.timeout(CELL_DEADLINE_S):
                cell = await self._cells.get()
        except TimeoutError:
            raise SandboxError(f"volume='disk': no place on disk came free within {CELL_DEADLINE_S:g} s") from None
        if cell not in self._reserved:
            try:
                await asyncio.to_thread(disks.reserve, entered.images[int(os.path.basename(cell))])
            except BaseException as error:
                self._cells.put_nowait(cell)
                if isinstance(error, OSError):
                    mib = self.config.limits.disk_mib
                    raise SandboxError(
                        f"volume='disk': the disk has no room for {mib} MiB more ({error.strerror})"
                    ) from error
                raise
            self._reserved.add(cell)
        return f"{cell}/{unique}"

    def _free_cell(self, disk: str | None) -> None:
        """A volume's folder was removed, or never made: its cell may be used again, if nothing is left in it."""
        if disk is None or self._entered.cells is None:
            return
        cell = os.path.dirname(disk)
        if os.path.basename(cell) == disks.PROBE:
            return
        left = os.listdir(cell)
        if left:
            log.error("%s could not be emptied and is not used again: %s", cell, left[:3])
        else:
            self._cells.put_nowait(cell)

    def base(self, name: str | None) -> skeleton.Base:
        """A base by its name.

        Raises:
            NotSupported: there is none of that name.
        """
        found = self._bases.get(name)
        if found is None:
            known = ", ".join(repr(key) for key in self._bases if key is not None) or "none"
            raise NotSupported(f"base={name!r} is not one of this server's (bases: {known})")
        return found

    # ----------------------------------------------------------------------------------------------------------- images

    @property
    def store(self) -> ImageStore:
        """The host's images.

        Raises:
            ImageUnavailable: the server was given no folder for them.
        """
        if self._store is None:
            from atropos.images.store import ImageStore  # few servers need it

            if self._entered.image_folder is None:
                raise ImageUnavailable(self._entered.no_images)
            try:
                self._store = ImageStore(self.config.image_store, self._entered.image_folder, self._entered.slot_ids)
            except OSError as error:
                raise ImageUnavailable(f"image_store.folder: {error}") from error
        return self._store

    def add_base(self, name: str, image: ImageInfo) -> None:
        """Make an image a base of this name, which nobody removes until `drop_base`.

        Raises:
            ImageUnavailable: it is no longer there.
        """
        if name in self._bases:
            return
        chain = self.store.chain(image)
        folders: list[str] = []
        with contextlib.ExitStack() as held:
            for each in chain:
                folders += [self.store.hold(each)]
                held.callback(self.store.let_go, each.id)
            held.pop_all()
        if self._entered.slot_ids == 1:  # everybody is root there
            image = image.model_copy(update={"user": None})
        below = chain[-1].parent
        base = skeleton.Base(folders.pop()) if below is None else self.base(base_name(below))
        self._bases[name] = replace(base, image=image, layers=(*folders, *base.layers))

    def drop_base(self, name: str) -> None:
        """Nothing stands on the image any more; it may be removed for others."""
        base = self._bases.pop(name)
        assert base.image is not None
        for image in self.store.chain(base.image):  # none of them could be removed meanwhile
            self.store.let_go(image.id)

    def base_image(self, source: str) -> ImageInfo:
        """A base of the server as what images are built on; its id changes when its programs do.

        Raises:
            NotSupported: there is no such base.
        """
        return ImageInfo(id=skeleton.identity(self.base(base_name(source))), source=source, bytes=0)

    @property
    def counts_pids(self) -> bool:
        """Whether cgroups bound the processes of a slot."""
        return any("pids" in tree.controllers for tree in self._entered.cgroups.trees)

    def threads(self, limits: SlotLimits) -> dict[str, str]:
        """The part of the environment that says how many threads to use."""
        return _threads(limits, self.config.slots)

    def restack(self, volume: volumes.Volume, base: str | None, layers: Sequence[Layer]) -> None:
        """Mount another root in a volume's gate; see `volumes.restack`."""
        paths = [layer.path for layer in layers]
        volumes.restack(volume, self.base(base), paths, self._runtime.empty, self._empty)

    def request(
        self,
        volume: volumes.Volume,
        base: skeleton.Base,
        cgroup: slot_cgroup.SlotCgroup,
        limits: SlotLimits,
        *,
        network: bool,
        joins: bool,
    ) -> dict[str, Any]:
        """What the spawner needs to know to start one slot."""
        # where cgroups count processes, this is the bound of the largest lease that the slot may be given to
        processes = self.config.slots * limits.pids + 64 if self.counts_pids else limits.pids + 2
        creator = self._creators.pop(0) if self._creators else None
        if creator is not None:
            self._creators.append(creator)  # round and round: reused long after its last slot is gone
        ranged = creator is not None
        preload = volumes.preload_cover(volume.root, self._runtime.empty, self._empty)
        seen = f"{self._scratch}/own"
        return {
            "own": (volume.folder, seen, f"{self._scratch}/slots"),
            "argv": bwrap.command(
                self._bwrap,
                replace(volume, folder=seen),
                base,
                self._runtime.empty,
                preload,
                self._runtime.argv,
            ),
            "proxy_port": egress_supervisor.PORT if network else None,
            "joins": joins,
            "ids": self._entered.slot_ids,
            "creator": creator,
            "cgroups": cgroup.paths,
            "seccomp": self._seccomp,
            # before the namespace is made: what it then allows in sum, to all its uids together
            "rlimits_before": {
                "SIGPENDING": 4096,
                "MSGQUEUE": 262_144,
                "MEMLOCK": 65_536,
                **({"NPROC": processes} if ranged else {}),
            },
            # CORE 1: no file is that small, and a handler of the host's, which runs as its root, is not started either
            "rlimits": {"NOFILE": limits.open_files, "CORE": 1, "NPROC": processes, "RTPRIO": 0, "NICE": 0},
            "counters": kernel_bounds.counters(2 * self.config.slots + 2),
            "ipc": kernel_bounds.ipc_bounds(limits),
        }

    def forget(self, sandbox: SlotSandbox) -> None:
        """A sandbox has ended."""
        self._live.discard(sandbox)

    def keep(self, layer: Layer, volume: volumes.Volume) -> None:
        """A sandbox's volume has become a layer."""
        self._layers[layer.id] = volume

    async def import_layer(self, layer_id: str, fill: Callable[[str], Awaitable[None]]) -> Layer:
        """Make a layer of what `fill` writes into a folder; see `contract.Host.import_layer`."""
        unique = f"{next(self._serial)}"
        if self.max_layers is not None and len(self._layers) >= self.max_layers:
            raise SandboxError(f"layer {layer_id} finds no place: {self.max_layers} are kept on disk already")
        disk = await self._disk_for(unique)
        try:
            volume = volumes.blank(f"{self._scratch}/slots/{unique}", self.config.limits, disk)
        except OSError as error:
            self._free_cell(disk)
            raise SandboxError(f"layer {layer_id} could not be made: {error}") from error
        try:
            await fill(volume.upper)
            if volume.disk is None:
                volumes.freeze(volume)
        except BaseException:
            await self.disposer.give(volume.detach(), volume.disk)
            raise
        layer = Layer(layer_id, volume.upper, volumes.used_bytes(volume))
        self.keep(layer, volume)
        return layer

    async def drop_layer(self, layer: Layer) -> None:
        """Forget a layer on which nothing stands any more."""
        volume = self._layers.pop(layer.id, None)
        if volume is not None:
            try:
                await self.disposer.give(volume.detach(), volume.disk)
            except OSError as error:
                raise SandboxError(f"layer {layer.id} could not be dropped: {error}") from error

    async def probe(self) -> Sequence[Feature]:
        """Try every isolation property from inside a throw-away sandbox."""
        from atropos.sandbox.host import probe

        return await probe.run(self, self._entered)

    async def aclose(self) -> None:
        """Undo what was set up for the server as a whole."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._live)))
        for volume in self._layers.values():
            with contextlib.suppress(OSError):  # a cell goes as a whole, with this server
                await self.disposer.give(volume.detach(), None if self._entered.cells else volume.disk)
        self._layers.clear()
        await self.disposer.aclose()
        if self._entered.disk is not None:
            await asyncio.to_thread(volumes.remove_tree, self._entered.disk)
        if self.egress is not None:
            await self.egress.aclose()
        self.roots.close()
        await self.spawner.aclose()
        with contextlib.suppress(OSError):
            syscalls.umount(self._scratch)
        cgroups.release(self._entered.cgroups)


def base_name(source: str) -> str | None:
    """The name of a base by its source; None: the default one."""
    name = source.removeprefix("atropos-base:")
    return None if source == POOL_BASE else name


def _check_disk(config: ServerConfig, entered: root_phase.Entered) -> None:
    """Refuse a limit that can't be kept."""
    if config.volume == "memory" or entered.cells is not None:
        return
    for name in ("disk_mib", "inodes"):
        if getattr(config.limits, name) != SlotLimits.model_fields[name].default:
            raise IsolationUnavailable(
                f"limits.{name}: volume='disk' can't be limited here ({entered.no_cells}); leave it out to run without "
                "a limit, or start the server as root with loop devices and e2fsprogs, or use volume='memory'"
            )


def environment(config: ServerConfig) -> dict[str, str]:
    """The environment that every command starts with."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
        "TERM": "xterm",
        "LC_CTYPE": "C.UTF-8",
        "PIP_ROOT_USER_ACTION": "ignore",
        **_threads(config.limits, config.slots),
    }


def _threads(limits: SlotLimits, slots: int) -> dict[str, str]:
    """What a program should use of the machine, not what it can see of it."""
    cores = os.cpu_count() or 1
    quota = limits.cpu_quota
    threads = str(max(1, min(cores, round(quota) if quota is not None else cores // slots)))
    libraries = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "BLIS", "RAYON", "JULIA")
    names = [f"{name}_NUM_THREADS" for name in libraries]
    return dict.fromkeys([*names, "POLARS_MAX_THREADS", "GOMAXPROCS", "PYTHON_CPU_COUNT"], threads)
