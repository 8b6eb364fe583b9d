"""What a compose file says of a service: how its container is made and started, beside which others, and with what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from atropos.errors import ConfigError
from atropos.images.manifests import is_for
from atropos.tasks.format import health
from atropos.tasks.format.recipe import Folder, Recipe
from atropos.wire import HealthConfig

MAIN = "main"
"""The service that the agent works in, as Harbor names it."""
Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]


@dataclass(frozen=True)
class ServiceVolume:
    """A folder or file that a service mounts.

    Attributes:
        name: the same for all services that share it.
        target: where it is mounted.
        source: what it holds at first; None: what the first service with something at its target has there.
    """

    name: str
    target: str
    source: Path | None = None
    read_only: bool = False


@dataclass(frozen=True)
class Service:
    """One service.

    Attributes:
        names: by which the others know it.
        context: what its Dockerfile copies from; None: the compose file's folder.
        dockerfile: None: it names an image, or is the folder's own machine.
        arguments: of its build, which ARG declares there.
        target: the stage that is built; None: the last one.
        entrypoint: None: the image's.
        command: empty: of the main one, what waits; of others, the image's.
        platforms: of the machine that it is for, any of them; empty: it doesn't say.
        networks: on which it finds the others; of two services that have none in common, neither reaches the other.
        offline: it reaches no host but the other services.
        memory_mib: what its programs may take; None: it doesn't say.
        shm_mib: what they may share in /dev/shm, which has the room of a slot's files.
        gpus: how many it has; None: it doesn't say.
        healthcheck: None: the image's.
        restart: after which end it is started again.
        extra_hosts: names that it knows beside the others', each with addresses.
        tmpfs: folders that are empty at its start, each with its mode.
        beside: of the main one: the others.
    """

    name: str = MAIN
    names: tuple[str, ...] = (MAIN,)
    context: Path | None = None
    dockerfile: Path | None = None
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    target: str | None = None
    image: str | None = None
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None
    platforms: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    offline: bool = False
    memory_mib: int | None = None
    shm_mib: int | None = None
    cpus: float | None = None
    gpus: int | None = None
    depends_on: Mapping[str, Condition] = field(default_factory=dict[str, "Condition"])
    healthcheck: HealthConfig | None = None
    restart: Literal["no", "on-failure", "always"] = "no"
    volumes: tuple[ServiceVolume, ...] = ()
    tmpfs: Mapping[str, str] = field(default_factory=dict[str, str])
    extra_hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    beside: tuple[Service, ...] = ()

    def check_platform(self, folder: Path, architecture: str) -> None:
        """Compare what it is for with what slots have; `folder`: of its file.

        Raises:
            ConfigError: it is for other machines.
        """
        if self.platforms and not any(is_for(each, architecture) for each in self.platforms):
            raise ConfigError(
                f"{folder}: services.{self.name}.platform: {', '.join(self.platforms)}: slots are "
                f"linux/{architecture}; remove it, or set architecture"
            )

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with what the service says over it."""
        before = recipe.settings
        env, user = {**before.env, **self.env}, self.user or before.user
        workdir = self.workdir or before.workdir
        entrypoint = before.entrypoint if self.entrypoint is None else self.entrypoint
        settings = replace(
            before,
            workdir=workdir,
            env=env,
            user=user,
            entrypoint=entrypoint,
            command=self.command,
            healthcheck=health.merged(self.healthcheck, before.healthcheck),
        )
        if self.entrypoint is not None:
            settings = replace(settings, cmd=())
        steps = (*recipe.steps, Folder(settings.workdir, settings.user)) if self.workdir else recipe.steps
        return replace(recipe, settings=settings, steps=steps)


def start_order(services: Iterable[Service], where: str) -> tuple[Service, ...]:
    """The services, each after those that it depends on.

    Args:
        services: all of a file.
        where: the file, for messages.

    Raises:
        ConfigError: one depends on none of them, on itself in the end, or on the health of one that is to have no
            health check.
    """
    by_name = {service.name: service for service in services}
    ordered: dict[str, Service] = {}
    waiting = dict(by_name)
    while waiting:
        ready = [each for each in waiting.values() if all(name in ordered for name in each.depends_on)]
        if not ready:
            names = ", ".join(waiting)
            raise ConfigError(f"{where}: depends_on: {names} wait for each other, or for a service that isn't there")
        for each in ready:
            ordered[each.name] = waiting.pop(each.name)
    for each in ordered.values():
        for name, condition in each.depends_on.items():
            check = by_name[name].healthcheck
            if condition == "service_healthy" and check is not None and check.test == health.NONE:
                raise ConfigError(
                    f"{where}: services.{each.name}.depends_on.{name}: its healthcheck is disabled, and could never "
                    "succeed; write one"
                )
    return tuple(ordered.values())
