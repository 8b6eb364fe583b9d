"""The settings of a tool executor: each has one name, one default and one place."""

from __future__ import annotations

from pydantic import Field, SecretStr

from atropos.tools.arguments import FrozenModel
from atropos.tools.base import ToolLimits


class ToolExecutorConfig(FrozenModel):
    """How calls are run. The pool's own settings (slots, limits, backend) are not repeated here."""

    batch_window_ms: float = Field(
        default=20,
        ge=0,
        le=10_000,
        description="longest a call may wait to be sent with others; none waits for that, so that every value holds",
    )
    max_batch_size: int | None = Field(
        default=None, ge=1, description="most calls in a frame; None: the pool's setting"
    )
    allow_network: bool | None = Field(default=None, description="false: no slot is leased with a network")
    require_sandbox: bool = Field(default=False, description="refuse slots that lack any isolation feature")
    require_stateful_sandbox: bool = Field(default=False, description="refuse slots without background processes")
    tool_server_url: str | None = Field(default=None, description="http(s) URL, or 'inprocess'")
    tool_server_token: SecretStr | None = None
    recordings_dir: str | None = Field(default=None, description="where a release writes recorded terminal sessions")
    limits: ToolLimits = ToolLimits()
