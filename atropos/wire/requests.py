"""Bodies of HTTP requests and answers."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Json

from atropos.resources import Resources
from atropos.wire.base import VERSION, ChosenId, HostName, WireMessage
from atropos.wire.limits import LeaseLimits
from atropos.wire.operations import Operation
from atropos.wire.results import OpError
from atropos.wire.secrets import MAX_SECRETS, EgressSecret

__all__ = [
    "VIEW_HOME",
    "CallRequest",
    "Capabilities",
    "DrainRequest",
    "Feature",
    "Health",
    "HealthConfig",
    "ImageInfo",
    "ImageRequest",
    "ImageSettings",
    "ImageState",
    "Joining",
    "KeepRequest",
    "LackingLayers",
    "LackingRequest",
    "LayerOffer",
    "Lease",
    "LeaseRequest",
    "LeaseStatus",
    "MountRequest",
    "MountResult",
    "Problem",
    "ReleaseResult",
    "SnapshotInfo",
    "SnapshotRequest",
    "Status",
    "StreamState",
    "ViewFolders",
    "ViewInfo",
    "ViewRequest",
    "client_name",
]


class Joining(WireMessage):
    """A lease of the same client and server that another one joins: they share a network, and end together."""

    lease_id: ChosenId
    names: tuple[HostName, ...] = Field(max_length=32, description="by which the others know the one that joins")
    its_names: tuple[HostName, ...] = Field(
        default=(), max_length=32, description="by which all know the one that is joined; of the first that joins it"
    )
    networks: tuple[HostName, ...] = Field(
        default=(), max_length=32, description="where it reaches only those that are on one of them; empty: all"
    )
    its_networks: tuple[HostName, ...] = Field(
        default=(), max_length=32, description="of the one that is joined; of the first that joins it"
    )


class LeaseRequest(WireMessage):
    """POST /v1/leases. The client chooses both ids, so that a repeated request gives the same lease.

    The ids are secrets: a lease's id gives access to it, a client's id to all of the client's leases. The server shows
    neither; see `client_name`.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    lease_id: ChosenId
    client_id: str = Field(min_length=1, max_length=200)
    trajectory_id: str = Field(default="", max_length=500)
    ttl_s: float = Field(default=60, gt=0, le=86_400)
    snapshot: str | None = None
    base: str | None = None
    image: str | None = Field(default=None, max_length=1000, description="source of a prepared image, as the base")
    network: bool = False
    limits: LeaseLimits | None = Field(default=None, description="instead of the server's")
    joins: Joining | None = Field(default=None, description="takes the room that this one keeps for its members")
    secrets: tuple[EgressSecret, ...] = Field(
        default=(), max_length=MAX_SECRETS, description="put into its requests, where it has a network"
    )


class ImageSettings(WireMessage):
    """An image's settings for commands."""

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None


class HealthConfig(WireMessage):
    """An image's health check, as Docker's configurations have it; empty or 0: not set."""

    test: tuple[str, ...] = Field(default=(), description="CMD and words, CMD-SHELL and a line, or NONE")
    interval_s: float = 0
    timeout_s: float = 0
    start_period_s: float = 0
    start_interval_s: float = 0
    retries: int = 0


class ImageInfo(ImageSettings):
    """An unpacked image."""

    id: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its configuration, or of its build")
    source: str = Field(description="the source it was first pulled from")
    bytes: int = Field(description="size of its files")
    parent: str | None = Field(
        default=None, description="id of the image that it is a layer on, or atropos-base:NAME; None: no layer"
    )
    parent_source: str | None = Field(default=None, description="source of that image")
    layers: tuple[str, ...] = Field(default=(), description="digests of its layers' tars, lowest first; built: none")
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    onbuild: tuple[str, ...] = ()
    shell: tuple[str, ...] = Field(default=(), description="what RUN begins with; empty: /bin/sh -c")
    healthcheck: HealthConfig | None = None
    volumes: tuple[str, ...] = Field(default=(), description="folders that its containers have (VOLUME)")


class Lease(WireMessage):
    """The exclusive right to a slot. `epoch` only grows on a server; a call with an older one is refused."""

    lease_id: str
    slot: str
    epoch: int
    boot_id: str
    ttl_s: float
    limit_note: str | None = Field(default=None, description="missing limits, e.g. 'no memory limit'")
    image: ImageInfo | None = Field(default=None, description="the slot's image")


