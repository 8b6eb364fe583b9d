"""Task folders, read and checked: Harbor's layout, and terminal-bench 1's.

A Harbor task is a folder with task.toml, instruction.md, environment/, tests/test.sh and, optionally,
solution/solve.sh. What can't be honoured by a slot is refused by name, never ignored; keys that the format doesn't
have are listed as warnings.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atropos.errors import ConfigError
from atropos.images.manifests import MACHINE
from atropos.tasks.builder.archive import check_copy, check_folder
from atropos.tasks.format import dockerfile
from atropos.tasks.format.config import TaskConfig
from atropos.tasks.format.harbor import load_harbor_task
from atropos.tasks.format.recipe import BuildInputs, Recipe, copies
from atropos.tasks.format.task import Task
from atropos.tasks.format.terminal_bench import load_terminal_bench
from atropos.tasks.prepare import build_task

_MARKS = ("task.toml", "task.yaml", "instruction.md")
"""A folder with none of these is not a task."""
_PARTS = (
    *("instruction.md", "environment", "tests", "solution", "workdir"),
    *("task.yaml", "run-tests.sh", "solution.sh"),  # terminal-bench's
)
"""What a task's folder, or a step's, has that the model or a slot is given."""


@dataclass(frozen=True)
class TaskSet:
    """The tasks of a folder, and what kept others out.

    Attributes:
        refused: reason by task name; one line each.
    """

    tasks: tuple[Task, ...]
    refused: Mapping[str, str]

    def check(self) -> None:
        """Raise when a task was refused.

        Raises:
            ConfigError: names every refused task with its reason.
        """
        if self.refused:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in self.refused.items())
            total = len(self.tasks) + len(self.refused)
            raise ConfigError(f"{len(self.refused)} of {total} tasks can't be used:\n{lines}")


def read_tasks(
    path: str | Path,
    names: Sequence[str] = (),
    *,
    variables: Mapping[str, str] | None = None,
    architecture: str = MACHINE,
) -> TaskSet:
    """All tasks of a folder (or the one task that it is), by name; none of them stops the others.

    Args:
        path: a folder of task folders, or one task folder.
        names: patterns (`git-*`); only tasks that match one are loaded. Empty: all.
        variables: what `${NAME}` in task files may stand for.
        architecture: the one that slots have, as images name it.

    Raises:
        ConfigError: no such folder, no task in it, or a pattern without a match.
    """
    return read_folders(task_folders(path, names), variables=variables, architecture=architecture)


def task_folders(path: str | Path, names: Sequence[str] = ()) -> list[Path]:
    """The folders that `read_tasks` reads.

    Raises:
        ConfigError: as `read_tasks`.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"tasks_path: {root} is not a folder; give a folder of tasks in the Harbor layout")
    root = Path(os.path.abspath(root))  # a link keeps its own name
    folders = [root] if is_task(root) else sorted(p for p in root.iterdir() if p.is_dir() and is_task(p))
    for pattern in names:
        if not any(fnmatch.fnmatch(folder.name, pattern) for folder in folders):
            raise ConfigError(f"task_names: no task in {root} matches {pattern!r}")
    chosen = [f for f in folders if not names or any(fnmatch.fnmatch(f.name, pattern) for pattern in names)]
    if not chosen:
        raise ConfigError(f"tasks_path: {root} holds no task; a task is a folder with task.toml and instruction.md")
    return chosen


def read_folders(
    folders: Sequence[Path], *, variables: Mapping[str, str] | None = None, architecture: str = MACHINE
) -> TaskSet:
    """The tasks that these folders are; a folder that is named twice is one. Arguments as `read_tasks`.

    Raises:
        ConfigError: two have one name, which is a task's id.
    """
    tasks: list[Task] = []
    refused: dict[str, str] = {}
    folders = list(dict.fromkeys(folders))
    seen: dict[str, Path] = {}
    for folder in folders:
        other = seen.setdefault(folder.name, folder)
        if other is not folder:
            raise ConfigError(f"{other} and {folder} have the same name; rename one, or load one set at a time")
    for folder in folders:
        try:
            tasks.append(load_task(folder, variables=variables, architecture=architecture))
        except ConfigError as error:
            refused[folder.name] = str(error)
    return TaskSet(tuple(tasks), refused)


