"""What `process`, `serve` and `evaluate` do with an env, from set-up to the last thing that is closed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from atropos.agent.model import EXACT
from atropos.envs.adapter import server_types, stop_servers
from atropos.envs.running.groups import Groups
from atropos.envs.running.hooks import first_of
from atropos.envs.running.lifecycle import beside, bounded, cancel_and_wait
from atropos.envs.running.reporting import Reporting
from atropos.envs.running.rollout import GroupsDropped
from atropos.envs.running.run_api import API_FAILURES, TrajectoryApiLost, check_run_api, leave_run_api
from atropos.errors import ConfigError

WAITED_S = 60.0
"""How long a trainer may leave a full queue alone before the log says that the env waits for it."""
HEALTH_S = 1.0
"""How often the state of the inference servers is looked at; atroposlib asks them about as often."""

_log = logging.getLogger(__name__)


class Commands(Groups, Reporting):
    """The part of `SandboxEnv` that carries out the commands."""

    _full_since: float | None = None
    _said: frozenset[str] = frozenset()

    @abstractmethod
    async def setup(self) -> None:
        """Start everything that trajectories need."""

    @abstractmethod
    async def shutdown_tool_backend(self) -> None:
        """Release every trajectory and stop the containers. Idempotent."""

    @property
    def exact_tokens(self) -> bool:
        """Whether the inference servers tell the tokens they sample."""
        return server_types(self.server) <= EXACT

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
            async with beside(self._watch_inference()):
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
                    item = await self.hooks.call("get_next_item", self.get_next_item)
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
            ConfigError: the tokens would be placeholders, no group would ever be sent, or there is no trajectory API.
            TrajectoryApiLost: it went away.
        """
        if not self.exact_tokens and not self.config.allow_placeholder_tokens:
            kinds = ", ".join(sorted(server_types(self.server)))
            raise ConfigError(
                f"openai.server_type: {kinds} doesn't tell the tokens it samples, so a trainer would get placeholders; "
                "use vllm or sglang, or set --env.allow_placeholder_tokens true"
            )
        if self.config.group_size == 1 and self.config.ensure_scores_are_not_same:
            raise ConfigError(
                "env.group_size: a group of 1 always has equal scores, and those are left out; use 2 or more, or set "
                "--env.ensure_scores_are_not_same false"
            )
        async with self.lifetime.running(self._close):
            await check_run_api(self.config.rollout_server_url)
            setattr(self, "get_next_item", self._asking(self.get_next_item))  # noqa: B010 (of this instance alone)
            try:
                async with beside(self._watch_inference()):
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
        batch, share = self.config.batch_size, self.config.min_batch_allocation
        if batch > 0 and batch % size:
            raise ConfigError(
                f"env.group_size: the trainer's batch of {batch} is no multiple of {size}, so that run-api would never "
                "make one of whole groups; choose a group size that divides it"
            )
        if batch > 0 and share is not None and int(share * batch) < 1:
            self._say_once(
                "share", "env.min_batch_allocation: %s of a batch of %s is less than one trajectory", share, batch
            )

    async def get_status(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As atroposlib's; a trajectory API that is gone ends the run with one line, and a long wait is told.

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
                f"env.rollout_server_url: the trajectory API at {config.rollout_server_url} is gone, or was started anew "
                f"and doesn't know this env; {cure}"
            ) from error
        self._tell_of_the_queue(self.status_dict)

    def _tell_of_the_queue(self, status: dict[str, Any]) -> None:
        """What would otherwise look as if nothing happened: a trainer that fetches nothing, groups that never fit."""
        config, url = self.config, self.config.rollout_server_url
        waiting = int(status["queue_size"]) * config.group_size
        full = 0 < config.max_batches_offpolicy * config.batch_size <= waiting
        if not full:
            if self._full_since is not None and "full" in self._said:
                _log.info("the trainer fetches batches again")
            self._full_since, self._said = None, self._said - {"full"}
        elif self._full_since is None:
            self._full_since = time.monotonic()
        elif time.monotonic() - self._full_since > WAITED_S:
            text = (
                "%d trajectories wait at %s and no trainer has fetched a batch for %.0f s; this env begins no more "
                "(max_batches_offpolicy %d), keeps no slot busy, and goes on when one does"
            )
            self._say_once("full", text, waiting, url, WAITED_S, config.max_batches_offpolicy)
        largest = int(status.get("max_group_size") or 1)
        if largest > config.group_size and largest % config.group_size:
            text = (
                "env.group_size: run-api packs groups up to the largest in its queue, another env's %d, which is no "
                "multiple of %d: while such groups come, this env's are in no batch"
            )
            self._say_once("packing", text, largest, config.group_size)
        if config.min_batch_allocation is None and 0 <= self.derived_batch_size < config.group_size:
            text = "other envs hold the whole batch (min_batch_allocation): this env begins nothing until they leave"
            self._say_once("no share", text)

    def _say_once(self, key: str, text: str, *values: Any) -> None:
        if key not in self._said:
            self._said |= {key}
            _log.warning(text, *values)

    def _asking(self, ask: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """`get_next_item` when serving: what it raises ends the run by its name, and that nothing is left is told."""

        async def get_next_item() -> Any:
            item = await self.hooks.call("get_next_item", ask)
            if item is None:
                text = "get_next_item() gave None: what has begun is finished, then the env waits for a further item"
                self._say_once("no item", text)
            return item

        return get_next_item

    async def env_step_checks(self) -> None:
        """As atroposlib's; an evaluation that fails is reported, which nobody would await before the end."""
        before = self.eval_runner
        await super().env_step_checks()
        if self.eval_runner is not None and self.eval_runner is not before:
            self.eval_runner.add_done_callback(_report_evaluation)

    async def _watch_inference(self) -> None:
        """Say when an inference server stops answering, and when it is back; calls wait for it meanwhile."""
        down: set[str] = set()
        while True:
            for server in self.server.servers:
                url = str(getattr(getattr(server, "config", None), "base_url", server))
                healthy = bool(getattr(server, "server_healthy", True))
                if not healthy and url not in down:
                    down.add(url)
                    _log.warning(
                        "the inference server at %s doesn't answer; calls wait for it, each up to model_timeout_s (%g s)",
                        url,
                        self.config.model_timeout_s,
                    )
                elif healthy and url in down:
                    down.remove(url)
                    _log.info("the inference server at %s answers again", url)
            await asyncio.sleep(HEALTH_S)

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


def _report_evaluation(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("evaluate failed; training goes on", exc_info=task.exception())
