"""What the folders of a Harbor task are made into: the workspace, and the machine of a separate verifier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atropos.tasks.format import dockerfile
from atropos.tasks.format.compose import COMPOSE_FILE, dockerfile_in
from atropos.tasks.format.config import EnvironmentSection
from atropos.tasks.format.context import NEVER
from atropos.tasks.format.recipe import DEFAULT_WORKDIR, BuildInputs, Copy, Folder, Recipe, Run, Step, StepSettings
from atropos.tasks.format.service import Service

SETUP = "setup.sh"


def is_machine(folder: Path) -> bool:
    """Whether a folder says how to build an image."""
    return any((folder / name).is_file() for name in ("Dockerfile", COMPOSE_FILE))


def with_compose(service: Service | None, wants: EnvironmentSection) -> EnvironmentSection:
    """`[environment]` with what a compose file adds to it: image, network, and sizes and GPUs that it doesn't name."""
    if service is None:
        return wants
    sizes = {"memory_mb": service.memory_mib, "cpus": service.cpus, "gpus": service.gpus}
    # gpus = 0 is what older schemas wrote into every task.toml
    changes: dict[str, object] = {name: size for name, size in sizes.items() if size and not getattr(wants, name)}
    if service.offline:
        changes["network_mode"] = "no-network"
    if service.image is not None and wants.docker_image is None:
        changes["docker_image"] = service.image
    return wants.model_copy(update=changes)


def machine(
    folder: Path, service: Service | None, wants: EnvironmentSection, images: BuildInputs, *, prebuilt: bool
) -> Recipe:
    """What `docker_image`, a Dockerfile or a compose file says, and nothing of the folder's own files.

    Args:
        folder: the build context.
        service: of its compose file.
        wants: `[environment]`, or `[verifier.environment]`.
        images: what is known of the images it names.
        prebuilt: `docker_image` is used, and not the Dockerfile beside it.

    Raises:
        ConfigError: names the file, the line and the cure.
    """
    if service is not None:
        service.check_platform(folder, images.architecture)
    own = dockerfile_in(folder, service)
    image = wants.docker_image if prebuilt else None
    asked = service is not None and service.dockerfile is not None and wants.docker_image is None
    built = image is None and (asked or own.is_file())
    if built:
        build = service or Service()
        recipe = dockerfile.parse(own, folder, images, build.arguments, build.target)
    else:
        start = StepSettings(DEFAULT_WORKDIR) if image is None else images.settings.get(image, StepSettings())
        recipe = Recipe(image, start, tuple(Folder(path) for path in start.volumes))
    if service is not None:
        recipe = service.applied(recipe)
    if wants.workdir:
        recipe = replace(recipe, settings=replace(recipe.settings, workdir=wants.workdir))
    elif built:
        return recipe
    return replace(recipe, steps=(*recipe.steps, Folder(recipe.workdir, recipe.settings.user)))


def workspace(
    environment: Path, service: Service | None, wants: EnvironmentSection, images: BuildInputs, *, prebuilt: bool
) -> Recipe:
    """As `machine`, with the loose files of `environment/` where nothing is built, and its setup.sh.

    Raises:
        ConfigError: as `machine`.
    """
    recipe = machine(environment, service, wants, images, prebuilt=prebuilt)
    script, own = environment / SETUP, dockerfile_in(environment, service)
    steps: list[Step] = list(recipe.steps)
    image = wants.docker_image if prebuilt else None
    if own.is_file() and image is None:
        handled = SETUP in own.read_text(encoding="utf-8")
    else:
        # the image was made with all that is here
        handled = image is not None and (own.is_file() or service is not None)
        left_out = {SETUP, COMPOSE_FILE, *NEVER}
        there = environment.iterdir() if environment.is_dir() else ()
        files = sorted(path.name for path in there if path.name not in left_out)
        if files and not handled:
            steps.append(Copy(tuple(files), recipe.workdir.rstrip("/") + "/", keep_folder_name=True))
    if script.is_file() and not handled:
        # The script itself is no part of the workspace.
        line = "bash /tmp/.task-setup/setup.sh && rm -rf /tmp/.task-setup"
        run = Run(("/bin/sh", "-c", line), replace(recipe.settings, user=None))
        steps += [Copy((SETUP,), "/tmp/.task-setup/"), run]
    return replace(recipe, steps=tuple(steps))
