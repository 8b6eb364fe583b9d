"""A compose file with one service, as the few facts that a slot needs. Several services are refused by name."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ConfigDict, ValidationError

from atropos.errors import ConfigError
from atropos.tasks.format.config import explained
from atropos.tasks.format.files import parse_yaml, read_text
from atropos.tasks.format.recipe import Folder, Recipe

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_WITHOUT_EFFECT = {
    *("container_name", "hostname", "labels", "init", "tty", "stdin_open", "logging"),
    *("restart", "stop_grace_period", "stop_signal", "expose", "ports", "platform", "pull_policy", "memswap_limit"),
}
"""Keys about a container's name, its ports or its end, which change nothing here."""
_OF_THE_BUILDER = {"cache_from", "cache_to", "labels", "no_cache", "platforms", "pull", "shm_size", "tags"}
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)(?::?-([^}]*)(?=\}))?[^}]*\}?|\$([A-Za-z_]\w*)")
_FROM_HARNESS = re.compile(r"\$\w+|\$\{\w+\}")
"""An image whose name the harness fills in."""
_LOGS = re.compile(r"LOGS|_PATH\}|/logs\b")


class _ComposeBuild(BaseModel):
    """`build`, where it says more than a folder."""

    model_config = ConfigDict(frozen=True, extra="allow")

    context: str = "."
    dockerfile: str = "Dockerfile"


class _ServiceTable(BaseModel):
    """A service in the file: the keys that are read."""

    model_config = ConfigDict(frozen=True, extra="allow")

    build: _ComposeBuild | str | None = None
    image: str | None = None
    entrypoint: str | list[str] | None = None
    command: str | list[str] | None = None
    environment: dict[str, str | int | float | bool | None] | list[str] | None = None
    working_dir: str | None = None
    user: str | int | None = None
    network_mode: str | None = None
    volumes: list[str | dict[str, object]] | None = None
    mem_limit: str | int | None = None
    cpus: str | float | None = None
    deploy: dict[str, object] | None = None


@dataclass(frozen=True)
class Service:
    """The one service.

    Attributes:
        dockerfile: None: it names an image.
        entrypoint: None: the image's.
        command: empty: what waits.
        offline: its network is none.
        memory_mib: what its programs may take; None: it doesn't say.
    """

    dockerfile: Path | None
    image: str | None
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None
    offline: bool = False
    memory_mib: int | None = None
    cpus: float | None = None

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with what the service says over it."""
        before = recipe.settings
        env, user = {**before.env, **self.env}, self.user or before.user
        workdir = self.workdir or before.workdir
        entrypoint = before.entrypoint if self.entrypoint is None else self.entrypoint
        settings = replace(before, workdir=workdir, env=env, user=user, entrypoint=entrypoint, command=self.command)
        steps = (*recipe.steps, Folder(settings.workdir, settings.user)) if self.workdir else recipe.steps
        return replace(recipe, settings=settings, steps=steps)


def read_compose(folder: Path) -> Service | None:
    """The service of a folder's compose file; None: there is no such file.

    Raises:
        ConfigError: the file can't be read, has several services, or asks for what no slot has.
    """
    path = next((folder / name for name in COMPOSE_FILES if (folder / name).exists()), None)
    if path is None:
        return None
    name, settings = _only_service(path)
    where = f"{path}: services.{name}"
    service = _service(settings, where)
    for volume in service.volumes or ():
        if not _LOGS.search(str(volume)):
            raise ConfigError(
                f"{where}.volumes: {volume}: a slot has no volumes but its logs; use COPY in the Dockerfile"
            )
    mode = _filled(service.network_mode or "bridge", f"{where}.network_mode")
    if mode not in {"bridge", "none", "default"}:
        raise ConfigError(f"{where}.network_mode: {mode!r} can't be honoured in a slot; use none or leave it out")
    file = None if service.build is None else _dockerfile(service.build, folder, where)
    image = None if file is not None or _FROM_HARNESS.fullmatch(service.image or "") else service.image
    workdir = _filled(service.working_dir or "", f"{where}.working_dir")
    if workdir and not workdir.startswith("/"):
        raise ConfigError(f"{where}.working_dir: {workdir!r:.80} doesn't begin with /; write the whole path")
    limits = _limits(service.deploy)
    memory = _number(service.mem_limit or limits.get("memory"), f"{where}.mem_limit")
    return Service(
        dockerfile=file,
        image=None if image is None else _filled(image, f"{where}.image"),
        entrypoint=None if service.entrypoint is None else _words(service.entrypoint, f"{where}.entrypoint"),
        command=_words(service.command or "", f"{where}.command"),
        env=_environment(service.environment, where),
        workdir=workdir or None,
        user=None if service.user is None else _filled(str(service.user), f"{where}.user"),
        offline=mode == "none",
        memory_mib=None if memory is None else max(1, int(memory) >> 20),
        cpus=_number(service.cpus or limits.get("cpus"), f"{where}.cpus"),
    )


def _only_service(path: Path) -> tuple[str, object]:
    """The name of a file's one service, and what it says."""
    text = read_text(path, "write one, or remove it")
    try:
        raw = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: can't be read: {error}".replace("\n", " ")) from None
    services = _table(_table(raw).get("services"))
    if not services:
        raise ConfigError(f"{path}: has no services; name one, `main`")
    if len(services) > 1:
        names = ", ".join(sorted(map(str, services)))
        raise ConfigError(
            f"{path}: several services ({names}) can't be honoured: a task is one slot, and slots have no network in "
            "common on which services would find each other by name; start them all in one image, or leave the task out"
        )
    [service] = services.items()
    return service


