"""task.toml, field by field, as Harbor's schema 1.4 and its forerunners have it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

NetworkMode = Literal["public", "no-network", "allowlist"]
OLD_MEMORY_MB, OLD_STORAGE_MB = 2048, 10_240
"""What `harbor init` wrote into every task.toml before 2026-05-21: no wish of the task's author."""
_OLD_FIELDS = {"allow_internet": "network_mode", "memory": "memory_mb", "storage": "storage_mb"}
_Networked = TypeVar("_Networked", "_Phase", "EnvironmentSection")


def explained(where: object, error: ValidationError, *, loc: int | None = None) -> str:
    """The first thing that is wrong in a file, in one line.

    Args:
        where: the file, or a table of it.
        error: pydantic's.
        loc: how many parts of the field's name count; None: all.
    """
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"][:loc]))
    text = re.sub(r" or instance of \w+$", "", first["msg"].removeprefix("Value error, "))
    return f"{where}{field and ': ' + field}: {text} (it is {first['input']!r:.200})".replace("\n", " ")


class _Table(BaseModel):
    """Unknown keys are kept, to be listed."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Dotted names of the keys that the format doesn't have."""
        for key in self.__pydantic_extra__ or {}:
            yield prefix + key
        for key in type(self).model_fields:
            value = getattr(self, key)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, _Table):
                    yield from one.unknown(f"{prefix}{key}.")


def _check_hosts(table: _Networked) -> _Networked:
    """As Harbor: hosts without an allowlist in the same table would be ignored."""
    if table.allowed_hosts and table.network_mode != "allowlist":
        raise ValueError('allowed_hosts needs network_mode = "allowlist" beside it; write that, or remove the hosts')
    return table


class Healthcheck(_Table):
    """A command that is run until it succeeds, before the agent starts. Times in seconds."""

    command: str
    interval_sec: float = Field(default=5, ge=0)
    timeout_sec: float = Field(default=30, gt=0)
    start_period_sec: float = Field(default=0, ge=0)
    start_interval_sec: float = Field(default=5, ge=0)
    retries: int = Field(default=3, ge=1)


class Artifact(_Table):
    """A path of the agent's slot that a separate verifier gets."""

    source: str = Field(pattern=r"^/")
    destination: str | None = Field(default=None, pattern=r"^[^/]")
    exclude: tuple[str, ...] = ()
    service: str = "main"


class Collect(_Table):
    """A command that is run after the agent, before artifacts are taken."""

    command: str
    service: str = "main"
    timeout_sec: float = Field(default=60, gt=0)
    user: str | int | None = None


class TaskMcpServer(_Table):
    """A server for the agent's own harness."""

    name: str
    transport: Literal["sse", "streamable-http", "http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)


class _Phase(_Table):
    """What can differ between the agent's time and the verifier's."""

    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] = ()

    _listed = model_validator(mode="after")(_check_hosts)


class AgentSection(_Phase):
    """`[agent]`. None: the environment's own bounds alone."""

    timeout_sec: float | None = Field(default=None, gt=0)


