"""Messages on the stream: a frame is a JSON array of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field, TypeAdapter

from atropos.resources import Resources
from atropos.wire.base import DEFERRED, VERSION, WireMessage
from atropos.wire.operations import Operation
from atropos.wire.results import OpResult

__all__ = [
    "CLIENT_FRAME",
    "SERVER_FRAME",
    "Ack",
    "Call",
    "Cancel",
    "Capacity",
    "ClientMessage",
    "Draining",
    "Fault",
    "Heartbeat",
    "Hello",
    "LeaseEnded",
    "Reply",
    "ServerMessage",
    "Timing",
    "Welcome",
]


class Hello(WireMessage):
    """The client's first message."""

    kind: Literal["hello"] = "hello"
    version: int = VERSION
    client_id: str = Field(min_length=1, max_length=200)
    connection: int = Field(default=0, ge=0, description="grows with each connection; a delayed older one is refused")
    holds: tuple[str, ...] | None = Field(
        default=None, description="every lease_id that the client holds or requests; its others end. None: keep all"
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
    traceparent: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
        description="the caller's span (W3C); the reply then says how long the call waited and ran",
    )


class Cancel(WireMessage):
    """Cancel a call: its processes are killed, and its result is `cancelled`."""

    kind: Literal["cancel"] = "cancel"
    call_id: str


class Ack(WireMessage):
    """The client has these results, which the journal may drop."""

    kind: Literal["ack"] = "ack"
    call_ids: tuple[str, ...]


class Heartbeat(WireMessage):
    """The sender is alive; from a client, it renews all its leases."""

    kind: Literal["heartbeat"] = "heartbeat"
    seq: int = 0


class Timing(WireMessage):
    """How long a call waited in its lane, and then ran, in seconds."""

    waited_s: float = Field(ge=0)
    ran_s: float = Field(ge=0)


class Reply(WireMessage):
    """The result of a call."""

    kind: Literal["reply"] = "reply"
    call_id: str
    result: OpResult
    timing: Timing | None = Field(default=None, description="of a call with a traceparent")


class Fault(WireMessage):
    """A failure of the infrastructure in place of a result; `code` is one of `atropos.errors.BY_CODE`."""

    kind: Literal["fault"] = "fault"
    call_id: str
    code: str
    message: str


class LeaseEnded(WireMessage):
    """The server ended a lease of this client (its slot broke, it expired, the container drains)."""

    kind: Literal["lease_ended"] = "lease_ended"
    lease_id: str
    epoch: int
    code: str
    message: str


class Draining(WireMessage):
    """The server takes no new leases and will end; leases may finish until `deadline_s` from now (None: not known)."""

    kind: Literal["draining"] = "draining"
    deadline_s: float | None = None


class Capacity(WireMessage):
    """A slot came free; a hint to retry for clients that were refused (409) since the last one."""

    kind: Literal["capacity"] = "capacity"
    room: Resources


ClientMessage = Annotated[Hello | Call | Cancel | Ack | Heartbeat, Field(discriminator="kind")]
ServerMessage = Annotated[
    Welcome | Reply | Fault | Heartbeat | LeaseEnded | Draining | Capacity, Field(discriminator="kind")
]
# A frame is refused at its first invalid message: the errors of 64 MiB of them would be gigabytes.
CLIENT_FRAME: TypeAdapter[list[ClientMessage]] = TypeAdapter(
    Annotated[list[ClientMessage], FailFast()], config=DEFERRED
)
SERVER_FRAME: TypeAdapter[list[ServerMessage]] = TypeAdapter(
    Annotated[list[ServerMessage], FailFast()], config=DEFERRED
)
