"""Settings of an env: flat fields, each a `--env.FIELD` flag and a key under `env:` in YAML."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from copy import copy
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from atropos.config import WholePath, split_names
from atropos.envs.adapter import REASONING_EFFORTS, BaseEnvConfig
from atropos.errors import ConfigError
from atropos.net.sockets import is_loopback
from atropos.slots import SlotPoolConfig
from atropos.slots.config import BackendName, PoolSettings
from atropos.tools import ToolExecutorConfig, ToolLimits
from atropos.tools.parsers import get_parser
from atropos.wire import SlotLimits
from atropos.wire.base import one_line


def _known_parser(name: str) -> str:
    return get_parser(name).name  # raises ConfigError, a ValueError that names those there are


Names = Annotated[list[str], BeforeValidator(split_names)]
"""A list of names; as a flag, comma-separated."""
OptionalNames = Annotated[list[str] | None, BeforeValidator(split_names)]
ParserName = Annotated[str, AfterValidator(_known_parser)]
"""A format of tool calls in a model's text."""


def like(name: str, of: type[BaseModel] = SlotPoolConfig, *, default: Any = ...) -> Any:
    """A field declared elsewhere, under another name here or with another default."""
    field = copy(of.model_fields[name])
    if default is not ...:
        field.default = default
    return field


@contextlib.contextmanager
def own_field_names(config: SandboxEnvConfig) -> Generator[None]:
    """Raise a `ConfigError` of the pool or the tools with the env's name of its field."""
    try:
        yield
    except ConfigError as error:
        field, _, what = str(error).partition(": ")
        own = config.own_names | {f"limits.{name}": f"slot_{name}" for name in SlotLimits.model_fields}
        field = own.get(field, field)
        if field not in type(config).model_fields:
            raise
        raise ConfigError(f"env.{field}: {what}") from error


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ValueError: it is no address.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is no host:port; write 127.0.0.1:9400")
    return host, int(port)


