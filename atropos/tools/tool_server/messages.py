"""What travels between an executor and a ToolServer: one definition for both ends.

`GET /health` (no token), `GET /tools`, `POST /execute`, `POST /batch` (answers stream back one JSON line a call, each
as it finishes), `DELETE /trajectories/{trajectory_id}`. Every answer that isn't 2xx is an `atropos.wire.Problem`; 429
and 503 carry `Retry-After` in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, FailFast, Field, model_validator

from atropos.tools.arguments import FrozenModel
from atropos.tools.models import ToolResult

VERSION = 1
MAX_BATCH = 1000
"""Most calls in one batch."""
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Largest request body the server reads; a longer one is refused with 413."""
MAX_FIELDS = 50
"""Most fields of a request, unknown ones included."""
Owner = tuple[str, str | None]
"""A trajectory and its `life`, to which a call's state and answers belong."""


class ApiMessage(FrozenModel):
    """Base of these messages."""


class Request(ApiMessage):
    """Base of requests. Too many fields are refused as one error: millions of errors would take gigabytes."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(cast("dict[str, object]", value)) > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields; the fields are: {', '.join(cls.model_fields)}")
        return value


class ExternalCall(Request):
    """One call of an external tool, the body of `POST /execute`.

    `call_id` is the idempotency key: while the server remembers it, the same id attaches to the running call or gets
    the finished call's answer, and nothing is run again. `boot_id` is set when a call is *sent again*: a server that
    was restarted since can't know whether the call ran, and answers 409 `outcome_unknown` instead of running it.
    `state_id` names the server's last known state of the trajectory (a browser): where that is gone, by a restart or
    its TTL, the call is not run and the answer is 409 `state_lost`. `life` distinguishes successive trajectories of one
    name: the client chooses it and sends it with every call and with the end. A call that arrives after the end of its
    life is answered 410 `trajectory_ended`. Without it, such a call starts a new trajectory.
    """

    trajectory_id: str = Field(min_length=1, max_length=500)
    call_id: str = Field(min_length=1, max_length=200)
    name: str = Field(min_length=1, max_length=200)
    arguments: dict[str, object] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0, le=3600, strict=True, description="None: the tool's own")
    boot_id: str | None = Field(default=None, max_length=100)
    state_id: str | None = Field(default=None, max_length=100)
    life: str | None = Field(default=None, min_length=1, max_length=100)

    @property
    def owner(self) -> Owner:
        """Whose call this is."""
        return self.trajectory_id, self.life


class ExecuteAnswer(ApiMessage):
    """The 200 answer of `POST /execute`, and a finished call's line of `POST /batch`.

    `state_id` is set where the server now has state for the trajectory; send it with the next calls.
    """

    kind: Literal["result"] = "result"
    call_id: str
    boot_id: str
    state_id: str | None = None
    result: ToolResult


class ExecuteRefusal(ApiMessage):
    """A line of `POST /batch` for a call that was not run, or has an unknown outcome: an error of `/execute`."""

    kind: Literal["refusal"] = "refusal"
    call_id: str
    boot_id: str
    status: int = Field(description="the HTTP status that `/execute` would have answered")
    code: str
    message: str
    retry_after_s: float | None = None


class BatchRequest(Request):
    """`POST /batch`: calls of any trajectories. One trajectory's calls run in the order given."""

    calls: Annotated[tuple[ExternalCall, ...], FailFast()] = Field(min_length=1, max_length=MAX_BATCH)


class ToolInfo(ApiMessage):
    """One tool of `GET /tools`."""

    name: str
    toolset: str
    schema_: dict[str, Any] = Field(alias="schema", description="OpenAI function-calling schema")
    timeout_s: float
    read_only: bool = Field(default=False, description="changes nothing: safe to run twice")

    model_config = ConfigDict(populate_by_name=True)


class ToolList(ApiMessage):
    """`GET /tools`."""

    version: int = VERSION
    boot_id: str
    tools: tuple[ToolInfo, ...]


class ToolServerHealth(ApiMessage):
    """`GET /health`."""

    status: Literal["ok", "draining"]
    boot_id: str
    version: int = VERSION


class TrajectoryEnded(ApiMessage):
    """`DELETE /trajectories/{id}`: whether there was anything to end."""

    ended: bool
