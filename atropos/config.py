"""Settings that travel to a sandbox server. Each is declared once; pools and envs inherit the declaration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from atropos.errors import ConfigError, LimitTooLarge
from atropos.resources import NOTHING, Resources
from atropos.wire import LeaseLimits, SlotLimits


def _whole(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("write the whole path, from /: a server works in another folder")
    return path


WholePath = Annotated[str, AfterValidator(_whole)]
"""An absolute path of the server's machine."""


def _without_scheme(name: str) -> str:
    if "://" in name:
        raise ValueError("write the host alone, without http:// or https://")
    return name


RegistryName = Annotated[str, AfterValidator(_without_scheme)]
"""HOST[:PORT], or HOST[:PORT]/PATH for a mirror."""


class ImageStoreSettings(BaseModel):
    """Where a host keeps images, and how they get there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: WholePath | None = Field(
        default=None,
        description="local: None is /var/cache/atropos/images as root, else ~/.cache/atropos/images. docker: a folder "
        "of the host that containers share; None: each keeps its own, gone with it",
    )
    quota_mib: int = Field(default=51_200, ge=16, description="unpacked images; unused ones are removed for new ones")
    auth_file: WholePath | None = Field(default=None, description="registry credentials, as `docker login` writes them")
    mirrors: dict[RegistryName, RegistryName] = Field(
        default_factory=dict, description="registry host: host[/path] that is asked first"
    )
    insecure_registries: tuple[RegistryName, ...] = Field(
        default=(), description="hosts (with port) spoken to without TLS"
    )
    pull_timeout_s: float = Field(
        default=600, gt=0, description="longest a registry's image may take, unpacked included"
    )
    unpack_timeout_s: float = Field(
        default=600, gt=0, description="longest an image from a file may take to be unpacked"
    )


def split_names(value: object) -> object:
    """Text as a list: of comma-separated names, or in JSON."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


HostNames = Annotated[tuple[str, ...], BeforeValidator(split_names)]
"""Host names, *.suffixes or networks; as text, comma-separated."""


