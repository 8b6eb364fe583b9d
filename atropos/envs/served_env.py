"""What atroposlib asks of a running env: whole groups, steps with a trainer, and wandb.

Each method but `item_name` overrides one of atroposlib's `BaseEnv`; `sandbox_env` starts, runs and ends an env.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import cast

from atropos.agent.transcript import MASKED
from atropos.aio import outlive
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
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.reporting.group_sink import GroupSink
from atropos.envs.reporting.run_api import API_FAILURES, TrajectoryApiLost
from atropos.envs.reporting.wandb_run import WandbRun, pool_gauges, readable_group
from atropos.envs.reporting.watch import TrainerWatch, report_evaluation
from atropos.envs.running.backend import ToolBackend
from atropos.envs.running.groups import GroupCollector
from atropos.envs.running.hooks import Hooks
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import HookError, ScoredGroup, scored_item
from atropos.envs.servers import prepare_servers
from atropos.errors import ConfigError


class ServedEnv(BaseEnv):
    """See the module. `SandboxEnv` extends it.

    Attributes:
        backend: pool and executor.
        collector: runs groups.
        hooks: calls the env's own code.
        sink: takes finished groups.
        metrics: counters of the run.
    """

    name: str | None = None
    config: SandboxEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride] (atroposlib: BaseEnvConfig)
    collector: GroupCollector

    def __init__(
        self,
        config: SandboxEnvConfig,
        server_configs: ServerConfigs,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        quiet_logging()
        self._title = self.name or type(self).__name__
        if config.wandb_name is None:
            config.wandb_name = self._title
        with tokenizers(config.tokenizer_name) as loaded:
            if not testing:
                server_configs = prepare_server_configs(server_configs, config.tokenizer_name, loaded)
            try:
                super().__init__(config, cast("list[APIServerConfig]", server_configs), slurm=slurm, testing=testing)
            except OSError as error:  # the tokenizers are loaded, so it is the file of the groups
                raise ConfigError(f"env.data_path_to_save_groups: {error}; choose a writable path") from error
        prepare_servers(self.server)
        self.metrics = EnvMetrics()
        self.hooks = Hooks(type(self).__name__, self.metrics, config.hook_timeout_s)
        self.backend = ToolBackend(config)
        self.sink = GroupSink(config, self.metrics, self._title, getattr(self.jsonl_writer, "_fp", None))
        self._wandb = WandbRun(config)
        self._trainer = TrainerWatch(config)
        self._unsent: set[asyncio.Task[object] | None] = set()
        """Workers that have collected a group and not sent it."""

    def item_name(self, item: Item) -> str:
        """A short name of an item for people, file names and seeds."""
        if isinstance(item, dict):
            for key in ("name", "id", "task_id", "task"):
                value = cast("dict[str, object]", item).get(key)
                if isinstance(value, str | int):
                    return str(value)[:80]
        named = getattr(item, "name", None)
        return named[:80] if isinstance(named, str) else str(item)[:40]

    # ----------------------------------------------------------------------------------------------------- groups

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """One whole group, or None when it can't be completed."""
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
            with contextlib.suppress(HookError), self.hooks.guard("add_rollouts_for_wandb"):  # the guard logs it
                await self.add_rollouts_for_wandb(cast("ScoredDataGroup", group), item)

    # ------------------------------------------------------------------------------------------------- the trainer

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

    # ------------------------------------------------------------------------------------------------------- wandb

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
        if self.backend.pool is not None:
            metrics.update(pool_gauges(self.backend.pool.stats()))
        await super().wandb_log(metrics)

    async def setup_wandb(self) -> None:
        """As atroposlib's; if wandb can't start, the error is one line."""
        with self._wandb.starting(), self._trainer.awaiting_trainer():  # asks the trainer for the project's name
            await super().setup_wandb()
