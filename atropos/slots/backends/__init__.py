"""Backends, which make containers: local processes, ssh, Docker, Modal, Singularity, Nomad, and those of other packages."""

from __future__ import annotations

from atropos.errors import ConfigError
from atropos.slots.backends.base import Backend
from atropos.slots.config import SlotPoolConfig
from atropos.slots.plugins import find

EXTRAS = {"modal", "ssh"}
"""Built-in backends whose dependencies are an extra of the same name."""


def make_backend(config: SlotPoolConfig) -> Backend:
    """The backend that a pool's configuration names; only its own dependencies are imported.

    Raises:
        ConfigError: it can't be imported, or its entry point does not return a backend.
    """
    entry = find(config.backend)
    try:
        make = entry.load()
    except (ImportError, AttributeError) as error:
        cure = f"; pip install 'atropos[{entry.name}]'" if entry.name in EXTRAS else ""
        raise ConfigError(f"backend: {config.backend!r} ({entry.value}) can't be loaded: {error}{cure}") from error
    backend = make(config)
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"backend: {config.backend!r} ({entry.value}) makes a {type(backend).__name__}, not a Backend"
        )
    return backend
