"""What travels between a client and a sandbox server: one definition for both ends.

Every message is a frozen pydantic model that refuses unknown fields. Bytes travel as base64 in JSON (`WireBytes`).
One WebSocket (`/v1/stream`) carries frames: a frame is a JSON array of messages, each with its `kind`. HTTP carries
leases, snapshots, health, capabilities and metrics, and `POST /v1/leases/{id}/calls` the same calls for people with curl.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

VERSION = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest WebSocket frame either end accepts, in bytes."""
MAX_FILE_BYTES = 32 * 1024 * 1024
"""Largest content of one file read or write on the wire, in bytes; larger files go in pieces (`offset`, `append`)."""
MAX_COMMAND_BYTES = 2 * 1024 * 1024
"""Longest command or stdin text; the kernel refuses a longer argument anyway, so it is passed by a file."""

Limit = Literal["memory", "pids", "disk", "inodes", "time", "output", "files", "cpu"]
"""The name of the limit that stopped or truncated a program."""


class WireMessage(BaseModel):
    """Base of everything on the wire: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


# ---------------------------------------------------------------------------------------------------------- operations

STREAM_ID: Any = Field(min_length=8, max_length=100, pattern=r"^[A-Za-z0-9_-]+$", description="unique in the lease")


CommandOrArgv = str | Annotated[tuple[str, ...], Field(min_length=1)]
"""A shell command line (`/bin/bash -c`, or sh where there is no bash), or a program and its arguments without a shell."""


class Exec(WireMessage):
    """Run a command in its own session and wait for it."""

    op: Literal["exec"] = "exec"
    command: CommandOrArgv
    timeout_s: float | None = Field(default=None, gt=0, description="None: the server's wall-time limit")
    workdir: str | None = Field(default=None, description="None: /workspace")
    env: dict[str, str] = Field(default_factory=dict)
    clean_env: bool = Field(default=False, description="start from the slot's first environment and PATH alone")
    user: str | None = Field(default=None, max_length=300, description="name or uid[:group or gid]; None: root")
    stdin: bytes | None = None
    split: bool = Field(default=False, description="stdout and stderr apart; combined by arrival")
    max_output_bytes: int | None = Field(default=None, gt=0)


class ReadFile(WireMessage):
    """Read a file's bytes, from `offset`, at most `max_bytes`."""

    op: Literal["read_file"] = "read_file"
    path: str
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(default=MAX_FILE_BYTES, gt=0, le=MAX_FILE_BYTES)
    user: str | None = Field(default=None, max_length=300, description="name or uid[:group or gid]; None: root")


class WriteFile(WireMessage):
    """Write a file, making its parents; replaced atomically unless `append`. `if_sha256`: only if unchanged since."""

    op: Literal["write_file"] = "write_file"
    path: str
    data: bytes
    mode: int | None = Field(default=None, ge=0, le=0o7777)
    append: bool = False
    if_sha256: str | None = Field(default=None, description="refuse with error 'changed' when the file is another")
    user: str | None = Field(
        default=None, max_length=300, description="name or uid[:group or gid], who writes it in place; None: root"
    )


class Search(WireMessage):
    """Search file contents by regular expression, or names alone when `pattern` is empty; bounded in every way."""

    op: Literal["search"] = "search"
    pattern: str
    path: str = "."
    glob: str | None = None
    max_matches: int = Field(default=200, gt=0, le=10_000)
    context: int = Field(default=0, ge=0, le=20)
    ignore_case: bool = False


class Untar(WireMessage):
    """Unpack an uncompressed tar archive under `path` (made when missing)."""

    op: Literal["untar"] = "untar"
    path: str
    data: bytes
    owners: bool = Field(default=False, description="give members the uid and gid that the archive names; else root's")


class Tar(WireMessage):
    """Pack a file or folder as an uncompressed tar archive of at most `max_bytes`.

    With `offset`, as much of it from there as `max_bytes` allows; a result whose size is more than where its data end
    says that there is more.
    """

    op: Literal["tar"] = "tar"
    path: str
    offset: int | None = Field(default=None, ge=0)
    max_bytes: int = Field(default=MAX_FILE_BYTES, gt=0, le=MAX_FILE_BYTES)


