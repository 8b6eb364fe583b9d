"""What a template's instructions mean: steps of a recipe, and how its sandboxes start."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atropos.api.e2b.messages import StartBuild, TemplateStep
from atropos.errors import ConfigError
from atropos.slots import Slot
from atropos.slots.slot.profile import Profile, UserAccount
from atropos.tasks.builder.accounts import account_of
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.config import EnvironmentSection, TaskConfig
from atropos.tasks.format.recipe import PATH, BuildInputs, Copy, Folder, Recipe, Run, Step, StepSettings
from atropos.tasks.format.task import Task
from atropos.wire import LeaseLimits

HOME = "/home/user"
"""Where commands start and relative paths begin, as E2B's templates have it."""
DEFAULT_USER = UserAccount("root", 0, 0, HOME)
"""E2B's `user`: the slot's root, with a home of its own; not an image's own user, to whom the home doesn't belong."""
BUILD_S = 3600.0
"""Longest that the steps of a build take."""
READY_INTERVAL_S = 0.5
READY_S = 300.0
"""Longest wait for the ready command of a template."""
_ROOTS = {"", "user", "root"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_WAITS = re.compile(r"(exec +)?(sleep +(infinity|\d+)|tail +-f +/dev/null|(/usr)?(/bin/)?(ba|da)?sh|cat|true|:)? *")
"""A start command of a container that only waits: a sandbox does so by itself."""


@dataclass(frozen=True)
class SandboxStart:
    """How sandboxes of a template start.

    Attributes:
        user: as E2B names it.
        env: of the start command; commands of clients don't have the build's variables.
        command: is started in each; empty: nothing is.
        ready: is repeated until it succeeds; empty: nothing is waited for.
    """

    workdir: str = HOME
    user: str = "user"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    command: str = ""
    ready: str = ""

    async def begin(self, slot: Slot, env: Mapping[str, str]) -> None:
        """Set what a slot's commands start with (`env`: their variables), and start the start command.

        Raises:
            ConfigError: it has no such user, or what starts isn't ready in time.
            SandboxError: the slot is lost.
        """
        try:
            user = DEFAULT_USER if self.user in {"", "user"} else await account_of(slot, self.user)
        except TaskBroken as error:
            raise ConfigError(f"template: {error}") from None
        slot.profile = Profile(self.workdir, env, user)
        if not self.command or _WAITS.fullmatch(self.command):
            return
        shell = ("/bin/bash", "-l", "-c")
        try:
            process = await slot.start([*shell, self.command], env=self.env)
        except OSError as error:
            raise ConfigError(f"template: its start command can't be started: {error}") from None
        if not self.ready:
            return
        try:
            async with asyncio.timeout(READY_S):
                while (await slot.exec([*shell, self.ready], env=self.env)).exit_code != 0:  # noqa: ASYNC110
                    await asyncio.sleep(READY_INTERVAL_S)
        except TimeoutError:
            state = "runs" if process.exit_code is None else f"ended with {process.exit_code}"
            raise ConfigError(
                f"template: readyCmd did not succeed within {READY_S:g} s; the start command {state}"
            ) from None


@dataclass(frozen=True)
class BuildPlan:
    """A template's instructions as steps of a recipe.

    Attributes:
        origins: by step of the recipe, the number of its instruction, from 1; 0: the base's.
    """

    steps: tuple[Step, ...]
    origins: tuple[int, ...]
    settings: StepSettings
    start: SandboxStart


class _Instructions:
    """Reads one instruction after the other."""

    def __init__(self, message: StartBuild, start: SandboxStart, env: Mapping[str, str]) -> None:
        self._message = message
        self._workdir = start.workdir
        self._user = start.user
        self._env = {**env, **start.env}
        self._steps: list[Step] = [Folder(HOME)]
        self._origins = [0]

    def plan(self) -> BuildPlan:
        for number, step in enumerate(self._message.steps, 1):
            try:
                self._read(step)
            except (IndexError, ValueError) as error:
                wrong = str(error) if isinstance(error, ConfigError) else "its arguments are too few, or no numbers"
                raise ConfigError(f"steps.{number} ({step.type}): {wrong}") from None
            self._origins += [number] * (len(self._steps) - len(self._origins))
        message = self._message
        start = SandboxStart(self._workdir, self._user, self._env, message.start_cmd, message.ready_cmd)
        return BuildPlan(tuple(self._steps), tuple(self._origins), self._settings(self._user), start)

    def _settings(self, user: str) -> StepSettings:
        home = {"HOME": HOME} if user in {"", "user"} else {}
        return StepSettings(self._workdir, {**home, **self._env}, _account(user))

    def _read(self, step: TemplateStep) -> None:
        args = step.args
        if step.type == "ENV":
            for name, value in zip(args[::2], args[1::2], strict=True):
                known = {"PATH": PATH, **self._env}
                self._env[name] = _VARIABLE.sub(lambda found: known.get(found[1] or found[2], ""), value)  # noqa: B023
        elif step.type == "USER":
            self._user = args[0]
        elif step.type == "WORKDIR":
            self._workdir = self._path(args[0])
            self._steps.append(Folder(self._workdir, _account(self._user)))
        elif step.type == "RUN":
            script, user = [*args, ""][:2]
            self._steps.append(Run(("/bin/bash", "-l", "-c", script), self._settings(user or self._user)))
        else:
            self._steps.append(self._copy(step))

    def _copy(self, step: TemplateStep) -> Copy:
        source, target, owner, mode = [*step.args, "", ""][:4]
        if step.files_hash is None:
            raise ConfigError("filesHash is missing")
        inside = posixpath.normpath(source)
        if inside.startswith(("/", "..")):
            raise ConfigError(f"{source!r} leads out of the files")
        folder = "/" if target.endswith("/") and len(target) > 1 else ""
        return Copy(
            sources=(f"{step.files_hash}/{inside}",),
            target=self._path(target) + folder,
            mode=int(mode, 8) if mode else None,
            owner=_account(owner or self._user),
        )

    def _path(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            path = (HOME if self._user in {"", "user"} else "/root") + path[1:]
        return posixpath.normpath(posixpath.join(self._workdir, path))


def _account(user: str) -> str | None:
    return None if user in _ROOTS else user


def plan_of(message: StartBuild, start: SandboxStart, env: Mapping[str, str]) -> BuildPlan:
    """What a build does.

    Args:
        message: its request.
        start: of the template that it builds on.
        env: of the image that it builds on.

    Raises:
        ConfigError: names the instruction, and what is wrong with it.
    """
    return _Instructions(message, start, env).plan()


def task_of(
    name: str, message: StartBuild, image: str | None, start: SandboxStart, folder: Path, limits: LeaseLimits | None
) -> Task:
    """A build as a task, which is what slots' images are built from.

    Args:
        name: the template's, for messages.
        message: the build's request.
        image: what it builds on; None: the pool's base.
        start: of the template that it builds on.
        folder: with the files of each upload in a folder of its hash.
        limits: of the slots that it is built in.

    Raises:
        ConfigError: as `plan_of`.
    """

    def make(images: BuildInputs, *, prebuilt: bool) -> Recipe:
        assert not prebuilt
        env = {} if image is None else images.settings.get(image, StepSettings()).env
        plan = plan_of(message, start, env)
        return Recipe(image, plan.settings, plan.steps)

    return Task(
        name=name,
        path=folder,
        instruction="",
        config=TaskConfig(environment=EnvironmentSection(build_timeout_sec=BUILD_S)),
        context=folder,
        recipe=make(BuildInputs(), prebuilt=False),
        tests=(),
        solution=None,
        make=make,
        limits=limits,
    )