class EnvironmentSection(_Table):
    """`[environment]`. Sizes in MiB, as Harbor's `_mb` mean them; None: whatever a slot has."""

    network_mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] = ()
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: tuple[str, ...] = ()
    tpu: dict[str, object] | None = None
    mcp_servers: tuple[TaskMcpServer, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = Field(default=None, pattern=r"^/")

    @model_validator(mode="before")
    @classmethod
    def _older(cls, value: object) -> object:
        """The older spellings: `memory = "2G"`, `allow_internet = false`."""
        if not isinstance(value, dict):
            return value
        table: dict[str, object] = dict(value)
        for old, new in _OLD_FIELDS.items():
            if old in table:
                wish = table.pop(old)
                table.setdefault(new, wish if old != "allow_internet" else ("public" if wish else "no-network"))
        for key in ("tpu", "healthcheck", "docker_image", "workdir"):
            if not table.get(key, True):  # an empty form
                del table[key]
        return table

    _listed = model_validator(mode="after")(_check_hosts)

    @property
    def wanted_gpus(self) -> int:
        """How many GPUs it asks for: one where it says their type alone."""
        return self.gpus if self.gpus is not None else int(bool(self.gpu_types))

    def refusals(self, table: str) -> Iterator[str]:
        """What no slot can honour, each as `field: reason; cure`; `table`: the name of this one."""
        if self.os != "linux":
            yield f"{table}.os: {self.os!r}: slots run Linux; leave the task out"
        if self.tpu is not None:
            yield f"{table}.tpu: a slot has no TPU; leave the task out"

    @field_validator("os", mode="before")
    @classmethod
    def _plain_os(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("memory_mb", "storage_mb", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        if isinstance(value, str) and (
            match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", value.strip(), re.IGNORECASE)
        ):
            return max(1, int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()]))
        return value


class VerifierSection(_Phase):
    """`[verifier]`. `separate`: a fresh slot that gets only the artifacts, so nothing else the agent did counts.

    Of atropos's own are the mode `view`, and `keep_processes`: which processes of the agent are still there when the
    tests run: those that listen on a socket (in a view: all), all, or none.
    """

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["view", "shared", "separate"] | None = None
    environment: EnvironmentSection | None = None
    collect: tuple[Collect, ...] = ()
    keep_processes: Literal["services"] | bool = "services"

    def of_step(self, section: StepSection) -> VerifierSection:
        """The task's table with what a step's own says in its place."""
        own = section.verifier
        if own is None:
            return self
        update = {name: getattr(own, name) for name in own.model_fields_set}
        if own.environment is not None and own.environment_mode is None:
            update["environment_mode"] = "separate"
        return self.model_copy(update={**update, "env": {**self.env, **own.env}})

    @model_validator(mode="after")
    def _one_mode(self) -> VerifierSection:
        if self.environment is not None and self.environment_mode in {"view", "shared"}:
            raise ValueError(
                f"environment_mode = {self.environment_mode} contradicts [verifier.environment]; remove one of them"
            )
        return self


class SolutionSection(_Table):
    """`[solution]`."""

    env: dict[str, str] = Field(default_factory=dict)


class Author(_Table):
    """Of `[task]`."""

    name: str
    email: str | None = None


class TaskSection(_Table):
    """`[task]`: what the task is called in a registry."""

    name: str | None = None
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


def _artifacts(value: object) -> object:
    return [{"source": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value


class StepSection(_Table):
    """One of `[[steps]]`. A field that is not given is the task's."""

    name: str = Field(pattern=r"^[^/.][^/]*$")
    agent: AgentSection = AgentSection()
    verifier: VerifierSection | None = None
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()

    _plain = field_validator("artifacts", mode="before")(_artifacts)


class TaskConfig(_Table):
    """task.toml. `metadata` is free."""

    schema_version: str = Field(default="1.4", validation_alias=AliasChoices("schema_version", "version"))
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: tuple[Artifact, ...] = ()
    steps: tuple[StepSection, ...] = ()
    task: TaskSection = TaskSection()
    metadata: dict[str, object] = Field(default_factory=dict)
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()

    _plain = field_validator("artifacts", mode="before")(_artifacts)

    @field_validator("steps")
    @classmethod
    def _own_names(cls, steps: tuple[StepSection, ...]) -> tuple[StepSection, ...]:
        """A folder is one step, also where file systems don't tell upper from lower case."""
        seen: set[str] = set()
        for step in steps:
            folder = unicodedata.normalize("NFC", step.name).casefold()
            if folder in seen:
                raise ValueError(f"{step.name!r} names two steps; give each another name")
            seen.add(folder)
        return steps

    @property
    def old(self) -> bool:
        """Whether its schema wrote out default sizes that no author asked for."""
        try:
            return tuple(int(part) for part in self.schema_version.split(".")[:2]) < (1, 4)
        except ValueError:
            return False

    def services(self) -> Iterator[tuple[str, str]]:
        """The fields that name a service, each with its value."""
        tables = [("", self.verifier, self.artifacts)]
        tables += [(f"steps.{index}.", step.verifier, step.artifacts) for index, step in enumerate(self.steps)]
        for table, verifier, artifacts in tables:
            for where, ones in (("verifier.collect", verifier.collect if verifier else ()), ("artifacts", artifacts)):
                for index, one in enumerate(ones):
                    yield f"{table}{where}.{index}.service", one.service
