"""An `AgentEnv` over a fixed list of items: order, epochs and evaluation."""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time

from pydantic import Field

from atropos.envs.adapter import Item, ServerConfigs
from atropos.envs.agent_env import AgentEnv
from atropos.envs.config import AgentEnvConfig
from atropos.envs.running.lifecycle import task_group
from atropos.envs.running.rollout import GroupDropped, GroupsDropped, ItemLeftOut, Rollout

_log = logging.getLogger(__name__)


class DatasetEnvConfig(AgentEnvConfig):
    """The order of the items and the number of passes."""

    epochs: int | None = Field(
        default=None, ge=1, description="passes over the items; None: one in process, without end in serve"
    )
    shuffle: bool = Field(default=False, description="another order in each pass, by the seed")


class DatasetEnv(AgentEnv):
    """Subclasses fill `items`."""

    env_config_cls = DatasetEnvConfig
    config: DatasetEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, config: DatasetEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.items: list[Item] = []
        self._given = 0
        self._again: list[int] = []
        """Places of items that an earlier run had begun at its checkpoint; they come first."""
        self._pass = -1
        self._order: list[int] = []
        self._serving = False

    async def env_manager(self) -> None:
        """Serve, by default with endless passes; see `SandboxEnv.env_manager`."""
        self._serving = True
        await super().env_manager()

    async def get_next_item(self) -> Item:
        """The next item, pass after pass; None when the passes are over."""
        if not self.items:
            return None
        while self._again:
            if (place := self._again.pop(0)) < len(self.items):  # there may be fewer than in the earlier run
                return self.items[place]
        turn, place = divmod(self._given, len(self.items))
        passes = self.config.epochs if self.config.epochs is not None else (None if self._serving else 1)
        if passes is not None and turn >= passes:
            return None
        if turn != self._pass:
            self._pass = turn
            self._order = list(range(len(self.items)))
            if self.config.shuffle:
                random.Random(f"{self.config.seed or 0}/{turn}").shuffle(self._order)
        self._given += 1
        return self.items[self._order[place]]

    def save_checkpoint(self, step: int, data: dict[str, object] | None = None) -> None:
        """As atroposlib's, with the items that were taken: a restarted env begins with the unfinished ones and goes on.

        The folder is the trainer's, which may be on another machine: one that can't be written to is reported.
        """
        places = {id(item): place for place, item in enumerate(self.items)}
        begun = [*(running["item"] for running in self.running_items.values()), *self.backlog]
        again = [*(places[id(item)] for item in begun if id(item) in places), *self._again]
        try:
            super().save_checkpoint(step, {"_given": self._given, "_again": again, **(data or {})})
        except OSError as error:
            _log.warning("no checkpoint of step %d; an env that is started again goes on earlier: %s", step, error)

    async def evaluate(self, *_args: object, **_kwargs: object) -> None:
        """Run every item once; the mean score goes to the log, to wandb, and to `data_dir_to_save_evals`.

        Raises:
            GroupsDropped: some items could not be completed; they are not in the mean. Nor are those that were left
                out.
        """
        room = asyncio.Semaphore(self.config.capacity)
        scored: list[tuple[str, Rollout]] = []
        left_out: list[object] = []

        async def one(item: object) -> None:
            async with room:
                try:
                    [rollout] = await self.collector.rollouts(item, 1)
                    scored.append((self.item_name(item), rollout))
                except ItemLeftOut:
                    left_out.append(item)
                except GroupDropped as dropped:
                    self.metrics.dropped[dropped.code] += 1
                    _log.warning("%s is not evaluated: %s", self.item_name(item), dropped)

        began = time.time()
        async with task_group() as tasks:
            for item in self.items:
                tasks.create_task(one(item))
        await self._report(scored, began)
        dropped = len(self.items) - len(scored) - len(left_out)
        if dropped:
            raise GroupsDropped(
                f"{dropped} of {len(self.items)} items could not be completed; the mean is of the others"
            )

    async def _report(self, scored: list[tuple[str, Rollout]], began: float) -> None:
        mean = statistics.fmean(rollout.score for _, rollout in scored) if scored else float("nan")
        solved = sum(rollout.score >= 1 for _, rollout in scored)
        metrics = {"eval/mean_score": mean, "eval/solved": solved, "eval/items": len(scored)}
        print(f"{self.name}: {solved} of {len(scored)} solved, mean score {mean:.4f}")
        if self.config.use_wandb:
            await self.wandb_log(metrics)
        if self.config.data_dir_to_save_evals is not None:
            samples = [
                {"item": name, **rollout.summary()} for name, rollout in sorted(scored, key=lambda pair: pair[0])
            ]
            await self.evaluate_log(metrics, samples=samples, start_time=began, end_time=time.time())
