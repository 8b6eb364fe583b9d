"""Where containers come from: local processes, Docker, Nomad."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atropos.slots.backends.base import Backend
    from atropos.slots.config import SlotPoolConfig


def make_backend(config: SlotPoolConfig) -> Backend:
    """The backend that a pool's configuration names; only its own dependencies are imported."""
    if config.backend == "docker":
        from atropos.slots.backends.docker.backend import DockerBackend

        return DockerBackend.from_pool(config)
    if config.backend == "nomad":
        from atropos.slots.backends.nomad.backend import NomadBackend  # pyright: ignore[reportMissingImports]

        return NomadBackend.from_pool(config)
    from atropos.slots.backends.local.backend import LocalBackend

    return LocalBackend(config)
