"""What a pool's configuration says of Docker."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from atropos.slots.plugins import BackendSettings


class DockerSettings(BackendSettings):
    """Settings of the Docker backend, and of leases on an engine's images."""

    gpu_containers: ClassVar[int | None] = 1

    docker_host: str | None = Field(default=None, description="None: DOCKER_HOST, else the local engine")
