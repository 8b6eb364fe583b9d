"""Bodies of HTTP requests and answers."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field, Json

from atropos.wire.base import VERSION, WireMessage
from atropos.wire.operations import Operation


class LeaseLimits(WireMessage):
    """What one lease has instead of the server's `SlotLimits`, field by field; None: as there."""

    memory_mib: int | None = Field(default=None, ge=32, le=1 << 30)
    pids: int | None = Field(default=None, ge=8, le=1 << 22)
    cpu_weight: int | None = Field(default=None, ge=1, le=10_000)
    cpu_quota: float | None = Field(default=None, gt=0)
    disk_mib: int | None = Field(default=None, ge=8, le=1 << 30)
    inodes: int | None = Field(default=None, ge=1000)
    wall_s: float | None = Field(default=None, gt=0)


class LeaseRequest(WireMessage):
    """POST /v1/leases. The client chooses both ids, so that asking again gives the same lease.

    Whoever knows a lease's id may use the lease, and whoever knows a client's id may speak for it: make them unguessable
    (`secrets`) and keep them. The server shows neither to anybody; see `client_name`.
    """

    lease_id: str = Field(min_length=8, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")
    client_id: str = Field(min_length=1, max_length=200)
    trajectory_id: str = Field(default="", max_length=500)
    ttl_s: float = Field(default=60, gt=0, le=86_400)
    snapshot: str | None = None
    base: str | None = None
    image: str | None = Field(default=None, max_length=1000, description="source of a prepared image, as the base")
    network: bool = False
    limits: LeaseLimits | None = Field(default=None, description="instead of the server's; None: a slot as configured")


class ImageSettings(WireMessage):
    """What an image says of the commands in it."""

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None


class ImageInfo(ImageSettings):
    """An unpacked image."""

    id: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its configuration, or of how it was built")
    source: str = Field(description="the source it was first pulled from")
    bytes: int = Field(description="what its files take")
    parent: str | None = Field(
        default=None, description="id of the image that it is a layer of, or atropos-base:NAME; None: it is whole"
    )
    parent_source: str | None = Field(default=None, description="source of that image")
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    onbuild: tuple[str, ...] = ()


class Lease(WireMessage):
    """The exclusive right to a slot. `epoch` only grows on a server; a call with an older one is refused."""

    lease_id: str
    slot: str
    epoch: int
    boot_id: str
    ttl_s: float
    limit_note: str | None = Field(default=None, description="what this slot lacks, e.g. 'no memory limit'")
    image: ImageInfo | None = Field(default=None, description="the image that the slot stands on")


class ImageRequest(WireMessage):
    """POST /v1/images: prepare an image; asking again says how far it is."""

    source: str = Field(min_length=1, max_length=1000)
    wait_s: float = Field(default=0, ge=0, le=60, description="answer when it is ready or failed, or after this time")


class KeepRequest(ImageSettings):
    """POST /v1/snapshots/{id}/image: keep a snapshot as an image, on what its lease stood on."""

    key: str = Field(pattern=r"^[0-9a-f]{64}$", description="what it was made of and how; names it: atropos-build:KEY")


class LayerOffer(WireMessage):
    """Query of PUT /v1/images/{key}/layer: what a server is to know of a built image whose layer comes as a tar."""

    parent: str = Field(pattern=r"^([0-9a-f]{64}|atropos-base:.{1,200})$")
    parent_source: str = Field(min_length=1, max_length=1000)
    bytes: int = Field(ge=0)
    settings: Json[ImageSettings] = ImageSettings()


class ImageState(WireMessage):
    """How far an image is prepared, or built: `pulling 40%`, `building step 3/7`."""

    source: str = Field(description="what is prepared; while building, the step's instruction")
    phase: Literal["queued", "waiting", "pulling", "unpacking", "building", "ready", "failed"]
    done: float | None = Field(default=None, description="share of the phase, from 0 to 1, where it is known")
    step: int = Field(default=0, description="while building: the step's number, from 1")
    steps: int = 0
    error: str = Field(default="", description="of a failure: its reason; of a build's with the last 50 lines")
    image: ImageInfo | None = None

    def __str__(self) -> str:
        if self.phase == "building":
            return f"building step {self.step}/{self.steps}"
        share = "" if self.done is None or self.phase == "ready" else f" {self.done:.0%}"
        return f"{self.phase}{share}"


class ImageList(WireMessage):
    """GET /v1/images."""

    states: tuple[ImageState, ...]
    images: tuple[ImageInfo, ...]


class ReleaseResult(WireMessage):
    """DELETE /v1/leases/{id}: `clean` is False when the slot had to be retired."""

    released: bool
    clean: bool = True
    reset_s: float = 0


class SnapshotInfo(WireMessage):
    """A frozen workspace that leases can start from."""

    snapshot_id: str
    layers: int
    bytes: int
    users: int = Field(default=0, description="leases standing on it now")
    base: str | None = Field(default=None, description="the base it stands on; None: the server's default")


class SnapshotRequest(WireMessage):
    """POST /v1/leases/{id}/snapshot. The client chooses the id, so that asking again does not freeze twice.

    `beside`: copy what was written instead, beside the slot's programs; views of the lease then stand on the copy.
    """

    snapshot_id: str | None = Field(default=None, min_length=8, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")
    beside: bool = False
    epoch: int | None = None


class ViewRequest(WireMessage):
    """POST /v1/leases/{id}/view: run the lease's calls in a clean slot beside the one that they ran in so far."""

    folders: tuple[str, ...] = Field(default=(), max_length=64)
    epoch: int | None = None


class DrainRequest(WireMessage):
    """POST /v1/drain. `deadline_s`: how long leases may go on; None: the server's own `drain_s`."""

    deadline_s: float | None = Field(default=None, ge=0)


class StreamState(WireMessage):
    """PUT /v1/leases/{id}/streams/{stream}: how much of a stream the server has, whoever sent it."""

    received: int


class CallRequest(WireMessage):
    """POST /v1/leases/{id}/calls, for people with curl."""

    call_id: str | None = Field(default=None, min_length=1, max_length=200)
    epoch: int | None = None
    operation: Operation


class Feature(WireMessage):
    """One isolation property, tried at start from inside a throw-away slot."""

    name: str
    ok: bool
    required: bool = Field(description="without it no slot starts, whatever the configuration")
    detail: str = ""
    fix: str = Field(default="", description="the kernel or container setting that gives it")


class Capabilities(WireMessage):
    """GET /v1/capabilities."""

    version: int = VERSION
    boot_id: str
    backend_note: str = ""
    kernel: str
    features: tuple[Feature, ...]
    limits: dict[str, float | int | str | None]
    stateful: bool = Field(description="sessions that live between calls work")
    isolated: bool = Field(description="every feature, cgroup limits included, is there")


def client_name(client_id: str) -> str:
    """What a server calls a client before others: enough to recognise oneself, and no help in speaking for it."""
    return hashlib.sha256(client_id.encode()).hexdigest()[:16]


class LeaseStatus(WireMessage):
    """A lease in `Status`."""

    client: str = Field(description="its client's name there")
    trajectory_id: str
    slot: str
    epoch: int
    state: str
    age_s: float
    expires_in_s: float
    calls: int = Field(description="calls that wait or run")


class Status(WireMessage):
    """GET /v1/status: one consistent count of everything, without what opens a lease."""

    boot_id: str
    version: int = VERSION
    slots: int
    free: int = Field(description="leases of a slot's own size that there is room for")
    free_mib: int = Field(description="memory that can be leased")
    leased: int
    warming: int
    retired: int
    retired_mib: int = Field(description="memory of the retired slots")
    draining: bool
    clients: int
    live: tuple[str, ...] = Field(
        default=(), description="names of clients that are connected, or hold leases and were heard of lately"
    )
    connected: tuple[str, ...] = Field(default=(), description="those of the live clients whose stream is open")
    leases: tuple[LeaseStatus, ...] = ()
    snapshots: tuple[SnapshotInfo, ...] = ()
    uptime_s: float
    counters: dict[str, float] = Field(default_factory=dict)


class Health(WireMessage):
    """GET /v1/health, without a token."""

    status: Literal["starting", "ok", "draining", "broken"]
    boot_id: str
    version: int = VERSION
    detail: str = ""


class Problem(WireMessage):
    """The body of every HTTP answer that isn't 2xx."""

    code: str
    message: str
    free_mib: int | None = None
