"""Task folders in the Harbor layout: read and checked.

A task is a folder with task.toml, instruction.md, environment/, tests/test.sh and, optionally, solution/solve.sh. What
stands in task.toml and can't be honoured by a slot is refused by name, never ignored.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from atropos.errors import ConfigError
from atropos.tasks import dockerfile
from atropos.tasks.archive import sources
from atropos.tasks.dockerfile import Copy, Recipe, Run

SETUP = "setup.sh"
_REFUSED_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", ".dockerignore")
_REFUSED_TABLES = {
    "steps": "a task of several steps",
    "multi_step_reward_strategy": "a task of several steps",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a health check; wait in setup.sh instead",
    "environment.skills_dir": "skills",
    "environment.env": "variables for the agent's commands; write them to a file that the instruction names",
    "environment.tpu": "TPUs",
    "environment.gpu_types": "GPUs",
    "agent.user": "another user for the agent: a slot runs as its own root",
    "verifier.user": "another user for the verifier: use `su` or `setpriv` in tests/test.sh",
    "verifier.environment": "an environment of the verifier's own",
    "verifier.collect": "collect hooks; copy in tests/test.sh instead",
}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class VerifierSection(_Section):
    """`[verifier]`. `separate`: a fresh slot that gets only the artifacts, so nothing else the agent did counts."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] = "shared"


class AgentSection(_Section):
    """`[agent]`. None: the environment's own bounds alone."""

    timeout_sec: float | None = Field(default=None, gt=0)


class EnvironmentSection(_Section):
    """`[environment]`. Sizes in MiB, as Harbor's `_mb` mean them; None: whatever a slot has."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: int | None = Field(default=None, gt=0, validation_alias=AliasChoices("storage_mb", "storage"))
    gpus: Literal[0] = 0
    allow_internet: bool = True
    workdir: str | None = Field(default=None, pattern=r"^/")

    @field_validator("memory_mb", "storage_mb", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        """Harbor's older spelling: `memory = "2G"`."""
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*([KMGT])i?B?", value.strip(), re.IGNORECASE)):
            return max(1, int(int(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()]))
        return value


class SolutionSection(_Section):
    """`[solution]`."""

    env: dict[str, str] = Field(default_factory=dict)