class SlotSettings(BaseModel):
    """What a pool passes on to each of its servers under the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warm: int | None = Field(
        default=None, ge=0, description="sandboxes started ahead beside the leased; None: by slots"
    )
    bases: dict[str, WholePath] = Field(default_factory=dict, description="further root file systems by name")
    image_store: ImageStoreSettings = Field(
        default=ImageStoreSettings(), description="where images are kept and how they are pulled (docs/images.md)"
    )
    volume: Literal["auto", "memory", "disk"] = Field(
        default="auto", description="where a slot's files are kept; auto: in memory, or on disk in leases of more files"
    )
    largest_disk_mib: int | None = Field(
        default=None,
        ge=8,
        le=1 << 30,
        description="with volume auto: most files of a lease on disk; None: none, but tasks set it by their sizes",
    )
    allow_network: bool = Field(default=False, description="whether leases may ask for (filtered) egress")
    egress_allow: HostNames = Field(
        default=("public",),
        description="hosts that programs may reach: public, names, *.suffixes, addresses or networks",
    )
    egress_deny: HostNames = Field(default=(), description="hosts, addresses or networks never reached")
    egress_mib: int = Field(default=4096, ge=1, description="bytes a lease may move through the proxy, both ways")
    egress_connections: int = Field(default=64, ge=1, description="connections a slot may have open at once")
    unattended_s: float | None = Field(
        default=1800.0,
        gt=0,
        description="docker and local: a container without any client or lease for so long ends by itself; None: never",
    )
    gpus: int = Field(default=0, ge=0, le=1000, description="GPUs of a container, which leases ask for (docs/gpu.md)")
    gpu_devices: HostNames = Field(
        default=("nvidia.com/gpu",),
        description="CDI devices that these are: KIND=NAME, or KIND for those that the machine has of it",
    )
    gpu_type: str | None = Field(
        default=None,
        min_length=1,
        description="what they are, as tasks name it: H100; None: no lease may ask for a type",
    )
    slots_per_gpu: int = Field(
        default=1, ge=1, le=1000, description="leases that share a GPU's time, and its memory without any isolation"
    )
    cdi_folders: tuple[WholePath, ...] = Field(
        default=("/etc/cdi", "/var/run/cdi"), min_length=1, description="where the machine's CDI specifications are"
    )
    require_sandbox: bool = Field(default=False, description="refuse containers that lack any isolation feature")
    require_stateful_sandbox: bool = Field(default=False, description="refuse containers without lasting sessions")


class SandboxSettings(SlotSettings):
    """The same, with what an env names differently."""

    limits: SlotLimits = SlotLimits()
    base: WholePath | None = Field(
        default=None, description="root file system of the slots; None: /rootfs, else the host's /usr"
    )

    def limits_of(self, lease: LeaseLimits) -> SlotLimits:
        """What a slot of this lease may use."""
        return self.limits.with_own(lease)

    @property
    def place_mib(self) -> int:
        """Most files of a lease on disk; 0: leases have none there."""
        return self.largest_disk_mib or 0 if self.volume == "auto" else 0

    def on_disk(self, limits: LeaseLimits | None) -> bool:
        """Whether a lease gets a place on disk: it asks for more files than memory."""
        if limits is None or limits.disk_mib is None or not self.place_mib:
            return False
        return limits.disk_mib > self.limits_of(limits).memory_mib

    @property
    def slot_room(self) -> Resources:
        """What a lease of a slot's own size takes of its container: memory, which also holds its files, and processes.

        Cores are shared, and with `volume="disk"` there are as many places for files as slots.
        """
        return Resources(memory_mib=self.limits.memory_mib, pids=self.limits.pids)

    def beside(self, slots: int, disk_mib: int | None = None) -> Resources:
        """What a container has beside the room of its slots: GPUs, and files on disk, at most what its disk holds."""
        most = slots * self.place_mib
        return Resources(
            gpus=self.gpus * self.slots_per_gpu, disk_mib=most if disk_mib is None else min(most, disk_mib)
        )

    def room(self, limits: LeaseLimits | None) -> Resources:
        """What a lease takes of its container, with those that will join it."""
        return self._own_room(limits) + self.kept_room(limits)

    def kept_room(self, limits: LeaseLimits | None) -> Resources:
        """What of it is kept for those that will join it."""
        return sum(map(self._own_room, limits.members if limits else ()), NOTHING)

    def _own_room(self, limits: LeaseLimits | None) -> Resources:
        """Of nothing less than a slot, so that what fits by room fits by slots."""
        if limits is None:
            return self.slot_room
        asked = replace(limits.resources, cpus=0)
        return self.slot_room.most(asked if self.on_disk(limits) else replace(asked, disk_mib=0))

    def check_room(self, limits: LeaseLimits, slots: int) -> None:
        """Compare what a lease asks for with a whole container.

        Raises:
            LimitTooLarge: no container of this many slots has that.
            ConfigError: nor GPUs of such a type.
        """
        if refused := self.gpu_refusal(limits.gpus or 0, limits.gpu_types):
            raise ConfigError(f"limits.{refused}")
        slot, whole = self.limits, self.slot_room * slots
        largest = {
            "memory_mib": (whole.memory_mib, f"{slots} slots of {slot.memory_mib}"),
            "pids": (whole.pids, f"{slots} slots of {slot.pids}"),
            "disk_mib": (whole.memory_mib, "files are in its memory; for more on disk, set largest_disk_mib"),
        }
        if self.volume == "disk":
            why = "volume='disk': places on disk have one size, set by the pool's limits"
            largest |= {"disk_mib": (slot.disk_mib, why), "inodes": (slot.inodes, why)}
        elif self.on_disk(limits):
            inodes = "files on disk have as many as slots, set by the pool's limits"
            largest |= {"disk_mib": (self.place_mib, "set largest_disk_mib"), "inodes": (slot.inodes, inodes)}
        for name, (most, why) in largest.items():
            asked = getattr(limits, name)
            if asked is not None and asked > most:
                raise LimitTooLarge(name, asked, most, why)
        for each in limits.members:
            self.check_room(each, slots)
        together = self.room(limits)
        for name in ("memory_mib", "pids") if limits.members else ():
            most, why = largest[name]
            if getattr(together, name) > most:
                raise LimitTooLarge(name, getattr(together, name), most, f"{why}; with its members")

    def gpu_refusal(self, gpus: int, types: Sequence[str]) -> str:
        """Why no lease can have so many GPUs of these types (empty: any), as `field: reason; cure`; empty: one can."""
        most = self.gpus if self.slots_per_gpu == 1 else min(self.gpus, 1)
        if gpus > most:
            shared = ", and a lease one, since slots_per_gpu has leases share it" if most < self.gpus else ""
            return f"gpus: {gpus} wanted, a container has {self.gpus}{shared}; set gpus (docs/gpu.md)"
        if not gpus or not types or (self.gpu_type or "").casefold() in {each.casefold() for each in types}:
            return ""
        has = "they are not said to be any" if self.gpu_type is None else f"they are {self.gpu_type}"
        return f"gpu_types: {' or '.join(types)} wanted, {has}; set gpu_type"


class ServerConfig(SandboxSettings):
    """One sandbox server (one container). Read from JSON by `python -m atropos.sandbox`."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65_535, description="0: any free one, named in the ready line")
    token: SecretStr = Field(description="bearer token that every client must send")
    tls: SecretStr | None = Field(default=None, description="certificate and key in PEM; None: plain HTTP")
    slots: int = Field(default=8, ge=1, le=1000)
    max_retired: int | None = Field(default=None, ge=1, description="retired slots that end the server; None: half")
    max_snapshots: int = Field(default=64, ge=0, description="snapshots kept at once; one more is refused")
    max_snapshot_mib: int = Field(default=4096, ge=0, description="bytes that snapshots may hold together")
    heartbeat_s: float = Field(default=5.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0, description="how long leases may go on after SIGTERM")
    die_with_parent: bool = Field(default=False, description="end when the process that started the server ends")
    state_dir: str | None = Field(default=None, description="scratch mount point; None: /run/atropos or a temp dir")

    def revealed(self) -> str:
        """In JSON, with its secrets: never log it."""
        secrets = {name: value.get_secret_value() for name, value in self if isinstance(value, SecretStr)}
        return json.dumps(self.model_dump(mode="json") | secrets)
