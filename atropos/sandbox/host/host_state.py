"""What all slots of this machine share: bases, the spawner, cells on disk, and the live slots."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atropos.config import ServerConfig
from atropos.errors import ConfigError, IsolationUnavailable, NotSupported
from atropos.sandbox.boot.root_phase import Entered
from atropos.sandbox.contract import Sandbox, SnapshotLayer
from atropos.sandbox.host import egress_supervisor, kernel_bounds
from atropos.sandbox.host.files import added, skeleton, sysfs, volumes
from atropos.sandbox.host.files.disk_cells import DiskCells
from atropos.sandbox.host.files.root_changer import RootChanger
from atropos.sandbox.host.process import bwrap, prestart, runtime
from atropos.sandbox.host.process.spawner_client import SpawnerClient
from atropos.sandbox.linux import slot_cgroup, syscalls
from atropos.sandbox.linux.sysctl import sysctl
from atropos.sandbox.programs.gateway import HOSTNAME
from atropos.wire import SlotLimits

if TYPE_CHECKING:
    from atropos.sandbox.host.cdi import Device
    from atropos.sandbox.programs.spawner import StartRequest

_ENVIRONMENT = {
    # the last one is where pip puts programs if /usr is the host's, and so read-only
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/root/.local/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "HOSTNAME": HOSTNAME,
    "LC_CTYPE": "C.UTF-8",
    "PIP_ROOT_USER_ACTION": "ignore",
}
_THREADS = (
    *(f"{name}_NUM_THREADS" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "BLIS", "RAYON", "JULIA")),
    *("POLARS_MAX_THREADS", "GOMAXPROCS", "PYTHON_CPU_COUNT"),
)


class HostState:
    """Made before the server listens.

    Attributes:
        live: the slots that were started and are not confirmed gone.
        layers: volumes that have become layers.
        bases: by name; None: the default one.
        environment: what every command starts with.
        files: what all slots see.
        ceilings: a folder for what each slot reads of its ceiling of CPU time.
        bwrap: path of bubblewrap.
        gateway: a family of addresses (`gateway.usable_family`); None: slots reach hosts by their proxy's variables
            alone.
        gpus: what a slot gets with each.

    Raises:
        IsolationUnavailable: this machine can't make slots; the message says what to change.
        ConfigError: a base is not there, or GPUs are not; or a slot is larger than the machine.
    """

    def __init__(self, config: ServerConfig, entered: Entered, prestarted: prestart.Prestarted) -> None:
        memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        if config.limits.memory_mib > memory_mib:
            raise ConfigError(
                f"limits.memory_mib: {config.limits.memory_mib} is more than this machine has ({memory_mib} MiB)"
            )
        self.config = config
        self.entered = entered
        self.scratch = entered.scratch
        self.ready_cgroups = [path for tree in entered.cgroups.trees for path in tree.ready]
        self.live: set[Sandbox] = set()
        self.layers: dict[SnapshotLayer, volumes.Volume] = {}
        self.bases: dict[str | None, skeleton.Base] = {}
        self._serial = itertools.count(1)
        self.environment = _ENVIRONMENT | self.threads(config.limits)
        self.files = _shared_files(self.scratch)
        self.gpus: list[Device] = []
        if config.gpus:
            from atropos.sandbox.host.cdi import find  # most servers have none, and need not load its models

            self.gpus = find(config.cdi_folders, config.gpu_devices, config.gpus)
        self.ceilings = f"{self.scratch}/ceilings"
        self.bwrap = shutil.which("bwrap") or ""
        self.cells = DiskCells(config, entered)
        # Cells are given back by whoever frees the volume: before its files are gone, none may be used again.
        self.disposer = volumes.Disposer(self.cells.release)
        first = entered.slot_ids + 1  # after the server's own
        creators = list(range(first, first + entered.creators))
        # the last of the spare uids is the proxy's own, so that it can touch neither the server nor a slot
        proxy = creators.pop() if config.allow_network and creators else None
        self.egress = egress_supervisor.EgressSupervisor(config, proxy) if config.allow_network else None
        self._creators = itertools.cycle(creators)  # in turn, so that each is reused as late as possible
        try:
            # Made by a process of its own meanwhile, and needed from here on.
            self._seccomp, over_host, self.gateway = prestarted.shared()
            self._make_files()
            self._prepare_bases(over_host)
        except OSError as error:
            raise IsolationUnavailable(f"the server's own files could not be set up: {error}") from error
        self.roots = RootChanger()
        self.spawner = SpawnerClient(prestarted.spawner, prestarted.sock)
        if self.egress is not None:
            self.egress.start()

    def _make_files(self) -> None:
        os.mkdir(f"{self.files.runtime}/{volumes.NEXT}", 0o755)
        os.mkdir(self.ceilings, 0o755)
        trees = self.entered.cgroups.trees
        sysfs.build(self.files.sys, [name for tree in trees if tree.version == 1 for name in tree.controllers])
        sysfs.build_network(self.files.sys_network)
        for path in (self.files.empty_file, self.files.empty_folder):
            # They are mounted into every slot: a writable one would be a way from one slot to another.
            syscalls.bind_read_only(path)

    def _prepare_bases(self, over_host: skeleton.Base | None) -> None:
        default = prestart.default_base(self.config.base)
        if over_host is not None:
            self.bases[None] = over_host
        named = {**({} if default is None else {None: default}), **self.config.bases}
        for index, (name, path) in enumerate(named.items()):
            field = "base" if name is None else f"bases[{name!r}]"
            if not os.path.isdir(path):
                raise ConfigError(f"{field}: {path} is not a folder that the server can read")
            if not any(os.path.lexists(f"{path}/bin/{shell}") for shell in ("bash", "sh")):
                raise ConfigError(f"{field}: {path} has no /bin/sh: it is no root file system")
            # an owner that nobody here has is shown as the overflow id; after the slots' ids comes the server's own
            owner = os.stat(path).st_uid
            if owner >= self.entered.slot_ids or owner == sysctl("kernel/overflowuid", 65_534):
                root = Path("/proc/self/uid_map").read_text(encoding="ascii").split()[1]
                raise ConfigError(
                    f"{field}: {path} belongs to a user that slots don't have; give it to theirs (chown -R to uid "
                    f"{root}), or keep it on a file system that can be mounted with other ids"
                )
            # bound to a short path of ours: overlay options have their own meaning for ':' and ','
            target = f"{self.scratch}/bases/{index}"
            os.mkdir(target)
            syscalls.mount(path, target, None, syscalls.MS_BIND)
            self.bases[name] = self.completed(skeleton.Base(target))

    def completed(self, base: skeleton.Base) -> skeleton.Base:
        """A base with what a container's runtime adds to it; who drops the base removes that.

        Raises:
            OSError: it could not be made.
        """
        folder = f"{self.scratch}/bases/added-{next(self._serial)}"
        if not added.build(folder, (*base.layers, base.lower)):
            return base
        return replace(base, layers=(folder, *base.layers), addition=folder)

    def base(self, name: str | None) -> skeleton.Base:
        """A base by its name.

        Raises:
            NotSupported: there is none of that name.
        """
        base = self.bases.get(name)
        if base is None:
            known = ", ".join(repr(key) for key in self.bases if key is not None) or "none"
            raise NotSupported(f"base={name!r}: this server has no such base (bases: {known})")
        return base

    @property
    def counts_pids(self) -> bool:
        """Whether cgroups bound the processes of a slot."""
        return "pids" in self.entered.cgroups.controllers

    def threads(self, limits: SlotLimits) -> dict[str, str]:
        """Variables that limit the threads of libraries to a slot's share of the CPUs."""
        cores = len(os.sched_getaffinity(0))
        # Libraries count the machine's cores and know no cgroup quota: without bounds, each slot would start a thread
        # per core for every matrix product.
        quota = limits.cpu_quota
        threads = str(max(1, min(cores, round(quota) if quota is not None else cores // self.config.slots)))
        return dict.fromkeys(_THREADS, threads)

    def start_request(
        self,
        volume: volumes.Volume,
        base: skeleton.Base,
        cgroup: slot_cgroup.SlotCgroup,
        limits: SlotLimits,
        *,
        network: bool,
        joins: bool,
    ) -> StartRequest:
        """What the spawner needs to know to start one slot."""
        # where cgroups count processes, this is the bound of the largest lease that the slot may be given to
        processes = self.config.slots * limits.pids + 64 if self.counts_pids else limits.pids + 1
        creator = next(self._creators, None)
        preload = volumes.preload_cover(volume.root, self.files)
        seen = f"{self.scratch}/own"
        return {
            "own": (os.fsencode(volume.folder), os.fsencode(seen), os.fsencode(f"{self.scratch}/slots")),
            "sys": f"{volume.folder}/{volumes.SYS}",
            "argv": bwrap.command(self.bwrap, replace(volume, folder=seen), base, preload),
            "proxy_port": egress_supervisor.PORT if network else None,
            "gateway": (self.gateway, self.egress.ports) if network and self.egress and self.gateway else None,
            "joins": joins,
            "ids": self.entered.slot_ids,
            "creator": creator,
            "cgroups": cgroup.paths,
            "seccomp": self._seccomp,
            # before the namespace is made: what it then allows in sum, to all its uids together
            "rlimits_before": {
                "SIGPENDING": 4096,
                "MSGQUEUE": 262_144,
                "MEMLOCK": 65_536,
                **({} if creator is None else {"NPROC": processes}),
            },
            # CORE 1: no file is that small, and a handler of the host's, which runs as its root, is not started either
            "rlimits": {"NOFILE": limits.open_files, "CORE": 1, "NPROC": processes, "RTPRIO": 0, "NICE": 0},
            "counters": kernel_bounds.counters(2 * self.config.slots + 2),
            "ipc": kernel_bounds.ipc_bounds(limits),
        }


def _shared_files(scratch: str) -> volumes.SharedFiles:
    return volumes.SharedFiles(
        runtime=f"{scratch}/runtime",
        sys=f"{scratch}/sys",
        sys_network=f"{scratch}/sys-network",
        system=sysfs.SYSTEM if os.path.isdir(sysfs.SYSTEM) else f"{scratch}/empty",
        empty_file=f"{scratch}/runtime/{runtime.EMPTY}",
        empty_folder=f"{scratch}/empty",
    )
