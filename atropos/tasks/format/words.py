"""A stage of a Dockerfile while it is read, and the words of its instructions: variables, flags, names, modes."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace

from e2b_dockerfile_utils import DockerfileInstruction, PatternMatcher, ShellLex

from atropos.errors import ConfigError
from atropos.tasks.format.recipe import CACHES, PATH, Folder, Run, Stage, Step, StepSettings

_SYMBOLIC = re.compile(r"[ugoa]*([-+=]([ugo]+|[rwxXst]*))+(,[ugoa]*([-+=]([ugo]+|[rwxXst]*))+)*")


@dataclass
class Building:
    """A stage while its instructions are read."""

    index: int
    image: str
    settings: StepSettings
    name: str = ""
    steps: list[Step] = field(default_factory=list[Step])
    volumes: list[Folder] = field(default_factory=list[Folder])
    """What a container of it finds made, and its build doesn't."""
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    """Of ARG: as with BuildKit, over an ENV of the same name that came before."""
    own_cmd: bool = False
    """Whether it has a CMD, which its ENTRYPOINT then leaves."""
    onbuild: tuple[str, ...] = ()
    """Instructions for a stage that starts from this one."""
    refused: ConfigError | None = None
    """Why it can't be built, raised where it is needed: Dockerfiles have stages for several architectures."""

    def done(self) -> Stage:
        """The stage, without what its commands have had in cache mounts."""
        cached = any(mount.cache for step in self.steps if isinstance(step, Run) for mount in step.mounts)
        emptied = [Run(("rm", "-rf", CACHES), replace(self.settings, user=None))] if cached else []
        return Stage(self.index, self.image, (*self.steps, *emptied))

    def path(self, name: str) -> str:
        """A path, by its name from the working directory on."""
        path = posixpath.normpath(posixpath.join(self.settings.workdir, name))
        return f"/{path.lstrip('/')}"  # POSIX has two slashes at the beginning mean something else than one


class Words:
    """Reads the words of one file's instructions.

    Args:
        where: the file; then, file, line and name of the instruction that is read, for errors.
        escape: the file's escape character.
        architecture: the one that is built for.

    Attributes:
        globals: ARGs before the first stage.
    """

    def __init__(self, where: str, escape: str, architecture: str) -> None:
        self.where = where
        self._escape = escape
        # BuildKit's arguments of where a build runs and what it is for, which is one machine here
        values = {"PLATFORM": f"linux/{architecture}", "OS": "linux", "ARCH": architecture, "VARIANT": ""}
        self.globals = {f"{side}{key}": value for side in ("TARGET", "BUILD") for key, value in values.items()}

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where} {what}".replace("\n", " "))

    def _word(self, word: str, stage: Building | None = None, escape: str | None = None, **keep: bool) -> str:
        """A word with its variables replaced and its quotes removed; `keep`: what `ShellLex` is to leave as it is."""
        known = self.globals if stage is None else {"PATH": PATH, **stage.settings.env, **stage.arguments}
        try:
            return ShellLex(escape or self._escape, env=known, skip_unset_env=False, **keep).process_word(word)
        except ValueError as error:
            raise self._refusal(f"{word}: {error}") from None

    def _flags(self, instruction: DockerfileInstruction, known: dict[str, str]) -> dict[str, list[str]]:
        """Flags by name. `known`: the cure for each flag that can't be honoured; the empty text: it can."""
        flags: dict[str, list[str]] = {}
        for flag in instruction.flags:
            name, _, value = flag.removeprefix("--").partition("=")
            if name not in known:
                raise self._refusal(f"--{name} is not a flag of this instruction that a slot knows; remove it")
            if known[name]:
                raise self._refusal(f"--{name} can't be honoured in a slot: {known[name]}")
            flags.setdefault(name, []).append(value)
        return flags

    def _one(self, instruction: DockerfileInstruction) -> str:
        if len(instruction.args) != 1:
            raise self._refusal("needs exactly one value")
        return instruction.args[0]

    def _exclude(self, flags: dict[str, list[str]]) -> tuple[str, ...]:
        patterns = flags.get("exclude", [])
        try:
            PatternMatcher(patterns)
        except ValueError as error:
            raise self._refusal(f"--exclude: {error}") from None
        return tuple(patterns)

    def _inside(self, source: str) -> str:
        """A source as it is named from its context or stage."""
        inside = source.lstrip("/") or "."
        if ".." in source.split("/"):  # the name decides, as with Docker, whatever is a link
            inside = posixpath.normpath(inside)
        if inside.split("/")[0] == "..":
            raise self._refusal(f"{source} leads out of environment/; keep the build context's files there")
        return inside

    def _switch(self, flags: dict[str, list[str]], name: str, *, default: bool) -> bool:
        """A flag that is true by its name alone."""
        if name not in flags:
            return default
        value = flags[name][-1].lower()
        if value not in {"", "true", "false", "1", "0"}:
            raise self._refusal(f"--{name}={value}: write true or false")
        return value not in {"false", "0"}

    def _mode(self, flags: dict[str, list[str]], stage: Building) -> int | str | None:
        """--chmod: a number, or words that chmod knows."""
        if "chmod" not in flags:
            return None
        mode = self._word(flags["chmod"][-1], stage)
        if re.fullmatch(r"0*[0-7]{1,4}", mode):
            return int(mode, 8)
        if not _SYMBOLIC.fullmatch(mode):
            raise self._refusal(f"--chmod={mode}: is no mode; write one like 755 or u=rwX,go=rX")
        return mode