class WriteStream(WireMessage):
    """Write a file, or unpack a tar archive below a folder, from what `PUT /v1/leases/{id}/streams/{stream}` brings.

    A file is replaced atomically when all of it has come; one that breaks off leaves the old one.
    """

    op: Literal["write_stream"] = "write_stream"
    path: str
    stream: str = STREAM_ID
    tar: bool = False
    mode: int | None = Field(default=None, ge=0, le=0o7777)


class ReadStream(WireMessage):
    """Send a file from `offset` on, or a file or folder as a tar archive, to `GET /v1/leases/{id}/streams/{stream}`.

    `Done.count` says how many bytes were sent; more than `max_bytes` are refused as `too_large`.
    """

    op: Literal["read_stream"] = "read_stream"
    path: str
    stream: str = STREAM_ID
    tar: bool = False
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(gt=0)


class Quiesce(WireMessage):
    """Kill every process in the slot but the runner; files stay."""

    op: Literal["quiesce"] = "quiesce"


class SetNetwork(WireMessage):
    """Change what the lease's programs reach, within what the server allows: at once, and open connections are cut.

    `hosts`: names, `*.suffixes`, addresses and networks, each with `:PORT` or not; none: no network; None: all that the
    server allows, as when the lease began.
    """

    op: Literal["set_network"] = "set_network"
    hosts: tuple[Annotated[str, Field(max_length=270)], ...] | None = Field(default=None, max_length=256)


class ProcStart(WireMessage):
    """Start a background process whose output is kept in a rolling buffer; with `pty`, on a terminal of its own."""

    op: Literal["proc_start"] = "proc_start"
    command: CommandOrArgv
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = Field(default=None, max_length=300, description="name or uid[:group or gid]; None: root")
    pty: bool = False
    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)
    buffer_bytes: int = Field(default=200_000, ge=1024, le=4_000_000)


class ProcRead(WireMessage):
    """State and output of a background process.

    Waits up to `wait_s` until it exits, or for output beyond `offset` (`until="output"`), or until no output came for
    `quiet_s`. Offsets count every byte the process ever wrote.
    """

    op: Literal["proc_read"] = "proc_read"
    id: str
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(default=200_000, gt=0, le=4_000_000)
    wait_s: float = Field(default=0, ge=0)
    until: Literal["exit", "output", "quiet"] = "exit"
    quiet_s: float = Field(default=0.3, gt=0)


class ProcWrite(WireMessage):
    """Write to a background process's stdin or terminal; optionally close it or change the window size."""

    op: Literal["proc_write"] = "proc_write"
    id: str
    data: bytes = b""
    eof: bool = False
    rows: int | None = Field(default=None, ge=1, le=1000)
    cols: int | None = Field(default=None, ge=1, le=1000)


class ProcKill(WireMessage):
    """Send a signal to a background process's whole session; `TERM` is followed by `KILL` after a grace time."""

    op: Literal["proc_kill"] = "proc_kill"
    id: str
    signal: Literal["TERM", "KILL", "INT", "HUP", "QUIT", "USR1", "USR2"] = "TERM"


class ProcList(WireMessage):
    """All background processes of the lease, ended ones included."""

    op: Literal["proc_list"] = "proc_list"


Operation = Annotated[
    Exec
    | ReadFile
    | WriteFile
    | Search
    | Untar
    | Tar
    | WriteStream
    | ReadStream
    | Quiesce
    | SetNetwork
    | ProcStart
    | ProcRead
    | ProcWrite
    | ProcKill
    | ProcList,
    Field(discriminator="op"),
]


# ------------------------------------------------------------------------------------------------------------- results


