"""Settings of a Hermes env."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from atropos.envs.config import OptionalNames, ParserName, SandboxEnvConfig
from atropos.slots.config import BackendName
from atropos.tools import ToolExecutorConfig
from atropos.tools.base import ToolLimits
from atropos.tools.toolsets import get_distribution


class HermesAgentEnvConfig(SandboxEnvConfig):
    """An env whose agent speaks OpenAI's tool messages, and whose reward function sees the rollout's own slot."""

    own_names: ClassVar[dict[str, str]] = SandboxEnvConfig.own_names | {"backend": "terminal_backend"}
    enabled_toolsets: OptionalNames = Field(default=None, description="toolsets the model is offered; None: all")
    disabled_toolsets: OptionalNames = Field(default=None, description="toolsets taken away again")
    distribution: str | None = Field(
        default=None, description="named probabilities of toolsets, drawn once a group; not with enabled_toolsets"
    )
    max_agent_turns: int = Field(default=30, ge=1, description="most model turns of a trajectory")
    system_prompt: str | None = Field(default=None, description="first message; None: none")
    agent_temperature: float = Field(default=1.0, ge=0, description="sampling temperature")
    terminal_backend: BackendName = Field(
        default="local", description="what runs the containers: a backend's name, as local, docker or nomad"
    )
    terminal_timeout: float = Field(default=120, gt=0, description="seconds of a terminal command that names none")
    terminal_lifetime: float = Field(
        default=3600, gt=0, description="longest idle time of a trajectory's slot, seconds"
    )
    dataset_name: str | None = Field(
        default=None,
        description="rows: a JSONL or Parquet file, a folder, a JSON list in place, or a dataset's name on the hub",
    )
    dataset_split: str = Field(default="train", min_length=1, description="of a folder, or a dataset on the hub")
    prompt_field: str = Field(default="prompt", min_length=1, description="the row's field with the prompt")
    tool_pool_size: int = Field(default=128, ge=1, description="most tool calls, and most reward functions, in flight")
    tool_call_parser: ParserName = Field(
        default="hermes", description="format of calls in the text of a vllm or sglang model"
    )
    extra_body: dict[str, JsonValue] | None = Field(
        default=None, description="further fields of requests, for OpenAI-compatible servers only"
    )

    @field_validator("distribution")
    @classmethod
    def _known_distribution(cls, value: str | None) -> str | None:
        if value is not None:
            get_distribution(value)
        return value

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.distribution is not None and self.enabled_toolsets is not None:
            raise ValueError("distribution and enabled_toolsets exclude each other: set one of them")
        if "tool_pool_mode" in self.model_fields_set and self.tool_pool_mode != self.terminal_backend:
            raise ValueError(
                f"tool_pool_mode ({self.tool_pool_mode}) and terminal_backend ({self.terminal_backend}) differ: "
                "give terminal_backend alone"
            )
        return self

    def executor_config(self) -> ToolExecutorConfig:
        """The executor that these settings mean."""
        longest = max(ToolLimits().max_timeout_s, self.terminal_timeout)
        config = super().executor_config()
        changes = {"command_timeout_s": self.terminal_timeout, "max_timeout_s": longest}
        return config.model_copy(update={"limits": config.limits.model_copy(update=changes)})
