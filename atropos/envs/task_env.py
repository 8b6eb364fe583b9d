"""An env over a folder of tasks in the Harbor layout.

    python -m atropos.envs.task_env process --env.tasks_path examples/tasks --env.tool_pool_mode local ...

The tests are uploaded and run after the agent has ended. A verifier that gives no reward (it timed out, was killed, or
wrote none) is run once on the task's untouched workspace. If it gives a reward there, the agent is the cause, and the
score is 0; otherwise the task is at fault, and the group is dropped. A later step that can't be prepared is judged in
the same way. `--env.verifier_failure drop` or `zero` decides all cases alike.

A task with a solution is played only where that scores 1, which is tried when the task first comes up (`check_tasks`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from functools import partial

from atropos.agent import AgentConfig, AgentResult, AtroposAgent
from atropos.envs.adapter import ServerConfigs
from atropos.envs.dataset_env import DatasetEnv
from atropos.envs.running.lifecycle import task_group
from atropos.envs.running.rollout import ItemLeftOut, Rollout, VerifierError
from atropos.envs.sandbox_env import ExecTool, GroupMember
from atropos.envs.task_settings import TaskEnvConfig, leave_out, usable_tasks
from atropos.errors import ConfigError, ImageUnavailable, SandboxError
from atropos.slots import Slot, SlotFileError, Snapshot
from atropos.tasks import services, workspace
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.folder import TaskSet
from atropos.tasks.format.task import Task
from atropos.tasks.guide import guide
from atropos.tasks.prepare import TaskImages
from atropos.tasks.proof import Proofs
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.reward import Verdict, combined, passed

_log = logging.getLogger(__name__)


_Judged = tuple[Verdict, dict[str, object]]
"""A verdict, and what is kept of it with the trajectory."""


@dataclass
class _Attempt:
    """A running trajectory.

    Attributes:
        snapshot: the group's workspace that it started from; None: it builds its own.
        agents_work: the agent's workspace, while a step of its task is verified in another slot.
        verdicts: on the steps of its task.
        details: of each verdict, by the step's name.
    """

    snapshot: Snapshot | None
    agents_work: Snapshot | None = None
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    details: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])

    def add(self, step: Task, judged: _Judged) -> None:
        verdict, self.details[step.name] = judged
        self.verdicts.append(verdict)


class TaskEnv(DatasetEnv):
    """Trajectories are attempts at tasks; the score is the reward that a task's verifier writes.

    Attributes:
        left_out: by name, why a task can't be solved here.
    """

    name = "task_env"
    opens_view = False
    env_config_cls = TaskEnvConfig
    config: TaskEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, config: TaskEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        tasks = usable_tasks(config)
        super().__init__(config, server_configs, slurm, testing)
        self.items: list[Task] = tasks
        self._attempts: dict[str, _Attempt] = {}
        self._unsound: set[str] = set()
        """Tasks whose tests gave no reward on their untouched workspace either."""
        self._images: TaskImages | None = None
        self._layers = VerifierLayers(config.verifier_layers)
        self._proofs = Proofs(self._layers, mode=config.verifier_mode, network=config.allow_network)
        self.left_out: dict[str, str] = {}

    async def setup_agent_env(self) -> None:
        """Pull the tasks' images before any task runs; with `check_tasks` all, try whether they can be solved.

        Raises:
            ConfigError: an image is unavailable and `skip_bad_tasks` is off, or no task is left; or a verifier layer
                is.
        """
        try:
            await self._layers.prepare(self._task_images)
        except (TaskBroken, ImageUnavailable) as error:
            raise ConfigError(f"verifier_layers: {error}") from error
        outcomes = await asyncio.gather(*(self._task_images.pull(item) for item in self.items), return_exceptions=True)
        refused: dict[str, str] = {}
        usable: list[Task] = []
        for item, outcome in zip(self.items, outcomes, strict=True):
            if isinstance(outcome, TaskBroken | ImageUnavailable):
                refused[item.name] = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                usable.append(outcome)
        leave_out(TaskSet(tuple(usable), refused), self.config)
        if not usable:
            raise ConfigError("tasks_path: no task's image is available; the log has the reasons")
        self.items = usable
        if self.config.check_tasks == "all":
            async with task_group() as tasks:
                for item in usable:
                    tasks.create_task(self._check_ahead(item))

    def close_files(self) -> None:
        """As `SandboxEnv`'s; also removes the verifier's layers."""
        super().close_files()
        self._layers.close()

    def build_task(self, item: Task) -> str:
        """The task's instruction, unchanged."""
        return item.instruction

    def build_agent_config(self, item: Task | None) -> AgentConfig:
        """The env's settings with the task's timeout (`agent.timeout_sec`)."""
        config = super().build_agent_config(item)
        return config if item is None else replace(config, timeout_s=item.config.agent.timeout_sec)

    async def get_next_item(self) -> Task | None:
        """As `DatasetEnv`'s, without the tasks that can't be solved here."""
        item: Task | None = await super().get_next_item()
        # The last condition: with no task left, this would go on without end. `_check` then ends the run.
        while item is not None and item.name in self.left_out and len(self.left_out) < len(self.items):
            item = await super().get_next_item()
        return item

    async def _check(self, item: Task) -> None:
        """Try whether a task's own solution solves it here, unless that is known.

        Raises:
            ItemLeftOut: it doesn't; says why.
            ConfigError: no task is left.
        """
        if item.name not in self._proofs.found:
            # As a trajectory: a slot for the solution is one that trajectories lack.
            async with self.backend.admission:
                with self.backend.awaiting_slot(f"{item.name}-oracle"):
                    await self._proofs.solve(self._task_images, item)
        reason = self._proofs.found.get(item.name)
        if reason is None:
            return
        if item.name not in self.left_out:
            self.left_out[item.name] = reason
            self.metrics.items_left_out += 1
            _log.warning("task %s is left out, since it can't be solved here: %s", item.name, reason)
        if len(self.left_out) == len(self.items):
            raise ConfigError("tasks_path: no task can be solved here; the log has the reasons")
        raise ItemLeftOut(reason)

    async def _check_ahead(self, item: Task) -> None:
        try:
            await self._check(item)
        except ItemLeftOut:
            pass
        except SandboxError as error:
            _log.info("task %s is checked when it comes up: %s", item.name, error)

    async def prepare_group(self, item: Task, group: str) -> Snapshot | None:
        """With `fork_setup`, a snapshot of the built workspace.

        Raises:
            ItemLeftOut: the task can't be solved here.
        """
        if self.config.check_tasks != "off":
            await self._check(item)
        if not self.config.fork_setup:
            return None
        return await self.frozen_workspace(group, "prepare_group", lambda: self._built(item, group))

    async def run_trajectory(self, item: Task, trajectory_id: str, member: GroupMember) -> Rollout:
        """One attempt; see `SandboxEnv.run_trajectory`."""
        attempt = self._attempts[trajectory_id] = _Attempt(member.snapshot)
        try:
            return await super().run_trajectory(item, trajectory_id, member)
        finally:
            # Each attempt has an id of its own.
            del self._attempts[trajectory_id]
            if attempt.agents_work is not None:
                await attempt.agents_work.drop()

    async def setup_trajectory_workspace(
        self,
        item: Task,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
    ) -> dict[str, object]:
        """Build the workspace, unless it is a fork."""
        if self._attempts[trajectory_id].snapshot is None:
            slot = await self._built(item, trajectory_id)
        else:
            slot = await self.executor.slot(trajectory_id)
            await workspace.enter(slot, item)
        await self._start_services(slot, item)
        await workspace.wait_until_healthy(slot, item)
        return {"task": item.name}

    async def verify_and_score_trajectory(
        self,
        item: Task,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        agent_result: AgentResult,
    ) -> tuple[float, dict[str, object]]:
        """Upload the tests, run them, and read the reward."""
        if not item.steps:
            verdict, details = await self._verdict(item, item, trajectory_id)
            return verdict.reward, details
        attempt = self._attempts[trajectory_id]
        return combined(item, attempt.verdicts), {"steps": attempt.details}

    async def act(self, agent: AtroposAgent, item: Task, task: str, trajectory_id: str) -> AgentResult:
        """The agent's work.

        The steps of a task share one workspace and one conversation; each is verified after its turns.

        Raises:
            HookError: a step could not be prepared, or its verifier gave no reward.
        """
        slot = await self.executor.slot(trajectory_id)
        guidance = await guide(slot, item)
        if not item.steps:
            return await agent.run(task + guidance)
        result: AgentResult | None = None
        attempt = self._attempts[trajectory_id]
        for step in item.steps:
            prepare = partial(self._prepare_step, item, step, trajectory_id)
            ruined: _Judged | None = await self.hooks.call("setup_trajectory_workspace", prepare, setup=True)
            if ruined is not None:
                attempt.add(step, ruined)
                break
            agent.config = replace(agent.config, timeout_s=step.config.agent.timeout_sec)
            result = await agent.run(step.instruction + guidance, after=result)
            guidance = ""
            judge = partial(self._verdict, item, step, trajectory_id)
            judged: _Judged = await self.hooks.call("verify_and_score_trajectory", judge)
            attempt.add(step, judged)
            verdict, details = judged
            # As in Harbor: a step that misses its least reward ends the task.
            if step.step is None or not passed(step.step, verdict) or "verifier_failed" in details:
                break
        assert result is not None
        return result

    async def _prepare_step(self, item: Task, step: Task, trajectory_id: str) -> _Judged | None:
        """Prepare the agent's slot for the next step, or return the step's verdict if the agent's work prevents that.

        Raises:
            VerifierError: it is impossible, and the agent is not known to be the cause.
            TaskBroken, SlotFileError: it is the first step, before which no agent has worked.
        """
        try:
            await self._begin_step(step, trajectory_id)
        except (TaskBroken, VerifierFailed, SlotFileError) as failure:
            if step is item.steps[0]:
                raise
            return await self._blamed(item, step, trajectory_id, failure)
        return None

    async def _begin_step(self, step: Task, trajectory_id: str) -> None:
        """Remove what the last verification left, and make what the step adds."""
        attempt = self._attempts[trajectory_id]
        snapshot, attempt.agents_work = attempt.agents_work, None
        if snapshot is not None:
            async with snapshot:
                # The verifier's slot, which was leased under the same id.
                await self.executor.release_trajectory(trajectory_id)
                await workspace.start_main_process(await self.executor.start_from(trajectory_id, snapshot), step)
        slot = await self.executor.slot(trajectory_id)
        if attempt.verdicts:
            await workspace.clear(slot, step)
        await workspace.prepare_step(slot, step)

    async def _verdict(self, item: Task, task: Task, trajectory_id: str) -> _Judged:
        """The verdict on a task or on one of its steps, and the details to keep.

        Raises:
            VerifierError: it gave no reward, and the agent is not known to be the cause.
        """
        slot = await self.executor.slot(trajectory_id)

        async def fresh() -> Slot:
            if item.steps and task is not item.steps[-1]:
                # The agent goes on in it with the next step, while its slot is given back for the verifier's.
                self._attempts[trajectory_id].agents_work = await slot.snapshot()
            return await self._fresh_slot(item, trajectory_id, task.verifier)

        try:
            verdict = await workspace.verify(
                slot,
                task,
                mode=self.config.verifier_mode,
                fresh=fresh,
                layers=self._layers,
                keep=self.config.keep_processes,
            )
        except VerifierFailed as failure:
            return await self._blamed(item, task, trajectory_id, failure)
        return verdict, {
            "verifier_seconds": round(verdict.seconds, 4),
            "verifier_exit_code": verdict.exit_code,
            "verifier_log": verdict.log,
            "metrics": verdict.metrics,
        }

    async def _blamed(self, item: Task, task: Task, trajectory_id: str, failure: Exception) -> _Judged:
        """The verdict where none could be reached: 0.

        Raises:
            VerifierError: the agent is not known to be the cause.
        """
        if not await self._scores_zero(item, task, trajectory_id):
            raise VerifierError(str(failure)) from failure
        _log.warning("%s scores 0: %s", trajectory_id, failure)
        self.metrics.verifier_zeros += 1
        return Verdict(0.0, None, str(failure), 0.0), {"verifier_failed": str(failure)}

    async def _scores_zero(self, item: Task, task: Task, trajectory_id: str) -> bool:
        """Whether a trajectory whose verifier gave no reward scores 0, by `verifier_failure` and by the cause."""
        if self.config.verifier_failure != "blame":
            return self.config.verifier_failure == "zero"
        if task.name not in self._unsound:  # a sound one may fail by changes outside of it
            try:
                await self._verify_untouched(item, task, trajectory_id)
            except (VerifierFailed, TaskBroken, SlotFileError):
                # Remembered: its tests need not be tried on an untouched workspace again.
                self._unsound.add(task.name)
        return task.name not in self._unsound

    async def _verify_untouched(self, item: Task, task: Task, trajectory_id: str) -> None:
        slot = await self._fresh_slot(item, trajectory_id)
        await workspace.wait_until_healthy(slot, item)
        for step in item.steps:
            await workspace.prepare_step(slot, step)
            if step is task:
                break
        fresh = partial(self._fresh_slot, item, trajectory_id, task.verifier)
        mode = "shared" if task.verifier is None else "separate"
        await workspace.verify(slot, task, mode=mode, fresh=fresh, layers=self._layers)

    async def _fresh_slot(self, item: Task, trajectory_id: str, verifier: Task | None = None) -> Slot:
        """Release the trajectory's slot, then build another: never two at once, so that verification can't deadlock."""
        await self.executor.release_trajectory(trajectory_id)
        snapshot = self._attempts[trajectory_id].snapshot
        if snapshot is not None and verifier is None:
            slot = await self.executor.start_from(trajectory_id, snapshot)
            await workspace.enter(slot, item)
        else:
            slot = await self._built(verifier or item, trajectory_id)
        await self._start_services(slot, verifier or item)
        return slot

    async def _start_services(self, slot: Slot, item: Task) -> None:
        network = self.executor.config.allow_network is not False
        await services.start(slot, item, self._task_images, network=network)

    async def _built(self, item: Task, trajectory_id: str) -> Slot:
        """The trajectory's slot with the task's workspace, size and network."""
        prepared = await self._task_images.prepare(item)
        network = False if item.offline else None
        slot = await self.executor.slot(
            trajectory_id, network=network, image=prepared.image, limits=prepared.task.limits
        )
        await workspace.enter(slot, prepared.task)
        return slot

    @property
    def _task_images(self) -> TaskImages:
        pool = self.executor.pool
        if self._images is None or self._images.pool is not pool:
            self._images = TaskImages(pool, self.config.task_images)
        return self._images


if __name__ == "__main__":
    TaskEnv.cli()
