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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import cached_property, partial
from typing import NoReturn, cast

from atropos import tracing
from atropos.agent import TurnRenderer
from atropos.agent.model import Model, server_type
from atropos.agent.transcript import MASKED
from atropos.aio import cancel_and_wait, outlive
from atropos.envs.adapter import (
    APIServerConfig,
    BaseEnv,
    Item,
    ScoredDataGroup,
    ServerConfigs,
    prepare_server_configs,
    quiet_logging,
    tokenizers,
)
from atropos.envs.command_line import app as command_line
from atropos.envs.config import SandboxEnvConfig, own_field_names
from atropos.envs.reporting.dashboard import EnvDashboard
from atropos.envs.reporting.group_sink import GroupSink
from atropos.envs.reporting.prometheus import MetricsEndpoint, metrics_text
from atropos.envs.reporting.run_api import API_FAILURES, TrajectoryApiLost, check_run_api, leave_run_api
from atropos.envs.reporting.wandb_run import WandbRun, pool_gauges, readable_group
from atropos.envs.reporting.watch import TrainerWatch, report_evaluation, watch_inference
from atropos.envs.running.backend import ToolBackend
from atropos.envs.running.groups import Event, GroupCollector, GroupMember
from atropos.envs.running.hooks import ExecTool, HookCalls, Hooks
from atropos.envs.running.lifecycle import SENDS_S, WORKERS_S, Lifetime, beside, bounded, task_group
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import GroupsDropped, HookError, Rollout, ScoredGroup, scored_item
from atropos.envs.servers import context_of, prepare_servers, probe_servers, stop_servers
from atropos.errors import ConfigError
from atropos.slots import SlotPool, Snapshot
from atropos.tools import ToolCall, ToolExecutor, ToolRegistry, ToolResult

__all__ = ["Event", "ExecTool", "GroupMember", "SandboxEnv"]

_log = logging.getLogger(__name__)


