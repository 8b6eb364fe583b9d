"""Task folders, read and checked: Harbor's layout, and terminal-bench 1's.

A Harbor task is a folder with task.toml, instruction.md, environment/, tests/test.sh and, optionally,
solution/solve.sh. What can't be honoured by a slot is refused by name, never ignored; keys that the format doesn't
have are listed as warnings.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from atropos.errors import ConfigError
from atropos.tasks import dockerfile
from atropos.tasks.archive import Context
from atropos.tasks.compose import COMPOSE_FILES, read_compose
from atropos.tasks.config import AgentSection, Artifact, StepSection, TaskConfig, VerifierSection
from atropos.tasks.recipe import DEFAULT_WORKDIR, Copy, Folder, Recipe, Run, Step, StepSettings
from atropos.wire import ImageInfo, ImageState, LeaseLimits

if TYPE_CHECKING:
    from atropos.slots import SlotPool

SETUP = "setup.sh"
_MARKS = ("task.toml", "task.yaml", "instruction.md")
"""A folder with none of these is not a task."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


Hosts = tuple[str, ...] | None
"""What a phase may reach of what the pool allows; None: all of it."""


@dataclass(frozen=True)
class Task:
    """One checked task folder, or one step of a task of several.

    Attributes:
        name: the folder's name; the item's id everywhere.
        context: the folder that the recipe copies from.
        recipe: how the workspace is made.
        tests: folders whose content goes to /tests, later ones over earlier ones; single files as they are.
        solution: the folder that goes to /solution, None without one.
        warnings: keys of task.toml that the format doesn't have.
        steps: of a task of several: each a task with the same workspace, in order.
        files: of a step: what is copied into the workspace before it.
        scoring: what the reward is read from.
        limits: what its leases ask for instead of the pool's limits.
    """

    name: str
    path: Path
    instruction: str
    config: TaskConfig
    context: Path
    recipe: Recipe
    tests: tuple[Path, ...]
    solution: Path | None
    warnings: tuple[str, ...] = ()
    steps: tuple[Task, ...] = ()
    files: Path | None = None
    step: StepSection | None = None
    scoring: Literal["reward", "pytest"] = "reward"
    test_script: str = "test.sh"
    solution_script: str = "solve.sh"
    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    limits: LeaseLimits | None = None

    @property
    def image(self) -> str | None:
        """What the task is written for."""
        return self.config.environment.docker_image or self.recipe.image

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """What a separate verifier gets to see: the paths that task.toml names, else the working folder."""
        named = (*self.config.artifacts, *(self.step.artifacts if self.step else ()))
        always = Artifact(source="/logs/artifacts")
        return (
            (*(named or (Artifact(source=self.recipe.workdir),)), always)
            if named or self.recipe.workdir != "/"
            else (always,)
        )

    @property
    def agent_hosts(self) -> Hosts:
        """What the agent may reach."""
        return self._hosts(self.config.agent)

    @property
    def verifier_hosts(self) -> Hosts:
        """What the tests may reach."""
        return self._hosts(self.config.verifier)

    def _hosts(self, phase: AgentSection | VerifierSection) -> Hosts:
        chosen = phase if phase.network_mode is not None else self.config.environment
        if chosen.network_mode == "public":
            return None
        return chosen.allowed_hosts if chosen.network_mode == "allowlist" else ()

    @property
    def offline(self) -> bool:
        """Whether no phase has a network; the build has one all the same."""
        return all(one.agent_hosts == one.verifier_hosts == () for one in self.steps or (self,))

    @property
    def agent_settings(self) -> StepSettings:
        """What the agent's commands start with."""
        return self._settings(self.config.agent.user, {})

    @property
    def verifier_settings(self) -> StepSettings:
        """What the tests start with."""
        return self._settings(self.config.verifier.user, self.config.verifier.env)

    def _settings(self, user: str | int | None, env: Mapping[str, str]) -> StepSettings:
        base = self.recipe.settings
        added = self.filled({**self.config.environment.env, **env})
        return StepSettings(base.workdir, {**base.env, **added}, base.user if user is None else _plain_user(str(user)))

    async def build(self, pool: SlotPool, progress: Callable[[ImageState], None]) -> ImageInfo:
        """For `SlotPool.prepare`: as `TaskImages.build`, with its defaults.

        Raises:
            TaskBroken: an image can't be had, or a step failed; says which, with the last lines of its output.
        """
        from atropos.tasks.prepare import TaskImages

        return await TaskImages(pool).build(self, progress)

    def filled(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables with `${NAME}` and `${NAME:-default}` replaced by what the operator gives."""

        def one(match: re.Match[str]) -> str:
            return self.variables.get(match[1], match[2] or "")

        return {name: _VARIABLE.sub(one, value) for name, value in env.items()}


def _plain_user(user: str) -> str | None:
    return None if user in {"", "0", "root"} else user


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


def read_tasks(path: str | Path, names: Sequence[str] = (), *, variables: Mapping[str, str] | None = None) -> TaskSet:
    """All tasks of a folder (or the one task that it is), by name; none of them stops the others.

    Args:
        path: a folder of task folders, or one task folder.
        names: patterns (`git-*`); only tasks that match one are loaded. Empty: all.
        variables: what `${NAME}` in task files may stand for.

    Raises:
        ConfigError: no such folder, no task in it, or a pattern without a match.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"tasks_path: {root} is not a folder; give a folder of tasks in the Harbor layout")
    folders = [root] if _is_task(root) else sorted(p for p in root.iterdir() if p.is_dir() and _is_task(p))
    for pattern in names:
        if not any(fnmatch.fnmatch(folder.name, pattern) for folder in folders):
            raise ConfigError(f"task_names: no task in {root} matches {pattern!r}")
    chosen = [f for f in folders if not names or any(fnmatch.fnmatch(f.name, pattern) for pattern in names)]
    if not chosen:
        raise ConfigError(f"tasks_path: {root} holds no task; a task is a folder with task.toml and instruction.md")
    return read_folders(chosen, variables=variables)


