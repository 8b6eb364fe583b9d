"""The frame of every env on sandbox slots: groups, faults, admission, `process`, `serve`, `evaluate`, and their ends.

A subclass says what one trajectory is (`run_trajectory`). The frame runs groups of them, tries a trajectory again after
an infrastructure failure, and drops a group whole when one of its members can't be completed (truth 4).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, cast

from atropos.agent import TurnRenderer
from atropos.agent.model import EXACT
from atropos.envs import cli as command_line
from atropos.envs.adapter import (
    API_FAILURES,
    APIServerConfig,
    ServerBaseline,
    TrajectoryApiLost,
    check_run_api,
    leave_run_api,
    load_tokenizer,
    prepare_server_configs,
    prepare_servers,
    probe_servers,
    quiet_logging,
    server_types,
    stop_servers,
    tokenizers,
)
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.groups import Event, Groups, Member, first_of
from atropos.envs.lifecycle import bounded, cancel_and_wait
from atropos.envs.reporting import Reporting
from atropos.envs.rollout import GroupsDropped
from atropos.errors import ConfigError, NotSupported
from atropos.slots import SlotPool
from atropos.tools import ToolCall, ToolExecutor, ToolRegistry, ToolResult

__all__ = ["Event", "ExecTool", "Member", "SandboxEnv"]

ExecTool = Callable[[ToolCall], Awaitable[ToolResult]]
"""Runs one tool call in the trajectory's slot."""

_log = logging.getLogger(__name__)


class SandboxEnv(Groups, Reporting):
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
    def exact_tokens(self) -> bool:
        """Whether the inference servers tell the tokens they sample."""
        return server_types(self.server) <= EXACT

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
        with self.hook("setup_agent_env"):
            await self.setup_agent_env()

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

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        """Run one call and measure it."""
        started = time.perf_counter()
        result = await self.executor.execute(trajectory_id, call)
        self.metrics.call_s.append(time.perf_counter() - started)
        self.metrics.calls += 1
        self.metrics.tool_errors += result.error is not None
        return result

    # ------------------------------------------------------------------------------------------------- the commands

    async def process_manager(self) -> None:
        """Run `total_steps` groups, or as many as there are items, and write the JSONL and the page.

        Raises:
            GroupsDropped: at the end, when groups could not be completed; the files hold the others.
            ConfigError, InferenceError, SandboxError: it could not start.
        """
        async with self.lifetime.running(self._close):
            self.config.group_size = int(getattr(self, "group_size_to_process", self.config.group_size))
            await self.setup()
            self._start_wandb()
            await self._process(int(getattr(self, "n_groups_to_process", self.config.total_steps)))
        dropped = sum(self.metrics.dropped.values())
        if dropped:
            reasons = ", ".join(f"{count} x {code}" for code, count in self.metrics.dropped.items())
            raise GroupsDropped(f"{dropped} of {dropped + self.metrics.groups} groups were dropped ({reasons})")

    async def _process(self, total: int) -> None:
        self.curr_step = 0
        fill = math.ceil(self.config.capacity / self.config.group_size)
        free = asyncio.Semaphore(self.config.process_concurrency or fill)
        begun = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while total < 0 or begun < total:
                    await free.acquire()
                    item = await self.get_next_item()
                    if item is None:
                        break
                    begun += 1
                    task = tasks.create_task(self._process_group(item))
                    task.add_done_callback(lambda _: free.release())
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    async def _process_group(self, item: Any) -> None:
        group, _ = await self.collect_trajectories(item)
        if group is None:
            return
        processed = await self.postprocess_histories(group)
        await self.handle_send_to_api(processed, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
        await self.wandb_log()
        self.curr_step += 1

    async def env_manager(self) -> None:
        """Serve groups to a trainer until its steps are done.

        Raises:
            ConfigError: the tokens would be placeholders, or there is no trajectory API.
        """
        if not self.exact_tokens and not self.config.allow_placeholder_tokens:
            kinds = ", ".join(sorted(server_types(self.server)))
            raise ConfigError(
                f"openai.server_type: {kinds} doesn't tell the tokens it samples, so a trainer would get placeholders; "
                "use vllm or sglang, or set --env.allow_placeholder_tokens true"
            )
        async with self.lifetime.running(self._close):
            await check_run_api(self.config.rollout_server_url)
            try:
                await super().env_manager()
            finally:
                await leave_run_api(self.config.rollout_server_url, getattr(self, "env_id", None))

    async def get_server_info(self) -> None:
        """As atroposlib's; sizes of which run-api would never make a batch are refused by name.

        Raises:
            ConfigError: the trainer's batch can't be made of whole groups of this size.
        """
        size = self.config.group_size
        try:
            await super().get_server_info()
        except ValueError as error:
            raise ConfigError(f"env.group_size: {size} is more than the trainer's batch; {error}") from error
        batch = self.config.batch_size
        if batch > 0 and batch % size:
            raise ConfigError(
                f"env.group_size: the trainer's batch of {batch} is no multiple of {size}, so that run-api would never "
                "make one of whole groups; choose a group size that divides it"
            )

    async def get_status(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As atroposlib's; a trajectory API that is gone ends the run with one line."""
        try:
            await super().get_status()
        except API_FAILURES as error:
            url = self.config.rollout_server_url
            raise TrajectoryApiLost(
                f"env.rollout_server_url: the trajectory API at {url} is gone, or was started anew and doesn't know this "
                "env; start run-api and the trainer, then the env"
            ) from error

    async def _run_evaluate(self) -> None:
        async with self.lifetime.running(self._close):
            await self.setup()
            self._start_wandb()
            await self.evaluate()

    async def _close(self) -> None:
        """Workers first, then executor and pool, then files."""
        await cancel_and_wait({*self.workers, *self.eval_workers, *self._collecting, self.eval_runner})
        await asyncio.gather(
            bounded("the tool backend", self.shutdown_tool_backend(), 90),
            bounded("the inference clients", stop_servers(self.server), 5),
            bounded("the metrics", self.close_metrics(), 5),
        )
        await bounded("the files", asyncio.to_thread(self.close_files), 30)
        if self._wandb_started:
            import wandb

            await bounded("wandb", asyncio.to_thread(wandb.finish), 30)
            self._wandb_started = False