def is_task(path: Path) -> bool:
    """Whether a path is a task's folder, if perhaps an incomplete one."""
    if path.name.startswith((".", "_")):
        return False
    return any(os.path.isfile(path / mark) for mark in _MARKS)  # such as lost+found, which may not be read


def load_task(path: str | Path, *, variables: Mapping[str, str] | None = None, architecture: str = MACHINE) -> Task:
    """One task folder, checked; or a Dockerfile alone, as a task with a workspace and nothing else.

    Args:
        path: the folder, or the Dockerfile, whose folder is the build context.
        variables: what `${NAME}` in its files may stand for.
        architecture: the one that slots have, as images name it.

    Raises:
        ConfigError: names the file, the field and the cure.
    """
    root = Path(os.path.abspath(path))  # a link keeps its own name
    try:
        images = BuildInputs(architecture=architecture)
        return _checked(_loaded(root, variables or {}, images), images)
    except ConfigError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError) as error:  # names too long, no permission, 400 digits
        raise ConfigError(f"{root}: can't be read: {error}".replace("\n", " ")) from error


def _loaded(root: Path, variables: Mapping[str, str], images: BuildInputs) -> Task:
    if root.is_file():
        return _dockerfile_task(root, images)
    _check_links(root)
    if (root / "task.yaml").is_file() and not (root / "task.toml").exists():
        return load_terminal_bench(root, build_task, images)
    return load_harbor_task(root, variables, build_task, images)


def _check_links(root: Path) -> None:
    """Refuse a task whose links lead out of its folder, as another's task could name files of the host."""
    top = root.resolve()
    for path in (folder / name for folder in (root, *root.glob("steps/*")) for name in _PARTS):
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(top):
            raise ConfigError(f"{path}: leads to {target}, outside the task's folder; copy it to there")


def _dockerfile_task(path: Path, images: BuildInputs) -> Task:
    def make(images: BuildInputs, *, prebuilt: bool) -> Recipe:
        del prebuilt  # there is no `docker_image`
        return dockerfile.parse(path, path.parent, images)

    return Task(
        name=path.parent.name,
        path=path,
        instruction="",
        config=TaskConfig(),
        context=path.parent,
        recipe=make(images, prebuilt=False),
        tests=(),
        solution=None,
        make=make,
        builder=build_task,
    )


def _checked(task: Task, images: BuildInputs) -> Task:
    """The task, once its folders hold only what slots can be given, and its machines the files that they copy."""
    for each in (task, *task.steps):
        for folder in (*each.tests, each.solution, each.files):
            if folder is not None:
                check_folder(folder)
    for volume in (volume for each in (task, *task.beside) if each.service for volume in each.service.volumes):
        if volume.source is not None and volume.source.is_dir():
            check_folder(volume.source)
    beside = tuple(_with_sources(each, images) for each in task.beside)
    steps = tuple(
        replace(step, verifier=step.verifier and _with_sources(step.verifier, images), beside=beside)
        for step in task.steps
    )
    verifier = task.verifier and _with_sources(task.verifier, images)
    return _with_sources(replace(task, steps=steps, verifier=verifier, beside=beside), images)


def _with_sources(machine: Task, images: BuildInputs) -> Task:
    """A machine that has the files that it copies; without them, one that serves as its `docker_image` alone.

    Raises:
        ConfigError: a file is missing, and no image is named.
    """
    recipe = machine.recipe
    try:
        context = machine.build_context
        for step in (*recipe.steps, *(step for stage in recipe.stages for step in stage.steps)):
            for copy in copies(step):
                if copy.stage is None:
                    check_copy(context, copy)
    except ConfigError as error:
        if machine.config.environment.docker_image is None:
            raise
        return replace(machine.on(images, prebuilt=True), unbuildable=str(error))
    return machine
