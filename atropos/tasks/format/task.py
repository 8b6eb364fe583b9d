"""A task: what a folder asks for, checked, whatever its layout."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from atropos.errors import ConfigError
from atropos.tasks.format.config import (
    AgentSection,
    Artifact,
    EnvironmentSection,
    StepSection,
    TaskConfig,
    VerifierSection,
)
from atropos.tasks.format.context import Context
from atropos.tasks.format.recipe import BuildInputs, Recipe, StepSettings
from atropos.tasks.format.service import Service
from atropos.wire import ImageInfo, ImageState, LeaseLimits, Limit

if TYPE_CHECKING:
    from atropos.slots import SlotPool

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?:\}|:-([^}]*)(?:\}|\Z))")
"""`${NAME}` or `${NAME:-default}` in a task's variables; or a default that has no end, which is text, and in which none
is looked for."""
Hosts = tuple[str, ...] | None
"""What a phase may reach of what the pool allows; None: all of it."""


class Make(Protocol):
    """Makes a task's recipe once it is known what its images set."""

    def __call__(self, images: BuildInputs, *, prebuilt: bool) -> Recipe:
        """The recipe; `prebuilt`: `docker_image` is used, and not the Dockerfile beside it."""
        ...


Build = Callable[["Task", "SlotPool", Callable[[ImageState], None]], Awaitable[ImageInfo]]
"""Builds a task's image on a pool."""


@dataclass(frozen=True)
class Task:
    """One checked task folder, or one step of a task of several.

    Attributes:
        name: the folder's name; the item's id everywhere.
        context: the folder that the recipe copies from.
        recipe: how the workspace is made.
        tests: folders whose content goes to /tests, later ones over earlier ones; single files as they are.
        solution: the folder that goes to /solution, None without one.
        make: makes the recipe anew, of whatever kind the folder is.
        warnings: keys of task.toml that the format doesn't have.
        steps: of a task of several: each a task with the same workspace, in order.
        files: of a step: what is copied into the workspace before it.
        scoring: what the reward is read from.
        limits: what its leases ask for instead of the pool's limits.
        lowered: for each limit of its leases that is below what it asks for, why, and the cure.
        verifier: the machine of a separate verifier that differs from the workspace: a task that only that is built of.
        bundled: of such a machine: its image holds the tests.
        unbuildable: why its Dockerfile can't be built here, so that only its `docker_image` serves; else None.
        service: how its container is started, by its compose file; None: as its image says.
        beside: the machines of the other services there, in an order in which they may be started: each a task that
            only that is built of.
        builder: builds its image for `SlotPool.prepare`; `load_task` gives it.
    """

    name: str
    path: Path
    instruction: str
    config: TaskConfig
    context: Path
    recipe: Recipe
    tests: tuple[Path, ...]
    solution: Path | None
    make: Make = field(repr=False, compare=False)
    warnings: tuple[str, ...] = ()
    steps: tuple[Task, ...] = ()
    files: Path | None = None
    step: StepSection | None = None
    scoring: Literal["reward", "pytest"] = "reward"
    test_script: str = "test.sh"
    solution_script: str = "solve.sh"
    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    limits: LeaseLimits | None = None
    lowered: Mapping[Limit, str] = field(default_factory=dict["Limit", str])
    verifier: Task | None = None
    bundled: bool = False
    unbuildable: str | None = None
    service: Service | None = None
    beside: tuple[Task, ...] = ()
    builder: Build | None = field(default=None, repr=False, compare=False)

    @property
    def build_context(self) -> Context:
        """What the recipe copies from.

        Raises:
            ConfigError: its ignore file can't be read.
        """
        return Context.of(self.context, self.recipe.dockerfile)

    @property
    def image(self) -> str | None:
        """What the task is written for."""
        return self.config.environment.docker_image or self.recipe.image

    @property
    def verifiers(self) -> tuple[Task, ...]:
        """Machines of separate verifiers that differ from the workspace, of the task or its steps."""
        return tuple(one.verifier for one in self.steps or (self,) if one.verifier is not None)

    @property
    def machines(self) -> tuple[Task, ...]:
        """All that is built for it: its own machine, its services', and its separate verifiers'."""
        return (self, *self.beside, *self.verifiers)

    @property
    def seconds(self) -> float:
        """Longest that its agent and its tests take together, by its own times."""
        configs = [one.config for one in self.steps or (self,)]
        return sum((one.agent.timeout_sec or 3600) + one.verifier.timeout_sec for one in configs)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """What a separate verifier gets: the paths in task.toml; else WORKDIR, if its machine is like the agent's."""
        named = (*self.config.artifacts, *(self.step.artifacts if self.step else ()))
        if not named and self.recipe.workdir != "/" and (self.verifier is None or not self.verifier.bundled):
            named = (Artifact(source=self.recipe.workdir),)
        return (*named, Artifact(source="/logs/artifacts"))

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
    def container_settings(self) -> StepSettings:
        """What a container of the machine starts with."""
        return self._settings(None, {})

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
        return StepSettings(base.workdir, {**base.env, **added}, base.user if user is None else str(user))

    async def build(self, pool: SlotPool, progress: Callable[[ImageState], None]) -> ImageInfo:
        """Build its image on a pool; `SlotPool.prepare` calls this.

        Raises:
            TaskBroken: a step failed; says which, with the last lines of its output.
            ImageUnavailable: an image that it names can't be had.
            ConfigError: it was not loaded by `load_task`.
        """
        if self.builder is None:
            raise ConfigError(f"{self.name}: load it with load_task, or build it with TaskImages")
        return await self.builder(self, pool, progress)

    def on(self, images: BuildInputs, *, prebuilt: bool = False) -> Task:
        """The task once it is known what its images set.

        Args:
            images: what they set, and what is built for.
            prebuilt: `docker_image` is used, and not the Dockerfile beside it.

        Raises:
            ConfigError: names the file, the line and the cure.
        """
        recipe = self.make(images, prebuilt=prebuilt)
        return replace(self, recipe=recipe, steps=tuple(replace(step, recipe=recipe) for step in self.steps))

    def filled(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables with `${NAME}` and `${NAME:-default}` replaced by what the operator gives."""

        def one(match: re.Match[str]) -> str:
            return self.variables.get(match[1], match[2] or "") if match[0].endswith("}") else match[0]

        return {name: VARIABLE.sub(one, value) for name, value in env.items()}


def first_recipe(make: Make, images: BuildInputs, wants: EnvironmentSection) -> tuple[Recipe, str | None]:
    """A recipe before any image is pulled, by the Dockerfile; or, if that can't be built, the named image's, and why.

    Raises:
        ConfigError: it can't be built, and no image is named.
    """
    try:
        return make(images, prebuilt=False), None
    except ConfigError as error:
        if wants.docker_image is None:
            raise
        return make(images, prebuilt=True), str(error)