class ImageRequest(WireMessage):
    """POST /v1/images: prepare an image; a repeated request returns the progress."""

    source: str = Field(min_length=1, max_length=1000)
    wait_s: float = Field(default=0, ge=0, le=60, description="longest wait for it to be ready or failed")
    pull: bool = Field(default=True, description="False: it is refused unless it is here")


class LackingRequest(WireMessage):
    """POST /v1/images/lacking: which layers of an image are not on the server's host."""

    layers: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        max_length=10_000, description="digests of their tars, lowest first"
    )


class LackingLayers(WireMessage):
    """The answer."""

    lacking: tuple[int, ...] = Field(description="their positions, from 0")


class KeepRequest(ImageSettings):
    """POST /v1/snapshots/{id}/image: keep a snapshot as an image, a layer on its lease's image or base."""

    key: str = Field(pattern=r"^[0-9a-f]{64}$", description="hash of its build; its source is atropos-build:KEY")


class LayerOffer(WireMessage):
    """Query of PUT /v1/images/{key}/layer: the metadata of a built image whose layer is the body, a tar."""

    parent: str = Field(pattern=r"^([0-9a-f]{64}|atropos-base:.{1,200})$")
    parent_source: str = Field(min_length=1, max_length=1000)
    bytes: int = Field(ge=0)
    settings: Json[ImageSettings] = ImageSettings()


class ImageState(WireMessage):
    """Progress of an image: `pulling 40%`, `building step 3/7`."""

    source: str = Field(description="the image's source; while building, the step's instruction")
    phase: Literal["queued", "waiting", "pulling", "unpacking", "building", "ready", "failed"]
    done: float | None = Field(default=None, description="share of the phase, from 0 to 1, where it is known")
    step: int = Field(default=0, description="while building: the step's number, from 1")
    steps: int = 0
    error: str = Field(default="", description="reason of a failure; of a build's, with the last 50 lines")
    image: ImageInfo | None = None

    def __str__(self) -> str:
        if self.phase == "building":
            return f"building step {self.step}/{self.steps}"
        share = "" if self.done is None or self.phase == "ready" else f" {self.done:.0%}"
        return f"{self.phase}{share}"


class ReleaseResult(WireMessage):
    """DELETE /v1/leases/{id}: `clean` is False when the slot had to be retired."""

    released: bool
    clean: bool = True
    reset_s: float = 0
    cpu_s: float | None = Field(default=None, description="CPU time of its programs; None: not known")
    egress_bytes: int = Field(default=0, description="bytes moved through the egress proxy, both ways")


class SnapshotInfo(WireMessage):
    """A frozen workspace that leases can start from."""

    snapshot_id: str
    layers: int
    bytes: int
    users: int = Field(default=0, description="leases that use it now")
    base: str | None = Field(default=None, description="the base below it; None: the server's default")


class MountRequest(WireMessage):
    """POST /v1/leases/{id}/mounts: have a lease see a folder or file of another one of its group."""

    epoch: int | None = None
    path: str = Field(pattern="^/", max_length=4096, description="where it is seen; made where it is missing")
    of: ChosenId = Field(description="the other lease; or this one, of which a part becomes read-only")
    source: str = Field(pattern="^/", max_length=4096)
    read_only: bool = False


class MountResult(WireMessage):
    """What came of a `MountRequest`."""

    refused: OpError | None = Field(default=None, description="why one of its paths can't be used; None: it is mounted")


class SnapshotRequest(WireMessage):
    """POST /v1/leases/{id}/snapshot. The client chooses the id, so that a repeated request does not freeze twice.

    `beside`: copy the written files instead, while the slot's programs run; views of the lease then use the copy.
    """

    snapshot_id: ChosenId | None = None
    beside: bool = False
    epoch: int | None = None


VIEW_HOME = "/run/home"
"""Where a view has the home of its programs, where the slot's own home is among the folders shown."""