class SandboxEnvConfig(PoolSettings, BaseEnvConfig):
    """Slots, limits and faults: what every env on sandbox slots has.

    Attributes:
        own_names: the names here of those settings of the pool that it has under another.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=False, frozen=False)
    own_names: ClassVar[dict[str, str]] = {
        "backend": "tool_pool_mode",
        "max_batch_size": "tool_max_batch_size",
        "job_id": "sandbox_job_id",
        "image": "sandbox_image",
        "base": "sandbox_base",
    }

    max_token_length: int = Field(default=32_768, ge=64, description="most tokens of a whole trajectory")
    worker_timeout: float = Field(
        default=3600, description="longest a group may take when serving, in seconds; -1: any"
    )

    tool_pool_mode: BackendName = like("backend", default="nomad")
    allow_network: bool = like("allow_network", default=True)
    nomad_address: str | None = like("nomad_address", default="http://localhost:4646")
    tool_batch_window_ms: float = like("batch_window_ms", ToolExecutorConfig)
    tool_max_batch_size: int = like("max_batch_size")
    sandbox_job_id: str = like("job_id")
    sandbox_image: str = like("image")
    sandbox_base: WholePath | None = like("base")

    slot_memory_mib: int = like("memory_mib", SlotLimits)
    slot_pids: int = like("pids", SlotLimits)
    slot_cpu_weight: int = like("cpu_weight", SlotLimits)
    slot_cpu_quota: float | None = like("cpu_quota", SlotLimits)
    slot_disk_mib: int = like("disk_mib", SlotLimits)
    slot_inodes: int = like("inodes", SlotLimits)
    slot_open_files: int = like("open_files", SlotLimits)
    slot_output_bytes: int = like("output_bytes", SlotLimits)
    slot_wall_s: float = like("wall_s", SlotLimits)

    tool_server_url: str | None = Field(default=None, description="ToolServer for external tools: a URL or inprocess")
    tool_server_token: SecretStr | None = Field(default=None, description="its bearer token")

    trajectory_retries: int = Field(default=2, ge=0, description="new tries after an infrastructure failure")
    hook_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="longest one hook may take to set up, to verify or, in `process`, to give an item",
    )
    verifier_mode: Literal["view", "shared"] = Field(
        default="view",
        description="where hooks verify: view (a clean root with the agent's folders and network; its programs can't "
        "reach it) or shared (the agent's own slot, its programs ended)",
    )
    verifier_folders: Names = Field(
        default_factory=lambda: ["/workspace"],
        description="folders that a view shows, besides those at the top that no system has (/app, /data) and that the "
        "image has or the prompt names",
    )
    verifier_quiesce: bool = Field(default=False, description="end the agent's programs before a view is opened")
    agent_temperature: float = Field(default=0.7, ge=0, description="sampling temperature")
    allow_raw_logprobs: bool = Field(
        default=False,
        description="go on with a server whose logprobs are of temperature 1, although agent_temperature is another",
    )
    model_timeout_s: float = Field(default=300.0, gt=0, description="deadline of one model call, retries included")
    model_retries: int = Field(default=2, ge=0, description="new tries of a model call (never after 4xx)")
    process_concurrency: int | None = Field(
        default=None, ge=1, description="groups in flight in `process`; None: as many as fill the slots"
    )
    cut_trajectories: Literal["keep", "mask", "drop"] = Field(
        default="keep",
        description="those that a bound ended before the model's answer: keep (scored as they are), mask (nothing is "
        "learned from them, and they count in no baseline) or drop (their group)",
    )
    allow_placeholder_tokens: bool = Field(
        default=False, description="let `serve` send groups whose tokens are not the model's own (openai, trl)"
    )
    seed: int | None = Field(default=None, description="sent with each request, by trajectory, where set")
    record_sessions: bool = Field(
        default=False, description="record every terminal session, beside the JSONL; else those that the agent asks for"
    )
    metrics_address: str | None = Field(
        default=None, description="host:port that serves the env's metrics at /metrics for Prometheus; None: nowhere"
    )
    metrics_token: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="bearer token that /metrics asks for; None: none, and a loopback address alone",
    )
    otlp_endpoint: str | None = Field(
        default=None, description="URL of an OTLP/HTTP collector that gets the run's traces; None: there are none"
    )
    dashboard_port: int | None = Field(
        default=None, ge=0, le=65_535, description="port of the live pages; 0: a free one; None: there are none"
    )
    dashboard_host: str = Field(default="127.0.0.1", description="address that the live pages listen on")
    dashboard_token: SecretStr | None = Field(
        default=None, description="token that opens the live pages; None: a new one, printed with their URL"
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(one_line(error, "env")) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.metrics_address is not None:
            try:
                host, _ = split_address(self.metrics_address)
            except ValueError as error:
                raise ValueError(f"metrics_address: {error}") from None
            if self.metrics_token is None and not is_loopback(host):
                raise ValueError(f"metrics_address: {host} is not of this machine alone; set metrics_token as well")
        if self.group_size < 1:
            raise ValueError(f"group_size: must be at least 1, not {self.group_size}")
        if self.min_batch_allocation is not None and not 0 <= self.min_batch_allocation <= 1:
            raise ValueError(
                f"min_batch_allocation: a share of a batch is from 0 to 1, not {self.min_batch_allocation}"
            )
        if self.max_num_workers < 1 and self.max_num_workers != -1:
            raise ValueError(
                f"max_num_workers: must be at least 1, or -1 for max_num_workers_per_node, not {self.max_num_workers}"
            )
        for name in ("max_num_workers_per_node", "max_batches_offpolicy"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: must be at least 1, or `serve` never starts a group; not {getattr(self, name)}"
                )
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            known = ", ".join(sorted(REASONING_EFFORTS))
            raise ValueError(f"reasoning_effort: must be one of {known}, not {self.reasoning_effort!r}")
        path = self.data_path_to_save_groups
        if path is not None and Path(path).is_dir():
            raise ValueError(
                f"data_path_to_save_groups: {path} is a folder; give a file, as {Path(path, 'groups.jsonl')}"
            )
        if self.total_steps < 1 and self.total_steps != -1:
            raise ValueError(f"total_steps: must be at least 1, or -1 for all items, not {self.total_steps}")
        return self

    @property
    def capacity(self) -> int:
        """Trajectories admitted at once."""
        return self.slots_per_container * self.max_containers

    @property
    def records_changes(self) -> bool:
        """Whether the files that a trajectory changed are kept: where its messages are, or pages show it."""
        return self.include_messages or self.dashboard_port is not None

    def limits(self) -> SlotLimits:
        """What one slot may use."""
        return SlotLimits(**{name: getattr(self, f"slot_{name}") for name in SlotLimits.model_fields})

    def pool_config(self) -> SlotPoolConfig:
        """The pool that these settings mean."""
        values: dict[str, object] = {name: getattr(self, name) for name in PoolSettings.model_fields}
        values |= {name: getattr(self, own) for name, own in self.own_names.items()}
        if "nomad_address" not in self.model_fields_set:
            del values["nomad_address"]  # the environment's
        return SlotPoolConfig(limits=self.limits(), **values)

    def executor_config(self) -> ToolExecutorConfig:
        """The executor that these settings mean."""
        return ToolExecutorConfig(
            batch_window_ms=self.tool_batch_window_ms,
            allow_network=self.allow_network,
            require_sandbox=self.require_sandbox,
            require_stateful_sandbox=self.require_stateful_sandbox,
            tool_server_url=self.tool_server_url,
            tool_server_token=self.tool_server_token,
            recordings_dir=self.recordings_dir,
            limits=ToolLimits(record_sessions=self.record_sessions),
        )

    @property
    def recordings_dir(self) -> str | None:
        """Where recorded terminal sessions go: the folder `NAME.recordings` beside the trajectories' `NAME.jsonl`."""
        if self.data_path_to_save_groups is None:
            return None
        return f"{self.data_path_to_save_groups.removesuffix('.jsonl')}.recordings"


class AgentEnvConfig(SandboxEnvConfig):
    """An env whose agent loop is `AtroposAgent`."""

    agent_max_steps: int = Field(default=50, ge=1, description="most model turns of a trajectory")
    agent_max_tokens: int | None = Field(default=None, ge=1, description="most tokens of a turn; None: what is left")
    agent_tool_delay_s: float = Field(default=0.0, ge=0, description="pause after each tool call")
    agent_system_prompt: str | None = Field(default=None, description="text before the tools; None: a short default")
    agent_tool_parser: ParserName = Field(default="hermes", description="format of tool calls in the model's text")
    agent_max_result_chars: int = Field(default=30_000, ge=100, description="of a tool result shown to the model")
    enabled_toolsets: Names = Field(default_factory=lambda: ["default"], description="toolsets the model is offered")
    disabled_toolsets: Names = Field(default_factory=list[str], description="toolsets taken away again")
