"""Options that several commands have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from atropos.api.cli import BACKEND
from atropos.errors import ConfigError

if TYPE_CHECKING:
    from atropos.config import ImageStoreSettings


def full_path(given: str | None) -> str | None:
    """A path of the command's own folder as a server finds it, which works in another."""
    return None if given is None else os.path.abspath(given)


DEFAULT_JOB = "atropos-sandbox-agent-env"
"""The job of a pool that names none."""
Job = Annotated[str, typer.Option("--job-id", help="the pool's sandbox_job_id")]
BackendName = Annotated[str, BACKEND]
Address = Annotated[str | None, typer.Option(help="of the engine; default: NOMAD_ADDR or DOCKER_HOST")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Base = Annotated[str | None, typer.Option(help="A root file system to start from (local backend).", callback=full_path)]
Store = Annotated[
    str | None, typer.Option(help="Folder of the host that keeps images (local, docker).", callback=full_path)
]
AuthFile = Annotated[
    str | None, typer.Option(help="Registry credentials, as `docker login` writes them.", callback=full_path)
]
InsecureRegistries = Annotated[
    list[str] | None, typer.Option("--insecure-registry", help="HOST:PORT without TLS; again for more.")
]
Mirrors = Annotated[
    list[str] | None,
    typer.Option(
        "--mirror", help="HOST=MIRROR, or HOST=MIRROR/PATH: a registry, and what is asked before it; again for more."
    ),
]


def pair(option: str, text: str) -> tuple[str, str]:
    """NAME=VALUE, as two.

    Raises:
        ConfigError: it is none.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{option} {text}: write NAME=VALUE")
    return name, value


def image_store(
    folder: str | None, auth_file: str | None, insecure: Sequence[str] | None, mirrors: Sequence[str] | None
) -> ImageStoreSettings:
    """The image store that the options above mean."""
    from atropos.config import ImageStoreSettings

    return ImageStoreSettings(
        folder=folder,
        auth_file=auth_file,
        insecure_registries=tuple(insecure or ()),
        mirrors=dict(pair("--mirror", text) for text in mirrors or ()),
    )