class ViewFolders(WireMessage):
    """What a view shows of its slot, beside the top-level folders that no usual system has and its own root has too.

    Attributes:
        folders: absolute; one that the slot lacks is an empty one.
        optional: shown where the slot has them.
        programs: folders below these that stay as the view's root has them, where that has programs there (`.venv`,
            `node_modules` …).
        home: a folder that is at `VIEW_HOME`, too, as the view's root has it.
        as_layer: files can be renamed and linked between all of these and the rest of the root, as they can where no
            program runs in the slot; files that its programs make or rename later are not shown.
    """

    folders: tuple[str, ...] = Field(default=(), max_length=64)
    optional: tuple[str, ...] = Field(default=(), max_length=256)
    programs: tuple[str, ...] = Field(default=(), max_length=64)
    home: str | None = None
    as_layer: bool = False


class ViewRequest(WireMessage):
    """POST /v1/leases/{id}/view: run the lease's later calls in a view of its slot."""

    folders: ViewFolders
    epoch: int | None = None


class ViewInfo(WireMessage):
    """What a view shows of its slot, and which of the wanted `programs` are as its root has them.

    `links`: whether programs of the slot made links that are followed in the view.
    """

    folders: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    links: bool = True


class DrainRequest(WireMessage):
    """POST /v1/drain. `deadline_s`: how long leases may last; None: the server's own `drain_s`."""

    deadline_s: float | None = Field(default=None, ge=0)


class StreamState(WireMessage):
    """PUT /v1/leases/{id}/streams/{stream}: how many bytes of a stream the server has."""

    received: int


class CallRequest(WireMessage):
    """POST /v1/leases/{id}/calls, for use with curl."""

    call_id: str | None = Field(default=None, min_length=1, max_length=200)
    epoch: int | None = None
    operation: Operation


class Feature(WireMessage):
    """One isolation feature, probed at the start in a temporary slot."""

    name: str
    ok: bool
    required: bool = Field(description="without it no slot starts, whatever the configuration")
    detail: str = ""
    fix: str = Field(default="", description="the kernel or container setting that enables it")


class Capabilities(WireMessage):
    """GET /v1/capabilities."""

    version: int = VERSION
    boot_id: str
    kernel: str
    architecture: str = Field(default="", description="as images name it, such as amd64 or arm64")
    features: tuple[Feature, ...]
    limits: dict[str, float | int | str | None]
    stateful: bool = Field(description="sessions that live between calls work")
    isolated: bool = Field(description="every feature is there, cgroup limits included")

    def refusal(self, container: str, *, sandbox: bool, stateful: bool) -> str:
        """Why `require_sandbox` or `require_stateful_sandbox` refuses the container; empty where neither does."""
        if sandbox and not self.isolated:
            lacking = ", ".join(f"{each.name} ({each.fix or each.detail})" for each in self.features if not each.ok)
            return f"require_sandbox: container {container} lacks {lacking}"
        if stateful and not self.stateful:
            return f"require_stateful_sandbox: container {container} can't keep sessions between calls"
        return ""


def client_name(client_id: str) -> str:
    """A client's public name, a hash of its id, which is secret."""
    return hashlib.sha256(client_id.encode()).hexdigest()[:16]


class LeaseStatus(WireMessage):
    """A lease in `Status`."""

    client: str = Field(description="its client's name")
    trajectory_id: str
    slot: str
    epoch: int
    state: str
    age_s: float
    expires_in_s: float
    calls: int = Field(description="calls that wait or run")


class Status(WireMessage):
    """GET /v1/status: a consistent view of slots, leases and clients, without secrets."""

    boot_id: str
    version: int = VERSION
    slots: int
    free: int = Field(description="leases of the default size that there is room for")
    room: Resources = Field(description="what can be leased")
    leased: int
    warming: int
    retired: int
    retired_room: Resources = Field(description="what the retired slots may still use")
    draining: bool
    clients: int
    live: tuple[str, ...] = Field(
        default=(), description="names of clients that are connected, or have leases and were connected recently"
    )
    connected: tuple[str, ...] = Field(default=(), description="those of the live clients whose stream is open")
    leases: tuple[LeaseStatus, ...] = ()
    snapshots: tuple[SnapshotInfo, ...] = ()
    uptime_s: float
    counters: dict[str, float] = Field(default_factory=dict)


class Health(WireMessage):
    """GET /v1/health, without a token."""

    status: Literal["ok", "draining", "broken"]
    boot_id: str
    version: int = VERSION
    detail: str = ""


class Problem(WireMessage):
    """The body of every HTTP answer that isn't 2xx."""

    code: str
    message: str
    room: Resources | None = None
