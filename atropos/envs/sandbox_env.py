"""The frame of every env on sandbox slots: groups, faults, admission, `process`, `serve`, `evaluate`, and their ends.

A subclass says what one trajectory is (`run_trajectory`). The frame runs groups of them, tries a trajectory again after
an infrastructure failure, and drops a group whole when one of its members can't be completed (truth 4).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, cast

from atropos.agent import TurnRenderer
from atropos.envs.adapter import (
    APIServerConfig,
    ServerBaseline,
    load_tokenizer,
    prepare_server_configs,
    prepare_servers,
    probe_servers,
    quiet_logging,
    tokenizers,
)
from atropos.envs.command_line import app as command_line
from atropos.envs.command_line.commands import Commands
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.running.groups import Event, Member
from atropos.envs.running.hooks import ExecTool
from atropos.envs.running.lifecycle import bounded
from atropos.errors import ConfigError, NotSupported
from atropos.slots import SlotPool
from atropos.tools import ToolCall, ToolExecutor, ToolRegistry, ToolResult

__all__ = ["Event", "ExecTool", "Member", "SandboxEnv"]

_log = logging.getLogger(__name__)


class SandboxEnv(Commands):
    """See the module. Not used by itself: `AgentEnv` and `HermesAgentBaseEnv` extend it."""

    name: str | None = None
    env_config_cls: Any = SandboxEnvConfig
    config: Any

    def __init__(
        self,
        config: SandboxEnvConfig,
        server_configs: ServerBaseline | APIServerConfig | Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        quiet_logging()
        loaded = {config.tokenizer_name: load_tokenizer(config.tokenizer_name, field="env.tokenizer_name")}
        if config.wandb_name is None:
            config.wandb_name = self.name or type(self).__name__
        servers = [] if testing else prepare_server_configs(server_configs, config.tokenizer_name)
        for server in servers:
            field = {"trl": "model_name"}.get(server.server_type, "tokenizer_name")
            needed = getattr(server, field)
            if server.server_type != "openai" and needed not in loaded:
                loaded[needed] = load_tokenizer(needed, field=f"openai.{field}")
        self.jsonl_writer: Any = None
        with tokenizers(loaded):
            try:
                super().__init__(
                    config, cast("Any", server_configs if testing else servers), slurm=slurm, testing=testing
                )
            except OSError as error:  # the tokenizers are loaded: what is left is the file of the groups
                raise ConfigError(
                    f"env.data_path_to_save_groups: {error}; choose a place that can be written"
                ) from error
        prepare_servers(self.server)
        self._begin(config.capacity)
        self.pool: SlotPool | None = None
        self._executor: ToolExecutor | None = None
        self._renderer: TurnRenderer | None = None
        self._wandb_started = False
        self._endpoint = None

    # --------------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def build_tools(self) -> ToolRegistry:
        """The tools that trajectories are offered.

        Raises:
            ConfigError: an unknown toolset.
        """

    async def setup_agent_env(self) -> None:
        """Load data and the like, once, before the first item. Inference and sandboxes are there already."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing by default."""

    async def get_next_item(self) -> Any:
        """The next item, or None when there is none left."""
        raise NotImplementedError(f"{type(self).__name__} must define get_next_item()")

    @classmethod
    def config_init(cls) -> tuple[SandboxEnvConfig, list[APIServerConfig]]:
        """Default settings: atroposlib's first local port."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://localhost:9004/v1", api_key="x")]

    @classmethod
    def cli(cls) -> NoReturn:
        """The command line: serve, process, evaluate."""
        command_line.main(cls)

    # ------------------------------------------------------------------------------------------------ the backend

    @property
    def renderer(self) -> TurnRenderer:
        """The tokenizer's chat template, turn by turn."""
        if self._renderer is None:
            self._renderer = TurnRenderer(self.tokenizer)
        return self._renderer

    @property
    def context_tokens(self) -> int:
        """Most tokens of a trajectory: the env's bound, and less than what the trainer throws away."""
        if self.max_token_len > 0:
            return min(self.config.max_token_length, self.max_token_len - 1)
        return self.config.max_token_length

    async def setup(self) -> None:
        """Probe inference, then start the tool backend, then the env's own set-up."""
        tools = self.build_tools()
        _ = self.renderer
        await self.start_metrics()
        await probe_servers(self.server, self.tokenizer, self.config.model_timeout_s)
        await self.start_tool_backend(tools)
        await self.hooks.call("setup_agent_env", self.setup_agent_env)

    async def start_tool_backend(self, tools: ToolRegistry | None = None) -> None:
        """Start pool and executor; does nothing when they run."""
        if self._executor is not None:
            return
        registry = tools if tools is not None else self.build_tools()
        config = self.config.executor_config()
        app = None
        if config.tool_server_url == "inprocess":
            from importlib import import_module

            app = import_module("atropos.api.tool_server").create_app
        self.pool = SlotPool(self.config.pool_config())
        await self.pool.start()
        if config.allow_network:
            config = config.model_copy(update={"allow_network": await self._network(self.pool)})
        executor = ToolExecutor(pool=self.pool, tools=registry, config=config, tool_server_app=app)
        await executor.start()
        self._executor = executor

    async def _network(self, pool: SlotPool) -> bool:
        """Whether slots get egress. Where the backend has none, only an explicit wish for it is refused.

        Raises:
            ConfigError: `allow_network` was set and can't be had.
        """
        try:
            async with pool.lease("network-probe", network=True):
                return True
        except NotSupported as error:
            if "allow_network" in self.config.model_fields_set:
                raise ConfigError(f"env.allow_network: {error}; set --env.allow_network false") from error
            _log.warning("programs in slots have no network: %s", error)
            return False

    async def shutdown_tool_backend(self) -> None:
        """Release every trajectory and stop the containers. Idempotent."""
        executor, self._executor = self._executor, None
        pool, self.pool = self.pool, None
        if executor is not None:
            await bounded("the tool executor", executor.close(), 20)
        if pool is not None:
            await bounded("the slot pool", pool.stop(purge_job=self.config.purge_job_on_shutdown), 60)

    def hook_tools(self, trajectory_id: str, *, setup: bool = False) -> ExecTool:
        """`exec_tool` for a hook; see there."""
        return ExecTool(self.executor, partial(self.execute_tool, trajectory_id), setup=setup)

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        """Run one call and measure it."""
        started = time.perf_counter()
        result = await self.executor.execute(trajectory_id, call)
        self.metrics.call_s.append(time.perf_counter() - started)
        self.metrics.calls += 1
        return result