class CommandResult(WireMessage):
    """How a command ended. `exit_code` is -N when signal N ended it; None only when it never started."""

    kind: Literal["exec_result"] = "exec_result"
    exit_code: int | None
    output: bytes = Field(description="stdout and stderr in the order written; head and tail when truncated")
    stdout: bytes | None = None
    stderr: bytes | None = None
    timed_out: bool = False
    cancelled: bool = False
    truncated: bool = False
    dropped_bytes: int = Field(default=0, ge=0)
    limit: Limit | None = None
    duration_s: float = Field(ge=0)


class FileResult(WireMessage):
    """A read file: its bytes from the offset asked for, and the file's whole size."""

    kind: Literal["file_result"] = "file_result"
    data: bytes
    size: int
    mode: int
    sha256: str | None = Field(default=None, description="of the whole file, when it was read whole")


class Done(WireMessage):
    """An operation without an answer of its own succeeded; `count` says how many (bytes, files, processes)."""

    kind: Literal["done"] = "done"
    count: int = 0


class Match(WireMessage):
    """One matching line (or, for a search by name, a file: line 0)."""

    path: str
    line: int
    text: str
    context: bool = False


class SearchResult(WireMessage):
    """Matches in path and line order; `truncated` when a bound ended the search."""

    kind: Literal["search_result"] = "search_result"
    matches: tuple[Match, ...]
    files: int
    truncated: bool = False


class ProcState(WireMessage):
    """A background process: output from `offset` on, and how it ended, if it did."""

    kind: Literal["proc_state"] = "proc_state"
    id: str
    command: str
    pid: int
    running: bool
    exit_code: int | None = None
    output: bytes = b""
    offset: int = Field(default=0, description="of the first byte in `output`")
    total_bytes: int = Field(default=0, description="written by the process so far")
    dropped_bytes: int = Field(default=0, description="that fell out of the rolling buffer before `offset`")
    uptime_s: float = 0
    pty: bool = False
    limit: Limit | None = None


class ProcListing(WireMessage):
    """The lease's background processes, oldest first, without output."""

    kind: Literal["proc_listing"] = "proc_listing"
    processes: tuple[ProcState, ...]


class OpError(WireMessage):
    """The operation could not be done inside the slot: a value that the model may read, not an infrastructure fault."""

    kind: Literal["op_error"] = "op_error"
    error: Literal[
        "not_found",
        "is_directory",
        "not_directory",
        "not_regular",
        "permission",
        "exists",
        "changed",
        "too_large",
        "bad_pattern",
        "bad_path",
        "no_space",
        "timeout",
        "unknown_process",
        "unknown_user",
        "not_supported",
        "limit",
        "io",
    ]
    message: str
    limit: Limit | None = None


OpResult = Annotated[
    CommandResult | FileResult | Done | SearchResult | ProcState | ProcListing | OpError, Field(discriminator="kind")
]
OP_RESULT: TypeAdapter[OpResult] = TypeAdapter(OpResult)


def outcome(result: OpResult) -> str:
    """A result in one word, for metrics: ok, failed (exit code), timeout, cancelled, limit, or error."""
    if isinstance(result, OpError):
        return "error"
    if not isinstance(result, CommandResult):
        return "ok"
    if result.timed_out or result.cancelled:
        return "timeout" if result.timed_out else "cancelled"
    if result.limit is not None:
        return "limit"
    return "ok" if result.exit_code == 0 else "failed"


# ---------------------------------------------------------------------------------------------------- frames on a stream


class Hello(WireMessage):
    """The client's first message."""

    kind: Literal["hello"] = "hello"
    version: int = VERSION
    client_id: str = Field(min_length=1, max_length=200)
    connection: int = Field(default=0, ge=0, description="grows with each connection: a delayed older one is refused")
    holds: tuple[str, ...] | None = Field(
        default=None, description="every lease_id the client holds or asks for; its others end. None: keep all"
    )


class Welcome(WireMessage):
    """The server's first message."""

    kind: Literal["welcome"] = "welcome"
    version: int = VERSION
    boot_id: str
    heartbeat_s: float


class Call(WireMessage):
    """One operation in one leased slot. `call_id` is the idempotency key: sent again, it is not run again."""

    kind: Literal["call"] = "call"
    resent: bool = Field(default=False, description="may have been sent before, on a connection that was lost")
    call_id: str = Field(min_length=1, max_length=200)
    lease_id: str
    epoch: int
    operation: Operation


