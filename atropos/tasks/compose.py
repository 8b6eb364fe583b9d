"""A compose file with one service, as the few facts that a slot needs. Several services are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from atropos.errors import ConfigError
from atropos.tasks.recipe import Folder, Recipe, StepSettings

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_WITHOUT_EFFECT = {
    *("build", "image", "environment", "working_dir", "user", "command", "entrypoint", "network_mode", "volumes"),
    *(
        "container_name",
        "hostname",
        "init",
        "tty",
        "stdin_open",
        "restart",
        "stop_grace_period",
        "stop_signal",
        "labels",
    ),
    *("expose", "ports", "platform", "pull_policy", "mem_limit", "memswap_limit", "cpus", "deploy", "logging"),
}
"""Keys that are read, and keys about a container's start, its name or its size (which task.toml gives)."""
_LOGS = re.compile(r"LOGS|_PATH\}|/logs\b")


@dataclass(frozen=True)
class Service:
    """The one service.

    Attributes:
        dockerfile: None: it names an image.
        offline: its network is none.
    """

    context: Path
    dockerfile: Path | None
    image: str | None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None
    offline: bool = False

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with what the service says over it."""
        before = recipe.settings
        settings = StepSettings(self.workdir or before.workdir, {**before.env, **self.env}, self.user or before.user)
        steps = (*recipe.steps, Folder(settings.workdir, settings.user)) if self.workdir else recipe.steps
        return replace(recipe, settings=settings, steps=steps)


def read_compose(path: Path, *, context: Path) -> Service:
    """Read a compose file.

    Raises:
        ConfigError: it can't be read, has several services, or asks for what no slot has.
    """
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: can't be read: {error}".replace("\n", " ")) from None
    services: Any = raw.get("services") if isinstance(raw, dict) else None
    if not isinstance(services, dict) or not services:
        raise ConfigError(f"{path}: has no services; name one, `main`")
    if len(services) > 1:
        names = ", ".join(sorted(map(str, services)))
        raise ConfigError(
            f"{path}: several services ({names}) can't be honoured: a task is one slot, and slots have no network in common "
            "on which services would find each other by name; start them all in one image, or leave the task out"
        )
    [(name, service)] = services.items()
    service = service or {}
    where = f"{path}: services.{name}"
    for key in service:
        if key not in _WITHOUT_EFFECT:
            raise ConfigError(f"{where}.{key}: can't be honoured in a slot; remove it")
    for volume in service.get("volumes") or ():
        if not _LOGS.search(str(volume)):
            raise ConfigError(
                f"{where}.volumes: {volume}: a slot has no volumes but its logs; use COPY in the Dockerfile"
            )
    mode = service.get("network_mode", "bridge")
    if mode not in {"bridge", "none", "default"}:
        raise ConfigError(f"{where}.network_mode: {mode!r} can't be honoured in a slot; use none or leave it out")
    build, folder, file = service.get("build"), context, None
    if build is not None:
        options: dict[str, Any] = {"context": build} if isinstance(build, str) else dict(build)
        given = str(options.get("context", "."))
        folder = context if given.startswith("$") else (path.parent / given).resolve()
        file = folder / str(options.get("dockerfile", "Dockerfile"))
        if folder != context.resolve() and folder != context:
            raise ConfigError(f"{where}.build.context: {given} is not the Dockerfile's own folder; use .")
    image = None if build is not None else service.get("image")
    return Service(
        context=folder,
        dockerfile=file,
        image=None if image is None or str(image).startswith("$") else str(image),
        env=_environment(service.get("environment"), where),
        workdir=service.get("working_dir"),
        user=None if service.get("user") is None else str(service["user"]),
        offline=mode == "none",
    )


def _environment(value: Any, where: str) -> dict[str, str]:
    """Variables of the service; those that the harness itself fills in are left to it."""
    if isinstance(value, list):
        pairs = [str(one).partition("=") for one in value]
        value = {name: text if equals else None for name, equals, text in pairs}
    found: dict[str, str] = {}
    for name, text in (value or {}).items():
        if text is None:
            raise ConfigError(f"{where}.environment.{name}: takes the value of this machine; write the value")
        if str(text).startswith("${T_BENCH_"):
            continue
        found[str(name)] = str(text)
    return found