def read_folders(folders: Sequence[Path], *, variables: Mapping[str, str] | None = None) -> TaskSet:
    """The tasks that these folders are."""
    tasks: list[Task] = []
    refused: dict[str, str] = {}
    for folder in folders:
        try:
            tasks.append(load_task(folder, variables=variables))
        except ConfigError as error:
            refused[folder.name] = str(error)
    return TaskSet(tuple(tasks), refused)


def load_tasks(path: str | Path, names: Sequence[str] = ()) -> list[Task]:
    """As `read_tasks`, where every task must be usable.

    Raises:
        ConfigError: as `read_tasks`, or names every task that can't be used.
    """
    found = read_tasks(path, names)
    found.check()
    return list(found.tasks)


def _is_task(path: Path) -> bool:
    return not path.name.startswith((".", "_")) and any((path / mark).is_file() for mark in _MARKS)


def load_task(
    path: str | Path,
    *,
    variables: Mapping[str, str] | None = None,
    images: Mapping[str, StepSettings] | None = None,
    prebuilt: bool = False,
) -> Task:
    """One task folder, checked; or a Dockerfile alone, as a task with a workspace and nothing else.

    Args:
        path: the folder, or the Dockerfile, whose folder is the build context.
        variables: what `${NAME}` in its files may stand for.
        images: what the images it names set, where that is known.
        prebuilt: `docker_image` is used, and not the Dockerfile beside it.

    Raises:
        ConfigError: names the file, the field and the cure.
    """
    root = Path(path).resolve()
    if root.is_file():
        recipe = dockerfile.parse(root, images)
        alone = Task(root.parent.name, root, "", TaskConfig(), root.parent, recipe, tests=(), solution=None)
        return _with_sources(alone)
    if (root / "task.yaml").is_file() and not (root / "task.toml").exists():
        from atropos.tasks.terminal_bench import load_terminal_bench

        return load_terminal_bench(root, images)
    return _with_sources(_harbor_task(root, variables or {}, images or {}, prebuilt=prebuilt))


def _with_sources(task: Task) -> Task:
    """The task, once everything that it copies is there."""
    context = Context.of(task.context)
    for step in task.recipe.steps:
        if isinstance(step, Copy) and step.stage is None:
            for source in step.sources:
                context.sources(source, step.exclude)
    return task


def _harbor_task(
    root: Path, variables: Mapping[str, str], images: Mapping[str, StepSettings], *, prebuilt: bool
) -> Task:
    config = read_config(root / "task.toml")
    environment = root / "environment"
    if not environment.is_dir():
        raise ConfigError(f"{environment}: is missing; put the workspace's files there (it may be empty)")
    tests = root / "tests"
    if not config.steps:
        instruction = read_instruction(root / "instruction.md")
        check_script(tests / "test.sh")
    else:
        instruction = "\n\n".join(read_instruction(root / "steps" / s.name / "instruction.md") for s in config.steps)
    if (tests / "Dockerfile").is_file() or config.verifier.environment is not None:
        field_name = (
            tests / "Dockerfile" if (tests / "Dockerfile").is_file() else f"{root / 'task.toml'}: verifier.environment"
        )
        raise ConfigError(f"{field_name}: a verifier's own image can't be honoured; remove it")
    recipe, config = _recipe(environment, config, images, prebuilt=prebuilt)
    solution = root / "solution"
    task = Task(
        name=root.name,
        path=root,
        instruction=instruction,
        config=config,
        context=environment,
        recipe=recipe,
        tests=(tests,),
        solution=solution if (solution / "solve.sh").is_file() else None,
        warnings=tuple(f"{name} is not a field of the format; it is ignored" for name in config.unknown()),
        variables=variables,
    )
    _check_variables(task)
    return replace(task, steps=tuple(_step(task, section) for section in config.steps))