class Cancel(WireMessage):
    """Give a call up: its processes are killed and its result says `cancelled`."""

    kind: Literal["cancel"] = "cancel"
    call_id: str


class Ack(WireMessage):
    """The client has these results; the journal may forget them."""

    kind: Literal["ack"] = "ack"
    call_ids: tuple[str, ...]


class Heartbeat(WireMessage):
    """Either end is alive; from a client it renews all its leases."""

    kind: Literal["heartbeat"] = "heartbeat"
    seq: int = 0


class Reply(WireMessage):
    """The result of a call."""

    kind: Literal["reply"] = "reply"
    call_id: str
    result: OpResult


class Fault(WireMessage):
    """A call that has no result because the infrastructure failed; `code` is one of `atropos.errors.BY_CODE`."""

    kind: Literal["fault"] = "fault"
    call_id: str
    code: str
    message: str


class LeaseEnded(WireMessage):
    """The server ended a lease that this client held (its slot broke, it expired, the container drains)."""

    kind: Literal["lease_ended"] = "lease_ended"
    lease_id: str
    epoch: int
    code: str
    message: str


class Draining(WireMessage):
    """The server takes no new leases and will end; what runs may finish until `deadline_s` from now."""

    kind: Literal["draining"] = "draining"
    deadline_s: float | None = None


class Capacity(WireMessage):
    """A slot came free; sent to clients that were refused (409) since they last got one, as a hint to ask again."""

    kind: Literal["capacity"] = "capacity"
    free_mib: int


ClientMessage = Annotated[Hello | Call | Cancel | Ack | Heartbeat, Field(discriminator="kind")]
ServerMessage = Annotated[
    Welcome | Reply | Fault | Heartbeat | LeaseEnded | Draining | Capacity, Field(discriminator="kind")
]
# The first wrong message refuses a frame: 64 MiB of them would be gigabytes of complaints.
CLIENT_FRAME: TypeAdapter[list[ClientMessage]] = TypeAdapter(Annotated[list[ClientMessage], FailFast()])
SERVER_FRAME: TypeAdapter[list[ServerMessage]] = TypeAdapter(Annotated[list[ServerMessage], FailFast()])


# ---------------------------------------------------------------------------------------------------------------- HTTP


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


class ImageInfo(WireMessage):
    """An unpacked image, and what its configuration says of the commands in it."""

    id: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its configuration, or of how it was built")
    source: str = Field(description="the source it was first pulled from")
    bytes: int = Field(description="what its files take")
    parent: str | None = Field(
        default=None, description="id of the image that it is a layer of, or atropos-base:NAME; None: it is whole"
    )
    parent_source: str | None = Field(default=None, description="source of that image")
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


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


class KeepRequest(WireMessage):
    """POST /v1/snapshots/{id}/image: keep a snapshot as an image, on what its lease stood on."""

    key: str = Field(pattern=r"^[0-9a-f]{64}$", description="what it was made of and how; names it: atropos-build:KEY")


class LayerOffer(WireMessage):
    """Query of PUT /v1/images/{key}/layer: what a server is to know of a built image whose layer comes as a tar."""

    parent: str = Field(pattern=r"^([0-9a-f]{64}|atropos-base:.{1,200})$")
    parent_source: str = Field(min_length=1, max_length=1000)
    bytes: int = Field(ge=0)


class ImageState(WireMessage):
    """How far an image is prepared."""

    source: str
    phase: Literal["queued", "waiting", "pulling", "unpacking", "ready", "failed"]
    done: float | None = Field(default=None, description="share of the phase, from 0 to 1, where it is known")
    error: str = ""
    image: ImageInfo | None = None


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
    """POST /v1/leases/{id}/snapshot. The client chooses the id, so that asking again does not freeze twice."""

    snapshot_id: str | None = Field(default=None, min_length=8, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")
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
    leases: tuple[dict[str, Any], ...] = ()
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