class SandboxEnv(BaseEnv):
    """See the module. `AgentEnv` and `HermesAgentBaseEnv` extend it.

    Attributes:
        backend: pool and executor.
        collector: runs groups.
        hooks: calls the env's own code.
        sink: takes finished groups.
        lifetime: of the command that runs.
        metrics: counters of the run.
    """

    name: str | None = None
    env_config_cls: type[SandboxEnvConfig] = SandboxEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride] (atroposlib: an instance)
    n_groups_to_process: int
    group_size_to_process: int
    config: SandboxEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride] (atroposlib: BaseEnvConfig)

    def __init__(
        self,
        config: SandboxEnvConfig,
        server_configs: ServerConfigs,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        quiet_logging()
        title = self.name or type(self).__name__
        if config.wandb_name is None:
            config.wandb_name = title
        with tokenizers(config.tokenizer_name) as loaded:
            if not testing:
                server_configs = prepare_server_configs(server_configs, config.tokenizer_name, loaded)
            try:
                super().__init__(config, cast("list[APIServerConfig]", server_configs), slurm=slurm, testing=testing)
            except OSError as error:  # the tokenizers are loaded, so it is the file of the groups
                raise ConfigError(f"env.data_path_to_save_groups: {error}; choose a writable path") from error
        prepare_servers(self.server)
        self.metrics = EnvMetrics()
        self.lifetime = Lifetime()
        self.hooks = Hooks(type(self).__name__, self.metrics, config.hook_timeout_s)
        self.backend = ToolBackend(config)
        self.collector = GroupCollector(self, config, self.backend, self.metrics, self.lifetime)
        self.sink = GroupSink(config, self.metrics, title, getattr(self.jsonl_writer, "_fp", None))
        self.endpoint = MetricsEndpoint(config.metrics_address, self.metrics_text, config.metrics_token)
        self.dashboard = EnvDashboard(config, title, self.metrics, self.backend)
        self.observers.append(self.dashboard.observe)
        self._wandb = WandbRun(config)
        self._tracing: tracing.Tracing | None = None
        self._trainer = TrainerWatch(config)
        self._evaluates = False
        """Whether the command makes no training data."""
        self._unsent: set[asyncio.Task[object] | None] = set()
        """Workers that have collected a group and not sent it."""

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

    def item_name(self, item: Item) -> str:
        """A short name of an item for people, file names and seeds."""
        if isinstance(item, dict):
            for key in ("name", "id", "task_id", "task"):
                value = cast("dict[str, object]", item).get(key)
                if isinstance(value, str | int):
                    return str(value)[:80]
        named = getattr(item, "name", None)
        return named[:80] if isinstance(named, str) else str(item)[:40]

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
        limits = [self.config.max_token_length, self.max_token_len - 1, context_of(self.server) or 0]
        return min(limit for limit in limits if limit > 0)

    async def setup(self) -> None:
        """Probe inference, then start the tool backend, then the env's own set-up."""
        with own_field_names(self.config):
            tools = self.build_tools()
        _ = self.renderer
        if self.config.otlp_endpoint is not None and self._tracing is None:
            self._tracing = tracing.start(self.config.otlp_endpoint, self.config.wandb_name or "atropos")
        await self.endpoint.start()
        await self.dashboard.start()
        await probe_servers(self.server, self.tokenizer, self.config.model_timeout_s, self.chat_options(tools))
        self._check_context()
        if not self._evaluates:
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
        """Check that the logprobs of what is sampled with a temperature are of the policy that samples.

        Raises:
            ConfigError: the server's are of temperature 1, and `allow_raw_logprobs` isn't set.
        """
        if temperature != 1 and not self.config.allow_raw_logprobs and Model(self.server).raw_logprobs:
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

    def hook_tools(self, trajectory_id: str, *, setup: bool = False) -> ExecTool:
        """`exec_tool` for a hook; see `ExecTool`."""
        return ExecTool(self.executor, trajectory_id, partial(self.execute_tool, trajectory_id), setup=setup)

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        """Run one call and measure it."""
        started = time.perf_counter()
        with self.metrics.activity.call(trajectory_id, call):
            result = await self.executor.execute(trajectory_id, call)
        self.metrics.call_s.append(time.perf_counter() - started)
        self.metrics.calls += 1
        return result

    # ----------------------------------------------------------------------------------------------------- groups

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """One whole group, or None when it can't be completed; see the module."""
        group = await self.collector.collect(item)
        if group is not None:
            self._unsent.add(asyncio.current_task())
        return cast("ScoredDataGroup | None", group), []

    async def handle_env(self, item_uuid: str) -> ScoredDataGroup | list[ScoredDataGroup] | None:
        """As atroposlib's, which only logs what an env's own `postprocess_histories` raises: the group is counted."""
        try:
            return await super().handle_env(item_uuid)
        finally:
            if (task := asyncio.current_task()) in self._unsent:
                self._unsent.discard(task)
                self.metrics.unsent["postprocess_histories"] += 1

    async def collect_trajectory(self, item: Item) -> tuple[dict[str, object], list[Item]]:
        """A single trajectory, as atroposlib's `ScoredDataItem`.

        Raises:
            GroupDropped: it could not be completed.
        """
        [rollout] = await self.collector.rollouts(item, 1)
        return scored_item(rollout), []

    async def handle_send_to_api(
        self,
        scored_data: ScoredDataGroup | list[ScoredDataGroup],
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """As atroposlib's, but groups that are left out are logged, and the file is complete after each group.

        The JSON is encoded in a thread: atroposlib does so on the event loop, a third of a second for eight long
        trajectories.
        """
        self._unsent.discard(asyncio.current_task())
        several = isinstance(scored_data, list)
        limit = self.max_token_len if abort_on_any_max_length_exceeded else 0
        admitted: list[ScoredGroup] = []
        for group in cast("list[ScoredGroup | None]", scored_data if several else [scored_data]):
            if group is None or not self.sink.admits(group, self.item_name(item), max_token_len=limit):
                continue
            if self.config.include_messages and group.get("messages") is None:
                group["messages"] = [[{"role": "user", "content": self.tokenizer.decode(t)}] for t in group["tokens"]]
            self.completion_lengths.extend(len(mask) - list(mask).count(MASKED) for mask in group["masks"])
            admitted.append(group)
        if admitted and do_send_to_api:
            self.items_sent_this_step += len(admitted)
        written = admitted
        if not self.config.include_messages:
            written = [cast("ScoredGroup", {**group, "messages": None}) for group in admitted]
        # atroposlib no longer has their items: a cancellation of this worker waits
        env_id = getattr(self, "env_id", None)
        await outlive(self.sink.deliver(written, sent=do_send_to_api, env_id=env_id, listed=several))
        for group in admitted:
            with contextlib.suppress(HookError), self.hooks.guard("add_rollouts_for_wandb"):  # which logs it
                await self.add_rollouts_for_wandb(cast("ScoredDataGroup", group), item)

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
        free = asyncio.Semaphore(config.process_concurrency or math.ceil(config.capacity / config.group_size))
        async with task_group() as tasks:
            while total < 0 or started < total:
                await free.acquire()
                item = await self.hooks.call("get_next_item", self.get_next_item)
                if item is None:
                    break
                started += 1
                task = tasks.create_task(self.process_group(item))
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

    async def register_env(self) -> None:
        """As atroposlib's, which waits for a trainer; the log says so."""
        with self._trainer.awaiting_trainer():
            await super().register_env()

    async def get_server_info(self) -> None:
        """As atroposlib's; a group size of which run-api never makes a batch is refused.

        Raises:
            ConfigError: the trainer's batch can't be made of whole groups of this size.
        """
        size = self.config.group_size
        try:
            await super().get_server_info()
        except ValueError as error:
            raise ConfigError(f"env.group_size: {size} is more than the trainer's batch; {error}") from error
        self._trainer.check_batch(self.config.batch_size)
        self.config.worker_timeout = self.collector.take_over(self.config.worker_timeout)

    async def get_status(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As atroposlib's; a lost trajectory API ends the run with one line, and a long wait is reported.

        Raises:
            TrajectoryApiLost: it doesn't answer, or doesn't know this env.
        """
        try:
            await super().get_status()
        except API_FAILURES as error:
            config = self.config
            cure = "start run-api and the trainer, then the env"
            if config.inference_weight <= 0:
                cure = "or its envs have no weight above 0 between them: set env.inference_weight"
            raise TrajectoryApiLost(
                f"env.rollout_server_url: the trajectory API at {config.rollout_server_url} is gone, or was restarted "
                f"and doesn't know this env; {cure}"
            ) from error
        self._trainer.queue(self.status_dict, self.derived_batch_size)

    async def add_train_workers(self) -> None:
        """As atroposlib's; an error of `get_next_item` ends the run with its message; the end of items is reported."""
        idle = not self.workers and not self.backlog and (self.eval_runner is None or self.eval_runner.done())
        with self.hooks.guard("get_next_item"):  # the only code of the env in it
            await super().add_train_workers()
        if idle and not self.workers and self.max_num_workers > 0 and not int(self.status_dict["queue_size"]):
            self._trainer.report("no item", "get_next_item() gave None: the env waits for a further item")

    async def env_step_checks(self) -> None:
        """As atroposlib's; a failed evaluation is reported at once, although it is awaited at the end only."""
        before = self.eval_runner
        await super().env_step_checks()
        if self.eval_runner is not None and self.eval_runner is not before:
            self.eval_runner.add_done_callback(report_evaluation)

    # --------------------------------------------------------------------------------------------------- evaluate

    async def _run_evaluate(self) -> None:
        if type(self).evaluate is SandboxEnv.evaluate:
            raise ConfigError(f"{type(self).__name__} has no evaluation; define evaluate(), or use process")
        self._evaluates = True
        async with self.running():
            await self.evaluate()

    # -------------------------------------------------------------------------------------------- wandb and the end

    async def add_rollouts_for_wandb(
        self, scored_data: ScoredDataGroup | list[ScoredDataGroup], item: Item = None
    ) -> None:
        """Readable conversations instead of decoded tokens: thinking, text, calls and results."""
        if not self.config.use_wandb:
            return
        keep = self.config.num_rollouts_per_group_for_logging
        self.rollouts_for_wandb.append(
            readable_group(cast("ScoredGroup", scored_data), self.tokenizer.decode)[: None if keep == -1 else keep]
        )
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def wandb_log(self, wandb_metrics: Mapping[str, object] | None = None) -> None:
        """Add faults, phases and the pool's gauges."""
        metrics = {**self.metrics.as_dict(), **(wandb_metrics or {})}
        if self.pool is not None:
            metrics.update(pool_gauges(self.pool.stats()))
        await super().wandb_log(metrics)

    async def setup_wandb(self) -> None:
        """As atroposlib's; if wandb can't start, the error is one line."""
        with self._wandb.starting(), self._trainer.awaiting_trainer():  # asks the trainer for the project's name
            await super().setup_wandb()

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
            await bounded("the traces", asyncio.to_thread(self._tracing.close), 2 * tracing.EXPORT_S)
            self._tracing = None
        await bounded("the files", asyncio.to_thread(self.close_files), 30)
        await self._wandb.finish()
