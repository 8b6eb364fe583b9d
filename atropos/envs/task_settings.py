"""Settings of `TaskEnv`, and the tasks that they name and slots can hold."""

from __future__ import annotations

import logging
import os
from typing import Literal

from pydantic import Field

from atropos.envs.config import Names
from atropos.envs.dataset_env import DatasetEnvConfig
from atropos.errors import ConfigError
from atropos.tasks.fit import STAND_INS, Policy, Room, fit, largest_on_disk
from atropos.tasks.folder import TaskSet, read_folders, read_tasks
from atropos.tasks.format.datasets import dataset_folders
from atropos.tasks.format.task import Task
from atropos.tasks.verifier.mode import Mode
from atropos.tasks.verifier.services import Keep

_log = logging.getLogger(__name__)


class TaskEnvConfig(DatasetEnvConfig):
    """Where the tasks are and how they are verified."""

    tasks_path: str = Field(
        default="examples/tasks", min_length=1, description="folder of tasks in the Harbor layout, or one task"
    )
    dataset: str | None = Field(
        default=None, description="NAME@VERSION of dataset_path's registry.json, or NAME of its dataset.toml"
    )
    dataset_path: str | None = Field(
        default=None, description="local clone that holds the dataset; replaces tasks_path"
    )
    task_names: Names = Field(default_factory=list[str], description="patterns of the tasks to run; empty: all")
    task_images: Names = Field(
        default_factory=lambda: list(STAND_INS),
        description="patterns of images that the slots' base stands in for; all others are pulled",
    )
    skip_bad_tasks: bool = Field(
        default=False, description="leave out unusable tasks with a warning each, instead of ending"
    )
    task_limits: Policy = Field(
        default="old",
        description="tasks larger than slots: `old` lowers sizes that old schemas wrote out as defaults and refuses "
        "the rest, `clamp` lowers all, `refuse` none",
    )
    task_variables: Names = Field(
        default_factory=list[str], description="variables of this process that ${NAME} in task files may stand for"
    )
    verifier_mode: Literal["task"] | Mode = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="task",
        description="where tests run: as each task says or needs, in a view, in the agent's slot, or in a fresh one",
    )
    keep_processes: Literal["task"] | Keep = Field(
        default="task",
        description="the agent's processes that are left when tests run: as each task says, those that listen, all, or "
        "none",
    )
    verifier_failure: Literal["blame", "drop", "zero"] = Field(
        default="blame",
        description="a verifier without a reward: 0 where it gives one on the untouched workspace, else dropped; or "
        "drop, zero",
    )
    verifier_layers: Names = Field(
        default_factory=list[str],
        description="images or Dockerfiles whose files are laid over the machine where tests run, unseen by the agent",
    )
    check_tasks: Literal["first", "all", "off"] = Field(
        default="first",
        description="leave out tasks that their own solutions don't solve here, tried when each first comes up, or all "
        "at the start; or off",
    )
    fork_setup: bool = Field(
        default=False, description="build a group's workspace once and fork it; pays where set-up takes long"
    )


def usable_tasks(config: TaskEnvConfig) -> list[Task]:
    """The tasks that fit the slots; all others are reported together.

    Raises:
        ConfigError: some task is unusable and `skip_bad_tasks` is off, or none is left.
    """
    read, room = _read(config), Room.of(config.pool_config())
    fits = {task.name: fit(task, room, images=config.task_images, policy=config.task_limits) for task in read.tasks}
    misfits = {
        task.name: f"{task.path / 'task.toml'}: {'; '.join(fits[task.name].refused)}"
        for task in read.tasks
        if fits[task.name].refused
    }
    chosen = TaskSet(tuple(task for task in read.tasks if task.name not in misfits), {**read.refused, **misfits})
    leave_out(chosen, config)
    if not chosen.tasks:
        raise ConfigError(f"tasks_path: none of {len(chosen.refused)} tasks can be used; see the log for each")
    clamped = [f"{task.name}: {text}" for task in chosen.tasks for text in fits[task.name].clamped]
    for text in clamped:
        _log.warning("task limit lowered: %s", text)
    for task in chosen.tasks:
        for text in task.warnings:
            _log.warning("%s: %s", task.path / "task.toml", text)
    _log.info("%d tasks, %d left out, %d limits lowered", len(chosen.tasks), len(chosen.refused), len(clamped))
    tasks = [fits[task.name].sized(task) for task in chosen.tasks]
    config.largest_disk_mib = config.largest_disk_mib or largest_on_disk(tasks, room)
    _allow_waiting(tasks, config)
    return tasks


def _read(config: TaskEnvConfig) -> TaskSet:
    variables = {name: os.environ[name] for name in config.task_variables if name in os.environ}
    architecture = config.pool_config().built_for
    if config.dataset is None:
        return read_tasks(config.tasks_path, config.task_names, variables=variables, architecture=architecture)
    folders = dataset_folders(config.dataset_path or ".", config.dataset, config.task_names)
    return read_folders(folders, variables=variables, architecture=architecture)


def leave_out(tasks: TaskSet, config: TaskEnvConfig) -> None:
    """Log which tasks were refused.

    Raises:
        ConfigError: some were, and `skip_bad_tasks` is off.
    """
    if not config.skip_bad_tasks:
        tasks.check()
    for name, reason in tasks.refused.items():
        _log.warning("task %s is left out: %s", name, reason)


def _allow_waiting(tasks: list[Task], config: TaskEnvConfig) -> None:
    """Raise `acquire_timeout_s` for tasks of several sizes, whose leases wait for the env's own trajectories."""
    if not any(one.limits for task in tasks for one in (task, *task.verifiers)):
        return
    longest = max(task.seconds for task in tasks)
    if longest > config.acquire_timeout_s:
        _log.info("tasks of several sizes: acquire_timeout_s is %g s, as long as the longest of them", longest)
        config.acquire_timeout_s = longest