class TaskConfig(_Section):
    """task.toml. `metadata` and `task` are free-form and only carried along."""

    version: str = Field(default="1.0", validation_alias=AliasChoices("version", "schema_version"))
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    source: str | None = None
    artifacts: tuple[str, ...] = ()
    verifier: VerifierSection = VerifierSection()
    agent: AgentSection = AgentSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()

    @field_validator("artifacts")
    @classmethod
    def _absolute(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not path.startswith("/"):
                raise ValueError(f"{path!r} is not an absolute path in the slot")
        return value


@dataclass(frozen=True)
class Task:
    """One checked task folder.

    Attributes:
        name: the folder's name; the item's id everywhere.
        recipe: how the workspace is made.
        solution: text of solution/solve.sh, None without one.
    """

    name: str
    path: Path
    instruction: str
    config: TaskConfig
    recipe: Recipe
    solution: str | None

    @property
    def artifacts(self) -> tuple[str, ...]:
        """What a separate verifier gets to see: the paths that task.toml names, else the working folder."""
        return self.config.artifacts or (self.recipe.workdir,)

    def unmet(self, *, memory_mib: int, disk_mib: int, cpus: float | None, images: Sequence[str]) -> list[str]:
        """What this task asks for and a slot doesn't give, each as `field: reason; cure`."""
        wants, problems = self.config.environment, list[str]()
        if wants.memory_mb is not None and wants.memory_mb > memory_mib:
            problems.append(
                f"environment.memory_mb: {wants.memory_mb} wanted, slots have {memory_mib}; raise slot_memory_mib"
            )
        if wants.storage_mb is not None and wants.storage_mb > disk_mib:
            problems.append(
                f"environment.storage_mb: {wants.storage_mb} wanted, slots have {disk_mib}; raise slot_disk_mib"
            )
        if wants.cpus is not None and cpus is not None and wants.cpus > cpus:
            problems.append(f"environment.cpus: {wants.cpus:g} wanted, slots have {cpus:g}; raise slot_cpu_quota")
        image = wants.docker_image or self.recipe.image
        if image is not None and not any(fnmatch.fnmatch(image, pattern) for pattern in images):
            field = "environment.docker_image" if wants.docker_image else "FROM"
            problems.append(f"{field}: no base stands in for {image!r}; name it in task_images")
        return problems


def load_tasks(path: str | Path, names: Sequence[str] = ()) -> list[Task]:
    """All tasks of a folder (or the one task that it is), by name.

    Args:
        path: a folder of task folders, or one task folder.
        names: patterns (`git-*`); only tasks that match one are loaded. Empty: all.

    Raises:
        ConfigError: no such folder, no task in it, a pattern without a match, or a task that can't be used.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"tasks_path: {root} is not a folder; give a folder of tasks in the Harbor layout")
    folders = [root] if (root / "task.toml").is_file() else sorted(p for p in root.iterdir() if _may_be_task(p))
    for pattern in names:
        if not any(fnmatch.fnmatch(folder.name, pattern) for folder in folders):
            raise ConfigError(f"task_names: no task in {root} matches {pattern!r}")
    chosen = [f for f in folders if not names or any(fnmatch.fnmatch(f.name, pattern) for pattern in names)]
    if not chosen:
        raise ConfigError(f"tasks_path: {root} holds no task; a task is a folder with task.toml and instruction.md")
    return [load_task(folder) for folder in chosen]


def _may_be_task(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith((".", "_"))


def load_task(path: str | Path) -> Task:
    """One task folder, checked.

    Raises:
        ConfigError: names the file, the field and the cure.
    """
    root = Path(path).resolve()
    config = _config(root / "task.toml")
    instruction = _text(root / "instruction.md", "say there what the agent is to do").strip()
    if not instruction:
        raise ConfigError(f"{root / 'instruction.md'}: is empty; say there what the agent is to do")
    if not (root / "environment").is_dir():
        raise ConfigError(f"{root / 'environment'}: is missing; put the workspace's files there (it may be empty)")
    script = _text(root / "tests" / "test.sh", "the verifier writes /logs/verifier/reward.txt")
    if not script.strip():
        raise ConfigError(f"{root / 'tests' / 'test.sh'}: is empty; the verifier writes /logs/verifier/reward.txt")
    solution = root / "solution" / "solve.sh"
    task = Task(
        name=root.name,
        path=root,
        instruction=instruction,
        config=config,
        recipe=_recipe(root / "environment", config),
        solution=_text(solution, "") if solution.is_file() else None,
    )
    for step in task.recipe.steps:
        if isinstance(step, Copy):
            for source in step.sources:
                sources(root / "environment", source)
    return task


def _text(path: Path, cure: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; {cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None


def _config(path: Path) -> TaskConfig:
    try:
        raw = tomllib.loads(_text(path, 'the smallest one is the line version = "1.0"'))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    for dotted, what in _REFUSED_TABLES.items():
        value: Any = raw
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            raise ConfigError(f"{path}: {dotted}: a slot can't honour {what}; remove it")
    for table in ("environment", "agent", "verifier"):  # empty forms of refused fields say nothing
        section: Any = raw.get(table)
        if isinstance(section, dict):
            raw[table] = {k: v for k, v in section.items() if v or f"{table}.{k}" not in _REFUSED_TABLES}
    try:
        return TaskConfig.model_validate(raw)
    except ValidationError as error:
        _refuse(path, error)


def _refuse(path: Path, error: ValidationError) -> NoReturn:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        raise ConfigError(f"{path}: {field}: is not a field that a slot knows; remove it or correct its name") from None
    raise ConfigError(f"{path}: {field}: {first['msg']} (it is {first['input']!r})") from None


def _recipe(environment: Path, config: TaskConfig) -> Recipe:
    for name in _REFUSED_FILES:
        if (environment / name).exists():
            raise ConfigError(f"{environment / name}: can't be honoured in a slot; use setup.sh and plain files")
    script = environment / SETUP
    if (environment / "Dockerfile").is_file():
        recipe = dockerfile.parse(environment / "Dockerfile")
        workdir = config.environment.workdir or recipe.workdir
        steps = list(recipe.steps)
        if SETUP in (environment / "Dockerfile").read_text():
            script = environment / "none"  # the Dockerfile deals with it
        image = recipe.image
    else:
        workdir, image = config.environment.workdir or dockerfile.DEFAULT_WORKDIR, None
        files = sorted(path.name for path in environment.iterdir() if path.name != SETUP)
        steps = [Copy(tuple(files), workdir.rstrip("/") + "/", whole=True)] if files else []
    if script.is_file():
        # The script itself is no part of the workspace.
        run = Run("bash /tmp/.task-setup/setup.sh && rm -rf /tmp/.task-setup", workdir)
        steps += [Copy((SETUP,), "/tmp/.task-setup/"), run]
    return Recipe(image, workdir, tuple(steps))
