"""The base of every env on sandbox slots: `process`, `serve`, `evaluate`, and the parts that they use.

A subclass defines one trajectory (`run_trajectory`). Groups of them are collected (`running.groups`), retried after an
infrastructure failure, and dropped as a whole when one member can't be completed (truth 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cached_property, partial
from typing import NoReturn, cast

from atropos import tracing
from atropos.agent import TurnRenderer
from atropos.agent.model import Model, server_type
from atropos.aio import cancel_and_wait
from atropos.envs.adapter import (
    APIServerConfig,
    Item,
    ScoredDataGroup,
    ServerConfigs,
)
from atropos.envs.command_line import app as command_line
from atropos.envs.config import SandboxEnvConfig, own_field_names
from atropos.envs.reporting.dashboard import EnvDashboard
from atropos.envs.reporting.prometheus import MetricsEndpoint, metrics_text
from atropos.envs.reporting.run_api import check_run_api, leave_run_api
from atropos.envs.reporting.watch import watch_inference
from atropos.envs.running.groups import Event, GroupCollector, GroupMember
from atropos.envs.running.hooks import ExecTool, HookCalls
from atropos.envs.running.lifecycle import SENDS_S, WORKERS_S, Lifetime, beside, bounded, task_group
from atropos.envs.running.rollout import GroupsDropped, Rollout
from atropos.envs.running.verification import HookTexts
from atropos.envs.served_env import ServedEnv
from atropos.envs.servers import context_of, probe_servers, stop_servers
from atropos.errors import ConfigError
from atropos.slots import SlotPool, Snapshot
from atropos.tools import ToolCall, ToolExecutor, ToolRegistry, ToolResult

__all__ = ["Event", "ExecTool", "GroupMember", "SandboxEnv"]

_log = logging.getLogger(__name__)


class SandboxEnv(ServedEnv):
    """See the module. `AgentEnv` and `HermesAgentBaseEnv` extend it.

    Attributes:
        lifetime: of the command that runs.
        endpoint: serves the metrics.
        dashboard: shows what runs.
    """

    env_config_cls: type[SandboxEnvConfig] = SandboxEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride] (atroposlib: an instance)
    n_groups_to_process: int
    group_size_to_process: int

    def __init__(
        self,
        config: SandboxEnvConfig,
        server_configs: ServerConfigs,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.lifetime = Lifetime()
        self.collector = GroupCollector(self, config, self.backend, self.metrics, self.lifetime)
        self.endpoint = MetricsEndpoint(config.metrics_address, self.metrics_text, config.metrics_token)
        self.dashboard = EnvDashboard(config, self._title, self.metrics, self.backend)
        self.observers.append(self.dashboard.observe)
        self._tracing: tracing.Tracing | None = None
        self._evaluates = False
        """Whether the command makes no training data."""

    # --------------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def build_tools(self) -> ToolRegistry:
        """The tools that trajectories are offered.

        Raises:
            ConfigError: an unknown toolset.
        """

    @abstractmethod
    async def run_trajectory(self, item: Item, trajectory_id: str, member: GroupMember) -> Rollout:
        """Run, verify and score one trajectory; the collector then releases its slot.

        Raises:
            SandboxError, InferenceError: the infrastructure failed; the trajectory is retried.
            HookError: an env's own code failed; the group is dropped.
        """

    async def prepare_group(self, item: Item, group: str) -> Snapshot | None:
        """What a group's trajectories start from: a snapshot, or None for an empty workspace."""
        return None

    def missing_methods(self) -> list[str]:
        """The signatures of methods that a subclass must define and doesn't."""
        return ["get_next_item()"] if type(self).get_next_item is SandboxEnv.get_next_item else []

    async def setup_agent_env(self) -> None:
        """Load data and the like, once, before the first item. Inference and sandboxes are ready."""

    async def evaluate(self, *args: object, **kwargs: object) -> None:
        """Does nothing by default."""

    async def get_next_item(self) -> Item:
        """The next item, or None when there is none left."""
        raise NotImplementedError(f"{type(self).__name__} must define get_next_item()")

    @classmethod
    def config_init(cls) -> tuple[SandboxEnvConfig, list[APIServerConfig]]:
        """Default settings: atroposlib's first local port."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://localhost:9004/v1", api_key="x")]

    @classmethod
    def cli(cls) -> NoReturn:
        """The command line: serve, process, evaluate."""
        command_line.main(cast("command_line.EnvProgram", cls))

    # ------------------------------------------------------------------------------------------------ the backend

    @property
    def pool(self) -> SlotPool | None:
        """The pool; there from `setup` to shutdown."""
        return self.backend.pool

    @property
    def executor(self) -> ToolExecutor:
        """The tool executor; there from `setup` to shutdown."""
        return self.backend.executor

    @property
    def observers(self) -> list[Callable[[Event], None]]:
        """Called with each `Event`, for progress displays."""
        return self.collector.observers

    @cached_property
    def renderer(self) -> TurnRenderer:
        """The tokenizer's chat template, turn by turn."""
        return TurnRenderer(self.tokenizer)

    @property
    def context_tokens(self) -> int:
        """Most tokens of a trajectory, by the env's limit, the trainer's and the inference server's."""
        # One token less than the trainer's: atroposlib leaves out what is as long as that.
        limits = [self.config.max_token_length, self.max_token_len - 1, context_of(self.server) or 0]
        return min(limit for limit in limits if limit > 0)

    async def setup(self) -> None:
        """Probe inference, then start the tool backend, then the env's own set-up."""
        with own_field_names(self.config):
            tools = self.build_tools()
        # Made now, as a tokenizer that can't be used is a mistake in a setting.
        _ = self.renderer
        if self.config.otlp_endpoint is not None and self._tracing is None:
            self._tracing = tracing.start(self.config.otlp_endpoint, self.config.wandb_name or "atropos")
        # Before all that may take minutes: a run that waits can be looked at.
        await self.endpoint.start()
        await self.dashboard.start()
        await probe_servers(self.server, self.tokenizer, self.config.model_timeout_s, self.chat_options(tools))
        self._check_context()
        self.check_logprobs(self.config.agent_temperature)
        await self.start_tool_backend(tools)
        await self.hooks.call("setup_agent_env", self.setup_agent_env)

    def chat_options(self, tools: ToolRegistry) -> dict[str, object]:
        """What a chat request has beside messages and sampling, where the server is one of text."""
        return {}

    def _check_context(self) -> None:
        length, held = self.config.max_token_length, context_of(self.server)
        if held is None or held >= length:
            return
        if "max_token_length" in self.config.model_fields_set:
            raise ConfigError(
                f"env.max_token_length: {length} is more than the inference server's context of {held} tokens: set "
                f"{held} or less, or serve the model with a longer one"
            )
        _log.info("trajectories have at most %d tokens, which the inference server's context holds", held)

    def check_logprobs(self, temperature: float) -> None:
        """Check that the logprobs of training data sampled with a temperature are of the policy that samples.

        Raises:
            ConfigError: they are of temperature 1, and `allow_raw_logprobs` isn't set.
        """
        # At 1 both kinds of logprobs are the same.
        if self._evaluates or temperature == 1 or self.config.allow_raw_logprobs:
            return
        model = Model(self.server)
        if model.exact and temperature == 0:
            raise ConfigError(
                "env.agent_temperature: 0 takes the likeliest token each time, which is no sample of the policy whose "
                "logprobs servers report, so that a trainer's ratios would be wrong: sample with a higher one, or set "
                "--env.allow_raw_logprobs true"
            )
        if model.raw_logprobs:
            raise ConfigError(
                f"env.agent_temperature: {temperature:g}, but the inference server's logprobs are of temperature 1, so "
                "that a trainer's ratios would be wrong: start the server with `--logprobs-mode processed_logprobs` "
                "(vLLM), sample with --env.agent_temperature 1, or set --env.allow_raw_logprobs true"
            )

    async def start_tool_backend(self, tools: ToolRegistry | None = None) -> None:
        """Start pool and executor, unless they run."""
        if not self.backend.running:
            await self.backend.start(tools if tools is not None else self.build_tools())

    async def shutdown_tool_backend(self) -> None:
        """Release every trajectory and stop the containers. Idempotent."""
        await self.backend.stop()

    async def frozen_workspace(
        self, group: str, hook: str, prepare: Callable[[], Awaitable[object]], calls: HookCalls | None = None
    ) -> Snapshot:
        """A snapshot of the workspace that `prepare`, a call of `hook`, leaves in the slot of trajectory `group`."""
        async with self.backend.admission:
            try:
                with self.backend.awaiting_slot(group):
                    await self.hooks.call(hook, prepare, calls=calls, setup=True)
                    return await self.backend.freeze(group)
            finally:
                await self.executor.release_trajectory(group)

    def hook_tools(self, trajectory_id: str, *, setup: bool = False, texts: HookTexts | None = None) -> ExecTool:
        """`exec_tool` for a hook; see `ExecTool`."""
        run = partial(self.execute_tool, trajectory_id)
        return ExecTool(self.executor, trajectory_id, run, setup=setup, texts=texts)

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        """Run one call and measure it."""
        started = time.perf_counter()
        with self.metrics.activity.call(trajectory_id, call):
            result = await self.executor.execute(trajectory_id, call)
        self.metrics.call_s.append(time.perf_counter() - started)
        self.metrics.calls += 1
        return result

    # ---------------------------------------------------------------------------------------------------- process

    def _check_complete(self) -> None:
        missing = self.missing_methods()
        if missing:
            raise ConfigError(f"{type(self).__name__} must define {' and '.join(missing)}")

    async def process_manager(self) -> None:
        """Run `total_steps` groups, or as many as there are items, and write the JSONL and the page.

        Raises:
            GroupsDropped: at the end, if some groups could not be completed; the files hold the others.
            ConfigError, InferenceError, SandboxError: the run could not start.
        """
        self._check_complete()
        self.config.group_size = int(getattr(self, "group_size_to_process", self.config.group_size))
        async with self.running():
            await self._process(int(getattr(self, "n_groups_to_process", self.config.total_steps)))
        dropped = sum(self.metrics.dropped.values())
        if dropped:
            reasons = ", ".join(f"{count} x {code}" for code, count in self.metrics.dropped.items())
            raise GroupsDropped(f"{dropped} of {dropped + self.metrics.groups} groups were dropped ({reasons})")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the body, without a trainer, between the env's set-up and its end."""
        async with self.lifetime.running(self._close):
            await self.setup()
            self._wandb.start(self.wandb_project, self.wandb_group)
            async with beside(watch_inference(self.server, self.config.model_timeout_s)):
                yield

    async def _process(self, total: int) -> None:
        self.curr_step = started = 0
        config = self.config
        # As many groups as fill the slots: more would only wait, and keep their items from later ones.
        free = asyncio.Semaphore(config.process_concurrency or math.ceil(config.capacity / config.group_size))
        async with task_group() as tasks:
            while total < 0 or started < total:
                # Before the item: one that is taken and then waits would be lost to a run that ends meanwhile.
                await free.acquire()
                item = await self.hooks.call("get_next_item", self.get_next_item)
                if item is None:
                    break
                started += 1
                task = tasks.create_task(self.process_group(item))
                # A callback, as a task that is cancelled before it begins reaches no `finally`.
                task.add_done_callback(lambda _: free.release())

    async def process_group(self, item: Item) -> ScoredDataGroup | None:
        """One whole group, as it is written to the files; None when it can't be completed."""
        group, _ = await self.collect_trajectories(item)
        if group is None:
            return None
        with self.hooks.guard("postprocess_histories"):
            processed = cast("ScoredDataGroup", await self.postprocess_histories(group))
        await self.handle_send_to_api(processed, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
        await self.wandb_log()
        self.curr_step += 1
        return processed

    # ------------------------------------------------------------------------------------------------------ serve

    async def env_manager(self) -> None:
        """Serve groups to a trainer until its steps are done.

        Raises:
            ConfigError: the tokens would be placeholders, no group would ever be sent, or there is no trajectory API.
            TrajectoryApiLost: the trajectory API is gone.
        """
        self._check_complete()
        self._trainer.check_servable(server_type(self.server))
        async with self.lifetime.running(self._close):
            await check_run_api(self.config.rollout_server_url)
            try:
                async with beside(watch_inference(self.server, self.config.model_timeout_s)):
                    await super().env_manager()
            finally:
                await leave_run_api(self.config.rollout_server_url, getattr(self, "env_id", None))

    # --------------------------------------------------------------------------------------------------- evaluate

    async def _run_evaluate(self) -> None:
        if type(self).evaluate is SandboxEnv.evaluate:
            raise ConfigError(f"{type(self).__name__} has no evaluation; define evaluate(), or use process")
        self._evaluates = True
        async with self.running():
            await self.evaluate()

    # ----------------------------------------------------------------------------------------------------- the end

    def metrics_text(self) -> str:
        """The env's, its executor's and its pool's metrics, in Prometheus' text format."""
        others = [] if self.pool is None else self.pool.metrics()
        if self.backend.running:
            others += self.executor.metrics()
        return metrics_text(self.metrics, others, self.config.wandb_name or "")

    def close_files(self) -> None:
        """Close the JSONL and write its page. Idempotent."""
        self.sink.close()

    async def _close(self) -> None:
        """Workers first, then executor and pool, then files; each in bounded time."""
        self.sink.end_within(SENDS_S)
        # They hold slots, so they come before the pool.
        workers = {*self.collector.tasks, *self.workers, *self.eval_workers, self.eval_runner}
        if not await cancel_and_wait(workers, WORKERS_S):
            _log.warning("shutdown: cancelled workers took longer than %g s and are abandoned", WORKERS_S)
        await asyncio.gather(
            bounded("the tool backend", self.shutdown_tool_backend(), 90),
            bounded("the inference clients", stop_servers(self.server), 5),
            bounded("the metrics", self.endpoint.close(), 5),
            bounded("the dashboard", self.dashboard.close(), 5),
        )
        if self._tracing is not None:
            # After all that writes spans.
            await bounded("the traces", asyncio.to_thread(self._tracing.close), 2 * tracing.EXPORT_S)
            self._tracing = None
        # Nearly last: until the workers have ended, groups may still be written.
        await bounded("the files", asyncio.to_thread(self.close_files), 30)
        await self._wandb.finish()
