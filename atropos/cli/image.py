"""`atropos image`: the sandbox image that Docker and Nomad run."""

from __future__ import annotations

import subprocess
from typing import Annotated

import typer

from atropos.errors import ConfigError
from atropos.slots.backends.assets import asset

image_app = typer.Typer(no_args_is_help=True, help="Build the sandbox image.")


@image_app.callback()
def group() -> None:
    """Build the sandbox image."""


@image_app.command()
def build(tag: Annotated[str, typer.Option(help="name of the image")] = "atropos-sandbox:local") -> None:
    """Build the image into the Docker engine (DOCKER_HOST); nothing is done when it is up to date."""
    script = asset("docker/sandbox/build.sh")
    if not (script.parents[2] / "atropos" / "sandbox").is_dir():
        raise ConfigError("the image is built from a checkout of the repository: clone it, then run `make image` there")
    raise typer.Exit(subprocess.run(["bash", str(script), tag], check=False).returncode)
