"""An env over a folder of tasks in the Harbor layout.

    python -m atropos.envs.task_env process --env.tasks_path examples/tasks --env.tool_pool_mode local ...

The workspace is built, the agent works, its processes end, and only then are the tests uploaded and run. A verifier
that gives no reward (it timed out, was killed, or wrote none) is the task's failure and not the agent's: the group is
dropped, as Harbor records an error instead of a reward; `--env.verifier_failure zero` scores 0 instead.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from atropos.agent import AgentConfig, AgentResult
from atropos.envs.config import Names
from atropos.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atropos.envs.running.rollout import Rollout
from atropos.envs.sandbox_env import ExecTool, Member
from atropos.errors import ConfigError
from atropos.slots import Slot, Snapshot
from atropos.tasks import workspace
from atropos.tasks.carry import VerifierFailed
from atropos.tasks.folder import Task, load_tasks

_log = logging.getLogger(__name__)

STAND_INS = ("debian*", "ubuntu*", "python:3*", "buildpack-deps*", "ghcr.io/laude-institute/*")
"""Images whose place a slot's own base takes: a Debian-like system with bash, Python 3, git and a C compiler."""


class TaskEnvConfig(DatasetEnvConfig):
    """Where the tasks are and how they are verified."""

    tasks_path: str = Field(
        default="examples/tasks", min_length=1, description="folder of tasks in the Harbor layout, or one task"
    )
    task_names: Names = Field(default_factory=list[str], description="patterns of the tasks to run; empty: all")
    task_images: Names = Field(
        default_factory=lambda: list(STAND_INS),
        description="patterns of Dockerfile images that the slots' base stands in for",
    )
    verifier_mode: Literal["task", "shared", "separate"] = Field(
        default="task", description="where tests run: as task.toml says, in the agent's slot, or in a fresh one"
    )
    verifier_failure: Literal["drop", "zero"] = Field(
        default="drop", description="a verifier without a reward drops the group, or scores 0"
    )
    fork_setup: bool = Field(
        default=False, description="build a group's workspace once and fork it; pays where set-up takes long"
    )


class TaskEnv(DatasetEnv):
    """Trajectories are attempts at tasks; the score is the reward that a task's verifier writes."""

    name = "task_env"
    env_config_cls: Any = TaskEnvConfig
    config: Any

    def __init__(self, config: TaskEnvConfig, *args: Any, **kwargs: Any) -> None:
        tasks = load_tasks(config.tasks_path, config.task_names)
        _check_resources(tasks, config)
        super().__init__(config, *args, **kwargs)
        self.items: list[Task] = tasks
        self._from: dict[str, Snapshot | None] = {}

    def build_task(self, item: Task) -> str:
        """The task's instruction, as it is."""
        return item.instruction

    def build_agent_config(self, item: Task | None) -> AgentConfig:
        """The env's settings, and the task's own time (`agent.timeout_sec`)."""
        config = super().build_agent_config(item)
        return config if item is None else replace(config, timeout_s=item.config.agent.timeout_sec)

    async def prepare_group(self, item: Task, group: str) -> Snapshot | None:
        """With `fork_setup`, the built workspace, frozen; else nothing."""
        if not self.config.fork_setup:
            return None
        async with self._admission:
            try:
                slot = await self._slot(item, group)
                await self.hooks.call("prepare_group", lambda: workspace.build(slot, item), setup=True)
                return await self._frozen(group)
            finally:
                await self.executor.release_trajectory(group)

    async def run_trajectory(self, item: Task, trajectory_id: str, member: Member) -> Rollout:
        """One attempt; see `SandboxEnv.run_trajectory`."""
        self._from[trajectory_id] = member.snapshot
        try:
            return await super().run_trajectory(item, trajectory_id, member)
        finally:
            del self._from[trajectory_id]

    async def setup_trajectory_workspace(
        self,
        item: Task,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
    ) -> dict[str, Any]:
        """Build the workspace, where it wasn't forked."""
        if self._from[trajectory_id] is None:
            await workspace.build(await self._slot(item, trajectory_id), item)
        return {"task": item.name}

    async def verify_and_score_trajectory(
        self,
        item: Task,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        agent_result: AgentResult,
    ) -> tuple[float, dict[str, Any]]:
        """Upload the tests, run them, and read the reward."""

        async def fresh() -> Slot:
            return await self._fresh_slot(item, trajectory_id)

        slot: Slot = await self.executor.slot(trajectory_id)
        try:
            verdict = await workspace.verify(slot, item, mode=self.config.verifier_mode, fresh=fresh)
        except VerifierFailed as failure:
            if self.config.verifier_failure == "drop":
                raise
            _log.warning("%s scores 0: %s", trajectory_id, failure)
            return 0.0, {"verifier_failed": str(failure)}
        return verdict.reward, {
            "verifier_seconds": round(verdict.seconds, 4),
            "verifier_exit_code": verdict.exit_code,
            "verifier_log": verdict.log,
            "metrics": verdict.metrics,
        }

    async def _fresh_slot(self, item: Task, trajectory_id: str) -> Slot:
        """The trajectory's slot is given back and another one built: never two at once, so verifying can't deadlock."""
        await self.executor.release_trajectory(trajectory_id)
        snapshot = self._from[trajectory_id]
        if snapshot is not None:
            return await self.executor.start_from(trajectory_id, snapshot)
        slot = await self._slot(item, trajectory_id)
        await workspace.build(slot, item)
        return slot

    async def _slot(self, item: Task, trajectory_id: str) -> Slot:
        """A slot with no more network than the task allows."""
        network = None if item.config.environment.allow_internet else False
        slot: Slot = await self.executor.slot(trajectory_id, network=network)
        return slot


def _check_resources(tasks: list[Task], config: TaskEnvConfig) -> None:
    """Refuse what the slots don't give, and give no network where no task wants it.

    Raises:
        ConfigError: a task asks for more; names the task, its field and the flag to change.
    """
    for task in tasks:
        problems = task.unmet(
            memory_mib=config.slot_memory_mib,
            disk_mib=config.slot_disk_mib,
            cpus=config.slot_cpu_quota,
            images=config.task_images,
        )
        if problems:
            raise ConfigError(f"{task.path / 'task.toml'}: {problems[0]}")
    closed = [task for task in tasks if not task.config.environment.allow_internet]
    if config.allow_network and len(closed) == len(tasks):
        config.allow_network = False
    elif config.allow_network and closed and config.fork_setup:
        raise ConfigError(
            f"{closed[0].path / 'task.toml'}: environment.allow_internet is false and other tasks' is true, which "
            "fork_setup can't tell apart; set --env.allow_network false, or leave --env.fork_setup"
        )


if __name__ == "__main__":
    TaskEnv.cli()
