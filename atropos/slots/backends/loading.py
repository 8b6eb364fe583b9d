"""From a backend's name to the backend; only its own dependencies are imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atropos.errors import ConfigError
from atropos.slots.backends.base import Backend
from atropos.slots.backends.survey import Survey
from atropos.slots.config import SlotPoolConfig
from atropos.slots.plugins import find

EXTRAS = {"docker", "modal", "nomad", "ssh"}
"""Built-in backends whose dependencies are an extra of the same name."""


def make_backend(config: SlotPoolConfig) -> Backend:
    """The backend that a pool's configuration names.

    Raises:
        ConfigError: it can't be imported, or its entry point does not return a backend.
    """
    backend = load("backend", config.backend)(config)
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"backend: {config.backend!r} ({find(config.backend).value}) makes a {type(backend).__name__}, not a "
            "Backend"
        )
    return backend


async def open_survey(backend: str, job_id: str, *, address: str | None) -> Survey:
    """What an operator sees of a pool's containers, from another process than the pool's.

    Args:
        backend: a backend's name.
        job_id: the pool's `sandbox_job_id`.
        address: of the engine; None: the usual place.

    Raises:
        ConfigError: no such backend, or its containers can't be found from another process.
        BackendUnavailable: the engine does not answer.
    """
    try:
        make = load("--backend", backend)
    except ValueError as error:
        raise ConfigError(str(error) if isinstance(error, ConfigError) else f"--backend {backend!r}: {error}") from None
    if not (isinstance(make, type) and issubclass(make, Backend)):
        raise ConfigError(f"--backend {backend!r}: its entry point is no Backend, which could be asked")
    return await make.survey(job_id, address)


def load(setting: str, name: str) -> Callable[[SlotPoolConfig], Any]:
    """What makes a backend.

    Raises:
        ValueError: there is none of this name.
        ConfigError: it can't be imported.
    """
    entry = find(name)
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        cure = f"; pip install 'atropos[{entry.name}]'" if entry.name in EXTRAS else ""
        raise ConfigError(f"{setting}: {name!r} ({entry.value}) can't be loaded: {error}{cure}") from error
