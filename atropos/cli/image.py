"""`atropos image`: build the sandbox image that Docker and Nomad run; prepare images that slots start from."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from typing import Annotated, TypedDict

import typer

from atropos.cli.image_progress import image_or_task, progress_display
from atropos.cli.options import (
    DEFAULT_JOB,
    AsJson,
    AuthFile,
    BackendName,
    InsecureRegistries,
    Mirrors,
    Store,
    image_store,
)
from atropos.errors import ConfigError
from atropos.slots.backends.assets import asset
from atropos.slots.backends.loading import open_survey

image_app = typer.Typer(no_args_is_help=True, help="The sandbox image, and images that slots start from.")


@image_app.callback()
def group() -> None:
    """The sandbox image, and images that slots start from."""


@image_app.command()
def build(
    tag: Annotated[str, typer.Option(help="name of the image")] = "atropos-sandbox:local", as_json: AsJson = False
) -> None:
    """Build the image into the Docker engine (DOCKER_HOST); nothing is done when it is up to date."""
    script = asset("docker/sandbox/build.sh")
    if not (script.parents[2] / "atropos" / "sandbox").is_dir():
        raise ConfigError("the image is built from a checkout of the repository: clone it, then run `make image` there")
    done = subprocess.run(["bash", str(script), tag], check=False, stdout=sys.stderr if as_json else None)
    if as_json and not done.returncode:
        typer.echo(json.dumps({"image": tag}))
    raise typer.Exit(done.returncode)


@image_app.command()
def prepare(
    images: Annotated[
        list[str], typer.Argument(help="python:3.13-slim, oci-archive:FILE … or a Dockerfile, a task's folder")
    ],
    backend: BackendName = "local",
    store: Store = None,
    auth_file: AuthFile = None,
    insecure_registry: InsecureRegistries = None,
    mirror: Mirrors = None,
    as_json: AsJson = False,
) -> None:
    """Pull or build images where slots will run, so that the first lease on them starts at once."""
    if backend == "docker" and store is None:
        raise ConfigError("--store: without a folder of the host each container keeps its own images, gone with it")
    store_settings = image_store(store, auth_file, insecure_registry, mirror)
    settings: dict[str, object] = {"backend": backend, "image_store": store_settings}
    prepared = asyncio.run(_prepare(images, settings))
    if as_json:
        typer.echo(json.dumps(prepared, indent=2))
    else:
        for image in prepared:
            typer.echo(f"{image['image']}  {image['lease_as']}  {image['bytes'] / 2**20:,.0f} MiB")


class PreparedSource(TypedDict):
    """An image as asked for, the name to lease it by, and its size."""

    image: str
    lease_as: str
    bytes: int


async def _place(backend: object) -> dict[str, object]:
    """Settings of the pool that prepares: the containers that Nomad's job has, which stay; elsewhere one of its own.

    Raises:
        ConfigError: no container of the job answers.
    """
    count, own = 1, dict[str, object](job_id=f"atropos-prepare-{secrets.token_hex(4)}")
    if backend == "nomad":  # images are gone with a container, unless its node has a volume for them
        async with await open_survey("nomad", DEFAULT_JOB, address=None) as survey:
            seen, trouble = await survey.look()
        count = sum(each.status is not None for each in seen)
        if not count:
            raise ConfigError(
                f"--backend nomad: no container of {DEFAULT_JOB} answers, to prepare images in; "
                f"{trouble or 'start an env'}"
            )
        own = {"job_id": DEFAULT_JOB, "purge_job_on_shutdown": False}
    return {"slots_per_container": 1, "min_containers": count, "max_containers": count, **own}


async def _prepare(images: list[str], settings: dict[str, object]) -> list[PreparedSource]:
    from atropos.slots import SlotPool, SlotPoolConfig

    async with SlotPool(SlotPoolConfig.model_validate(settings | await _place(settings["backend"]))) as pool:
        with progress_display() as progress_of:
            work = [pool.prepare(image_or_task(name, pool), progress=progress_of(name)) for name in images]
            prepared = await asyncio.gather(*work)
    return [
        {
            "image": name,
            "lease_as": info.source if info.source.startswith("atropos-build:") else info.id,
            "bytes": info.bytes,
        }
        for name, info in zip(images, prepared, strict=True)
        if info is not None
    ]
