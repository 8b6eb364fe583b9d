"""The machines of the services beside a task's own: each a task that only that is built of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from atropos.errors import ConfigError
from atropos.tasks.format import machines
from atropos.tasks.format.compose import dockerfile_in
from atropos.tasks.format.config import EnvironmentSection, TaskConfig
from atropos.tasks.format.recipe import BuildInputs
from atropos.tasks.format.task import Task, first_recipe


def services_of(task: Task, own: EnvironmentSection, folder: Path, images: BuildInputs) -> tuple[Task, ...]:
    """The machines of the services beside a task's own, each built with what the task has for a build.

    Args:
        task: with its main service.
        own: `[environment]`, without what the compose file says of that one.
        folder: of the compose file.
        images: what is known of the images that they name.

    Raises:
        ConfigError: one can't be made; names the file and the cure.
    """
    beside: list[Task] = []
    for service in task.service.beside if task.service is not None else ():
        if service.image is None and not dockerfile_in(folder, service).is_file():
            raise ConfigError(f"{folder}: services.{service.name}: has neither an image nor a Dockerfile; name one")
        wants = machines.with_compose(
            service,
            EnvironmentSection(
                network_mode=own.network_mode,
                allowed_hosts=own.allowed_hosts,
                build_timeout_sec=own.build_timeout_sec,
            ),
        )
        context = service.context or folder
        make = partial(machines.machine, context, service, wants)
        recipe, unbuildable = first_recipe(make, images, wants)
        beside.append(
            replace(
                task,
                name=f"{task.name}/{service.name}",
                config=TaskConfig(environment=wants),
                context=context,
                recipe=recipe,
                unbuildable=unbuildable,
                make=make,
                tests=(),
                solution=None,
                service=service,
            )
        )
    return tuple(beside)