def _step(task: Task, section: StepSection) -> Task:
    folder = task.path / "steps" / section.name
    tests = tuple(path for path in (task.path / "tests", folder / "tests") if path.is_dir())
    scripts = [path / "test.sh" for path in tests if (path / "test.sh").is_file()]
    check_script(scripts[-1] if scripts else folder / "tests" / "test.sh")
    agent = task.config.agent.model_copy(update=section.agent.model_dump(exclude_unset=True))
    solution = folder / "solution"
    return replace(
        task,
        name=f"{task.name}/{section.name}",
        instruction=read_instruction(folder / "instruction.md"),
        config=task.config.model_copy(update={"agent": agent, "verifier": section.verifier or task.config.verifier}),
        tests=tests,
        solution=solution if (solution / "solve.sh").is_file() else None,
        files=folder / "workdir" if (folder / "workdir").is_dir() else None,
        step=section,
    )


def _check_variables(task: Task) -> None:
    tables = {
        "environment.env": task.config.environment.env,
        "verifier.env": task.config.verifier.env,
        "solution.env": task.config.solution.env,
    }
    for table, env in tables.items():
        for name, value in env.items():
            for match in _VARIABLE.finditer(value):
                if match[2] is None and match[1] not in task.variables:
                    raise ConfigError(
                        f"{task.path / 'task.toml'}: {table}.{name}: ${{{match[1]}}} is not given to tasks; "
                        "list it in task_variables, or write a default"
                    )


# -------------------------------------------------------------------------------------------------------------- parts


def read_text(path: Path, cure: str) -> str:
    """A text file.

    Raises:
        ConfigError: it is missing or can't be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; {cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None


def read_instruction(path: Path) -> str:
    """The prompt.

    Raises:
        ConfigError: there is none.
    """
    text = read_text(path, "say there what the agent is to do").strip()
    if not text:
        raise ConfigError(f"{path}: is empty; say there what the agent is to do")
    return text


def check_script(path: Path) -> None:
    """Refuse a verifier without a script.

    Raises:
        ConfigError: it is missing or empty.
    """
    if not read_text(path, "the verifier writes /logs/verifier/reward.txt").strip():
        raise ConfigError(f"{path}: is empty; the verifier writes /logs/verifier/reward.txt")


def read_config(path: Path) -> TaskConfig:
    """task.toml.

    Raises:
        ConfigError: it can't be read, or holds what no slot can honour.
    """
    try:
        raw = tomllib.loads(read_text(path, 'the smallest one is the line version = "1.0"'))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    return checked_config(path, raw)


def checked_config(path: Path, raw: Mapping[str, Any]) -> TaskConfig:
    """A parsed task.toml.

    Raises:
        ConfigError: as `read_config`.
    """
    try:
        config = TaskConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path}: {name}: {first['msg']} (it is {first['input']!r:.200})".replace("\n", " ")
        ) from None
    refused = next(config.refusals(), None)
    if refused is not None:
        raise ConfigError(f"{path}: {refused}")
    return config


def _recipe(
    environment: Path, config: TaskConfig, images: Mapping[str, StepSettings], *, prebuilt: bool
) -> tuple[Recipe, TaskConfig]:
    """The recipe, and the configuration with what a compose file adds to it."""
    script, own = environment / SETUP, environment / "Dockerfile"
    compose = next((environment / name for name in COMPOSE_FILES if (environment / name).exists()), None)
    adjust: Callable[[Recipe], Recipe] = lambda recipe: recipe  # noqa: E731
    if compose is not None:
        service = read_compose(compose, context=environment)
        own, adjust = service.dockerfile or own, service.applied
        changes = {"network_mode": "no-network"} if service.offline else {}
        if service.image is not None and config.environment.docker_image is None:
            changes["docker_image"] = service.image
        config = config.model_copy(update={"environment": config.environment.model_copy(update=changes)})
    image = config.environment.docker_image if prebuilt else None
    if own.is_file() and image is None:
        recipe = adjust(dockerfile.parse(own, images))
        if SETUP in own.read_text(encoding="utf-8"):
            script = environment / "none"  # the Dockerfile deals with it
        steps = list(recipe.steps)
        if config.environment.workdir:
            recipe = replace(recipe, settings=replace(recipe.settings, workdir=config.environment.workdir))
            steps.append(Folder(recipe.workdir, recipe.settings.user))
    else:
        start = StepSettings(DEFAULT_WORKDIR) if image is None else images.get(image, StepSettings())
        start = replace(start, workdir=config.environment.workdir or start.workdir)
        recipe = adjust(Recipe(image, start, ()))
        steps = list[Step]([Folder(recipe.workdir, recipe.settings.user)])
        if image is not None and (own.is_file() or compose is not None):
            script = environment / "none"  # the image was made with all that is here
        else:
            left_out = {SETUP, *COMPOSE_FILES}
            files = sorted(path.name for path in environment.iterdir() if path.name not in left_out)
            if files:
                steps.append(Copy(tuple(files), recipe.workdir.rstrip("/") + "/", whole=True))
    if script.is_file():
        # The script itself is no part of the workspace.
        run = Run("bash /tmp/.task-setup/setup.sh && rm -rf /tmp/.task-setup", replace(recipe.settings, user=None))
        steps += [Copy((SETUP,), "/tmp/.task-setup/"), run]
    return replace(recipe, steps=tuple(steps)), config
