"""What an env can be told: flat fields, each a `--env.FIELD` flag and a key under `env:` in YAML."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator

from atropos.config import SlotLimits
from atropos.envs.adapter import BaseEnvConfig
from atropos.envs.command_line.flags import one_line
from atropos.envs.running.prometheus import split_address
from atropos.errors import ConfigError
from atropos.slots import SlotPoolConfig
from atropos.slots.config import NomadVariables
from atropos.tools import ToolExecutorConfig, ToolLimits


def _names(value: Any) -> Any:
    """A list from comma-separated text or JSON."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        return json.loads(text)
    return [part.strip() for part in text.split(",") if part.strip()]


Names = Annotated[list[str], BeforeValidator(_names)]
"""A list of names; as a flag, comma-separated."""
OptionalNames = Annotated[list[str] | None, BeforeValidator(_names)]


class SandboxEnvConfig(BaseEnvConfig):
    """Slots, limits and faults: what every env on sandbox slots has."""

    model_config = ConfigDict(extra="forbid", validate_assignment=False)

    max_token_length: int = Field(default=32_768, ge=64, description="most tokens of a whole trajectory")
    worker_timeout: float = Field(
        default=3600, description="longest a group may take when serving, in seconds; -1: any"
    )

    tool_pool_mode: Literal["nomad", "docker", "local"] = Field(default="nomad", description="what runs the containers")
    allow_network: bool = Field(default=True, description="whether sandbox programs get (filtered) egress")
    egress_allow: Names = Field(
        default_factory=lambda: ["public"],
        description="hosts that programs may reach: names, *.suffixes, addresses, networks or public",
    )
    require_sandbox: bool = Field(default=False, description="refuse to start unless every limit is there too")
    require_stateful_sandbox: bool = Field(default=False, description="refuse to start without lasting sessions")
    tool_batch_window_ms: float = Field(default=20, ge=0, le=10_000, description="longest a call may wait for others")
    tool_max_batch_size: int = Field(default=200, ge=1, le=10_000, description="most calls in one frame")
    nomad_address: str = Field(default="http://localhost:4646", description="also NOMAD_ADDR from the environment")
    sandbox_job_id: str = Field(default="atropos-sandbox-agent-env", description="name of the Nomad job")
    nomad_variables: NomadVariables = Field(
        default_factory=dict,
        description="more variables of nomad/sandbox.nomad.hcl, as `nomad job run -var` takes them",
    )
    placement_s: float = Field(default=5.0, ge=0, description="how long Nomad may find no place before start fails")
    docker_host: str | None = Field(default=None, description="Docker engine; None: DOCKER_HOST, else the local one")
    sandbox_image: str = Field(default="atropos-sandbox:local", description="image of the containers")
    sandbox_base: str | None = Field(default=None, description="root file system of the slots (local); None: host /usr")
    slots_per_container: int = Field(default=10, ge=1, le=1000, description="slots in each container")
    container_memory_mib: int | None = Field(
        default=None, ge=64, description="memory of a container; None: the server's and all slots' limits"
    )
    min_containers: int = Field(default=1, ge=0, description="containers kept even when idle")
    max_containers: int = Field(default=10, ge=1, description="most containers")
    privileged: bool = Field(default=False, description="kept for compatibility; true is refused")
    acquire_timeout_s: float = Field(default=30.0, gt=0, description="longest a trajectory waits for a slot")
    start_timeout_s: float = Field(default=60.0, gt=0, description="longest the start waits for the first container")
    outage_s: float = Field(
        default=900.0,
        ge=0,
        description="how long Nomad or Docker may be away, with no container left, before the run ends",
    )
    purge_job_on_start: bool = Field(default=False, description="remove the job of an earlier run first")
    purge_job_on_shutdown: bool = Field(default=True, description="remove the job at the end")

    slot_memory_mib: int = Field(default=1024, ge=32, description="memory of a slot, its files included")
    slot_pids: int = Field(default=256, ge=8, description="processes and threads of a slot")
    slot_cpu_weight: int = Field(default=100, ge=1, le=10_000, description="a slot's share of the CPU")
    slot_cpu_quota: float | None = Field(
        default=None, gt=0, description="most cores of a slot; None: half of them, all in containers of one slot"
    )
    slot_disk_mib: int = Field(default=512, ge=8, description="bytes a slot may write")
    slot_inodes: int = Field(default=262_144, ge=1000, description="files a slot may make")
    slot_output_bytes: int = Field(default=1_000_000, ge=1000, description="output kept of one command")
    slot_wall_s: float = Field(default=3600, gt=0, description="longest one command may run")
    lease_ttl_s: float = Field(default=60.0, gt=0, le=86_400, description="leases of a dead process end after this")

    tool_server_url: str | None = Field(default=None, description="ToolServer for external tools: a URL or inprocess")
    tool_server_token: SecretStr | None = Field(default=None, description="its bearer token")

    trajectory_retries: int = Field(default=2, ge=0, description="new tries after an infrastructure failure")
    hook_timeout_s: float = Field(
        default=3600.0, gt=0, description="longest one hook may take to set up, to verify or to give an item"
    )
    model_timeout_s: float = Field(default=300.0, gt=0, description="deadline of one model call, retries included")
    model_retries: int = Field(default=2, ge=0, description="new tries of a model call (never after 4xx)")
    process_concurrency: int | None = Field(
        default=None, ge=1, description="groups in flight in `process`; None: as many as fill the slots"
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

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(one_line(error, "env")) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_containers < self.min_containers:
            raise ValueError(
                f"max_containers ({self.max_containers}) is less than min_containers ({self.min_containers}): "
                "raise the first or lower the second"
            )
        if self.privileged:
            raise ValueError(
                "privileged: sandbox containers are never privileged (slots are isolated by user namespaces); "
                "leave it false"
            )
        if self.metrics_address is not None:
            try:
                split_address(self.metrics_address)
            except ValueError as error:
                raise ValueError(f"metrics_address: {error}") from None
        if self.group_size < 1:
            raise ValueError(f"group_size: must be at least 1, not {self.group_size}")
        if self.min_batch_allocation is not None and not 0 <= self.min_batch_allocation <= 1:
            raise ValueError(
                f"min_batch_allocation: a share of a batch is from 0 to 1, not {self.min_batch_allocation}"
            )
        if self.total_steps < 1 and self.total_steps != -1:
            raise ValueError(f"total_steps: must be at least 1, or -1 for all items, not {self.total_steps}")
        return self

    @property
    def capacity(self) -> int:
        """Trajectories admitted at once."""
        return self.slots_per_container * self.max_containers

    def limits(self) -> SlotLimits:
        """What one slot may use."""
        return SlotLimits(
            memory_mib=self.slot_memory_mib,
            pids=self.slot_pids,
            cpu_weight=self.slot_cpu_weight,
            cpu_quota=self.slot_cpu_quota,
            disk_mib=self.slot_disk_mib,
            inodes=self.slot_inodes,
            output_bytes=self.slot_output_bytes,
            wall_s=self.slot_wall_s,
        )

    def pool_config(self) -> SlotPoolConfig:
        """The pool that these settings mean."""
        nomad = self.nomad_address if "nomad_address" in self.model_fields_set else None
        return SlotPoolConfig(
            backend=self.tool_pool_mode,
            slots_per_container=self.slots_per_container,
            min_containers=self.min_containers,
            max_containers=self.max_containers,
            acquire_timeout_s=self.acquire_timeout_s,
            start_timeout_s=self.start_timeout_s,
            outage_s=self.outage_s,
            limits=self.limits(),
            lease_ttl_s=self.lease_ttl_s,
            base=self.sandbox_base,
            allow_network=self.allow_network,
            egress_allow=tuple(self.egress_allow),
            require_sandbox=self.require_sandbox,
            require_stateful_sandbox=self.require_stateful_sandbox,
            batch_window_ms=self.tool_batch_window_ms,
            max_batch_size=self.tool_max_batch_size,
            image=self.sandbox_image,
            job_id=self.sandbox_job_id,
            nomad_address=nomad,
            nomad_variables=self.nomad_variables,
            placement_s=self.placement_s,
            docker_host=self.docker_host,
            container_memory_mib=self.container_memory_mib,
            purge_job_on_start=self.purge_job_on_start,
            purge_job_on_shutdown=self.purge_job_on_shutdown,
        )

    def executor_config(self) -> ToolExecutorConfig:
        """The executor that these settings mean."""
        return ToolExecutorConfig(
            batch_window_ms=self.tool_batch_window_ms,
            max_batch_size=self.tool_max_batch_size,
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
    agent_temperature: float = Field(default=0.7, ge=0, description="sampling temperature")
    agent_max_tokens: int | None = Field(default=None, ge=1, description="most tokens of a turn; None: what is left")
    agent_tool_delay_s: float = Field(default=0.0, ge=0, description="pause after each tool call")
    agent_system_prompt: str | None = Field(default=None, description="text before the tools; None: a short default")
    agent_tool_parser: str = Field(default="hermes", description="format of tool calls in the model's text")
    agent_max_result_chars: int = Field(default=30_000, ge=100, description="of a tool result shown to the model")
    enabled_toolsets: Names = Field(default_factory=lambda: ["default"], description="toolsets the model is offered")
    disabled_toolsets: Names = Field(default_factory=list[str], description="toolsets taken away again")
