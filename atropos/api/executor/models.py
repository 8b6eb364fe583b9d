"""Settings, requests and answers of the executor API."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, SecretStr, model_validator

from atropos.api.settings import Port, ServiceSettings
from atropos.net.sockets import LOOPBACK
from atropos.slots.config import SlotPoolConfig
from atropos.slots.pool.stats import ContainerSlots
from atropos.tools.executor import MAX_WAITING
from atropos.tools.models import ToolResult
from atropos.tools.tool_server.messages import ApiMessage, Request

MAX_REQUEST_BYTES = 48 * 1024 * 1024
"""Largest request body: a 32 MiB file as base64, and some."""
_ID = r"^[A-Za-z0-9._:-]+$"

_IMAGE = "root file system: NAME[:TAG], HOST/NAME@sha256:DIGEST, atropos-build:KEY"


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


class ExecutorServerSettings(ServiceSettings):
    """An executor API. Times in seconds."""

    port: Port = 8461
    token: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="bearer token of the only user, or of the admin beside a keys file; else --token-file, or "
        "ATROPOS_EXECUTOR_TOKEN",
    )
    keys_file: str | None = Field(
        default=None, description="keys of several users, with quotas: `atropos keys`; followed while the server runs"
    )
    audit_file: str | None = Field(
        default=None, description="file that gets a JSON line for each thing done; None: none"
    )
    e2b_domain: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)*$",
        description="E2B_DOMAIN of clients: the API is api.DOMAIN, a sandbox's server PORT-ID.DOMAIN; None: no hosts",
    )
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = Field(
        default=LOOPBACK,
        description="addresses or networks of proxies whose X-Forwarded-Proto says how clients reach the server",
    )
    pool: SlotPoolConfig = Field(default_factory=SlotPoolConfig, description="fields of SlotPoolConfig")
    enabled_toolsets: tuple[str, ...] = Field(default=("default",), description="toolsets that are offered")
    disabled_toolsets: tuple[str, ...] = Field(default=(), description="toolsets taken away again")
    tool_server_url: str | None = Field(default=None, description="ToolServer for external tools: a URL or inprocess")
    tool_server_token: SecretStr | None = Field(
        default=None, description="its bearer token; None: ATROPOS_TOOL_SERVER_TOKEN"
    )
    max_trajectories: int = Field(
        default=10_000, ge=1, description="of each key open at once; one more is answered 429"
    )
    max_pending: int = Field(
        default=64, ge=1, le=MAX_WAITING, description="calls of one trajectory that may run or wait"
    )
    ttl_s: float = Field(
        default=300, gt=0, le=86_400, description="time without a call or renewal after which a trajectory ends"
    )
    acquire_s: float = Field(default=10, gt=0, description="longest that opening a trajectory waits for a slot")
    remembered: int = Field(default=64, ge=1, description="most finished calls a trajectory remembers for resends")
    otlp_endpoint: str | None = Field(
        default=None, description="URL of an OTLP/HTTP collector that gets the traces; None: there are none"
    )

    @model_validator(mode="after")
    def _somebody_comes_in(self) -> Self:
        if self.token is None and self.keys_file is None:
            raise ValueError("token: missing; set ATROPOS_EXECUTOR_TOKEN, pass --token-file, or name a keys_file")
        return self


class OpenTrajectory(Request):
    """`POST /trajectories`. With an id of the client's own, asking again answers the same trajectory."""

    trajectory_id: str | None = Field(default=None, min_length=1, max_length=200, pattern=_ID)
    ttl_s: float | None = Field(default=None, gt=0, le=86_400, strict=True, description="None: the server's")
    image: str | None = Field(default=None, min_length=1, max_length=500, description=_IMAGE)


class PrepareImage(Request):
    """`POST /prepare`."""

    image: str = Field(min_length=1, max_length=500, description=_IMAGE)
    wait_s: float = Field(default=20, ge=0, le=60, strict=True, description="longest wait for the image to be ready")