def _service(given: object, where: str) -> _ServiceTable:
    try:
        service = _ServiceTable.model_validate(given or {})
    except ValidationError as error:
        raise ConfigError(explained(where, error, loc=1)) from None
    build = service.build.model_extra if isinstance(service.build, _ComposeBuild) else None
    unknown = [key for key in service.model_extra or {} if key not in _WITHOUT_EFFECT and not key.startswith("x-")]
    unknown += [f"build.{key}" for key, value in (build or {}).items() if value and key not in _OF_THE_BUILDER]
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: can't be honoured in a slot; remove it")
    return service


def dockerfile_in(folder: Path, service: Service | None) -> Path:
    """The Dockerfile of a folder: its service names it, or it has the usual name."""
    return (service and service.dockerfile) or folder / "Dockerfile"


def _dockerfile(build: _ComposeBuild | str, folder: Path, where: str) -> Path:
    """The Dockerfile that `build` names, as seen from the compose file's folder."""
    build = _ComposeBuild(context=build) if isinstance(build, str) else build
    path = folder if build.context.startswith("$") else (folder / build.context).resolve()
    if path not in {folder, folder.resolve()}:
        raise ConfigError(f"{where}.build.context: {build.context} is not the Dockerfile's own folder; use .")
    return path / build.dockerfile


def _table(value: object) -> dict[str, object]:
    """A table; empty where there is none."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _limits(deploy: object) -> dict[str, object]:
    """`deploy.resources.limits`; empty where there are none."""
    return _table(_table(_table(deploy).get("resources")).get("limits"))


def _number(value: object, where: str) -> float | None:
    """A number, or a size in bytes; None where the harness is to fill it in."""
    if value is None or str(value).startswith("$"):
        return None
    match = re.fullmatch(r"(\d*\.?\d+)\s*([bkmgt]?)i?b?", str(value).strip(), re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ConfigError(f"{where}: {value!r:.50} is no size; write one like 2 or 512m")
    return float(match[1]) * (1 << 10 * "bkmgt".find(match[2].lower()) if match[2] else 1)


def _environment(value: Mapping[str, object] | Sequence[str] | None, where: str) -> dict[str, str]:
    """Variables of the service; those that the harness itself fills in are left to it."""
    pairs: list[tuple[str, object]]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [(name, text if equals else None) for name, equals, text in (one.partition("=") for one in value or ())]
    variables: dict[str, str] = {}
    for name, content in pairs:
        if content is None:
            raise ConfigError(f"{where}.environment.{name}: takes the value of this machine; write the value")
        text = str(content).lower() if isinstance(content, bool) else str(content)
        if not text.startswith("${T_BENCH_"):
            variables[name] = _filled(text, f"{where}.environment.{name}")
    return variables


def _words(value: str | Sequence[str], where: str) -> tuple[str, ...]:
    """A command: its words, or a text that is split into words as a shell would."""
    if not isinstance(value, str):
        return tuple(_filled(word, where) for word in value)
    try:
        return tuple(shlex.split(_filled(value, where)))
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r:.80}: {error}; write a list of words") from None


def _filled(text: str, where: str) -> str:
    """A value with `${NAME:-default}` replaced by the default: nothing of this machine comes into a task."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[2] is None or "$" in match[2]:
            raise ConfigError(f"{where}: {match[0]:.80} is not given to tasks; write the value, or a plain default")
        return match[2]

    return _VARIABLE.sub(one, text)
