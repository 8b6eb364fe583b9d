"""Messages between a client and a sandbox server: one definition for both ends.

Every message is a frozen pydantic model that refuses unknown fields. Bytes travel as base64 in JSON.
One WebSocket (`/v1/stream`) carries frames: a frame is a JSON array of messages, each with its `kind`. HTTP carries
leases, snapshots, health, capabilities and metrics, and `POST /v1/leases/{id}/calls` the same calls for use with curl.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from atropos.wire.base import (
    MAX_COMMAND_BYTES,
    MAX_FILE_BYTES,
    MAX_FRAME_BYTES,
    MAX_HOSTS,
    VERSION,
    Limit,
    WireMessage,
)
from atropos.wire.frames import (
    CLIENT_FRAME,
    SERVER_FRAME,
    Ack,
    Call,
    Cancel,
    Capacity,
    ClientMessage,
    Draining,
    Fault,
    Heartbeat,
    Hello,
    LeaseEnded,
    Reply,
    ServerMessage,
    Timing,
    Welcome,
)
from atropos.wire.operations import (
    CommandOrArgv,
    Exec,
    Operation,
    PathOperation,
    ProcKill,
    ProcList,
    ProcRead,
    ProcStart,
    ProcWrite,
    Quiesce,
    ReadFile,
    ReadStream,
    Search,
    SetNetwork,
    SlotOperation,
    StartOperation,
    Tar,
    Untar,
    WriteFile,
    WriteStream,
)
from atropos.wire.requests import (
    VIEW_HOME,
    CallRequest,
    Capabilities,
    DrainRequest,
    Feature,
    Health,
    ImageInfo,
    ImageRequest,
    ImageSettings,
    ImageState,
    KeepRequest,
    LackingLayers,
    LackingRequest,
    LayerOffer,
    Lease,
    LeaseLimits,
    LeaseRequest,
    LeaseStatus,
    Problem,
    ReleaseResult,
    SnapshotInfo,
    SnapshotRequest,
    Status,
    StreamState,
    ViewFolders,
    ViewInfo,
    ViewRequest,
    client_name,
)
from atropos.wire.results import (
    OP_RESULT,
    CommandResult,
    Done,
    FileResult,
    Match,
    OpError,
    OpResult,
    ProcListing,
    ProcState,
    SearchResult,
    outcome,
)
from atropos.wire.secrets import MAX_SECRETS, EgressSecret