class TrajectoryInfo(ApiMessage):
    """A trajectory as a resource."""

    trajectory_id: str
    state: Literal["open", "broken"]
    ttl_s: float
    expires_in_s: float
    calls: int = Field(description="finished so far")
    running: int = Field(description="running or waiting now")
    detail: str = ""


class TrajectoryList(ApiMessage):
    """`GET /trajectories`."""

    trajectories: tuple[TrajectoryInfo, ...]


class CallBody(Request):
    """`POST /trajectories/{id}/calls`. `id` is the idempotency key, as is the header `Idempotency-Key`."""

    name: str = Field(description="as the model wrote it; it need not exist")
    arguments: dict[str, object] | str = Field(default_factory=dict)
    id: str | None = Field(default=None, min_length=1, max_length=200, pattern=_ID)


class CallAnswer(ApiMessage):
    """A call: its result, once it has one."""

    call_id: str
    trajectory_id: str
    state: Literal["running", "done"]
    result: ToolResult | None = None


class ToolSchemas(ApiMessage):
    """`GET /tools`: what goes into a model's `tools`."""

    tools: tuple[dict[str, JsonValue], ...]


class ExecutorHealth(ApiMessage):
    """`GET /health`."""

    status: Literal["ok", "draining"]


class KeyUsage(ApiMessage):
    """What a key has used since the server's start, of one image.

    CPU time and bytes are of slots that were given back.
    """

    key: str
    image: str = Field(description="(base) where slots start from none; (others) after the first hundred")
    leases: int
    slot_s: float = Field(description="seconds for which slots were held")
    cpu_s: float
    egress_bytes: int = Field(description="moved through the egress proxy, both ways")


class KeyQuota(ApiMessage):
    """A quota of a key, and what counts towards it now."""

    key: str
    quota: str
    used: float
    most: float


class UsageReport(ApiMessage):
    """`GET /usage`."""

    usage: tuple[KeyUsage, ...]
    quotas: tuple[KeyQuota, ...] = ()


class Opened(ApiMessage):
    """A trajectory or an E2B sandbox of a key."""

    key: str
    id: str
    image: str | None
    state: Literal["open", "broken", "running", "paused"]
    age_s: float
    calls: int = Field(description="calls or commands that run or wait")
    container: str = Field(description="where its slot is; empty: it has none now")
    latest: str = Field(description="the latest call or command, cut; empty: there was none")
    latest_s: float = Field(description="seconds since it began")


class ServerStatus(ApiMessage):
    """`GET /status`: the pool, and what all keys have open."""

    containers: int
    slots: int
    free: int
    leased: int
    retired: int
    waiting: int
    trouble: str = Field(description="why containers are not coming; empty when all is well")
    occupancy: tuple[ContainerSlots, ...] = Field(description="slots by container")
    opened: tuple[Opened, ...]


def _whole(value: object) -> object:
    """To JSON's schemas 24.0 is an integer; `true` and text are none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ShellSize(Request):
    """`PUT /shells/{id}/size`."""

    rows: Annotated[int, BeforeValidator(_whole)] = Field(default=24, ge=1, le=1000, strict=True)
    cols: Annotated[int, BeforeValidator(_whole)] = Field(default=80, ge=1, le=1000, strict=True)


class OpenShell(ShellSize):
    """`POST /shells`."""

    id: str = Field(
        min_length=1, max_length=300, description="a trajectory's or a sandbox's; KEY/ID where several keys have it"
    )


class ShellInfo(ApiMessage):
    """A shell that was opened."""

    shell_id: str


class ShellEnd(ApiMessage):
    """`DELETE /shells/{id}`."""

    exit_code: int | None = Field(description="None: it did not end by itself")


class EndTrajectoryReply(ApiMessage):
    """`DELETE /trajectories/{id}`."""

    ended: bool
