"""The backends and their settings: the built-in ones, and those that installed packages register as entry points.

A backend's settings are a model beside it. A pool, and so an env, has the fields of all of them; what is installed
later than `atropos.slots` is imported has none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

log = logging.getLogger("atropos.slots")

BACKENDS = "atropos.backends"
"""An entry point of this group is a backend's name, and what makes one of a `SlotPoolConfig`."""
SETTINGS = "atropos.backend_settings"
"""An entry point of this group is a backend's name, and its `BackendSettings`."""


class BackendSettings(BaseModel):
    """Base of a backend's settings: fields with defaults and descriptions, named `BACKEND_option`.

    Importing the module must cost little and need nothing that only the backend itself does.

    Attributes:
        takes_image: whether its containers have an image, which the pool's `image` names.
        gpu_containers: how many containers can have GPUs: those of one machine would all have the same; None: as many
            as there are.
        never_ignored: fields that a pool of another backend refuses, since it would be less safe than they promise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    takes_image: ClassVar[bool] = True
    gpu_containers: ClassVar[int | None] = None
    never_ignored: ClassVar[tuple[str, ...]] = ()


def _built_in(group: str, **objects: str) -> dict[str, EntryPoint]:
    """Listed here and not in the package's metadata, so that a source tree that is not installed has them too."""
    return {name: EntryPoint(name, f"atropos.slots.backends.{name}.{what}", group) for name, what in objects.items()}


BUILT_IN = _built_in(
    BACKENDS,
    local="backend:LocalBackend",
    docker="backend:DockerBackend",
    ssh="backend:SshBackend",
    modal="backend:ModalBackend",
    singularity="backend:SingularityBackend",
    nomad="backend:NomadBackend",
)
_BUILT_IN_SETTINGS = _built_in(
    SETTINGS,
    local="settings:LocalSettings",
    docker="settings:DockerSettings",
    nomad="settings:NomadSettings",
    ssh="settings:SshSettings",
    modal="settings:ModalSettings",
)
_unusable: dict[str, str] = {}
"""Backends whose settings can't be used, and why."""


def find(name: str) -> EntryPoint:
    """The backend of a name; nothing of it is imported yet.

    Raises:
        ValueError: there is none, which says which there are; or its settings can't be used.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in _unusable:
        raise ValueError(_unusable[name])
    others = {each.name: each for each in entry_points(group=BACKENDS)}
    if name in others:
        return others[name]
    *most, last = [repr(each) for each in (*sorted(others), *BUILT_IN)]
    raise ValueError(f"input should be {', '.join(most)} or {last}")


def known(name: str) -> str:
    """The name, where there is a backend of it. Raises as `find`."""
    return find(name).name


def find_settings() -> Mapping[str, type[BackendSettings]]:
    """The settings of each backend that has any. One that can't be used is logged, and its backend refused."""
    models: dict[str, type[BackendSettings]] = {}
    for entry in (*_BUILT_IN_SETTINGS.values(), *entry_points(group=SETTINGS)):
        if entry.name in models:
            continue
        try:
            kind = entry.load()
        except Exception as error:
            why = f"can't be loaded: {error}"
        else:
            why = "" if entry.name in _BUILT_IN_SETTINGS else _problem(entry.name, kind)
            if not why:
                models[entry.name] = kind
        if why:
            _unusable[entry.name] = f"the settings of backend {entry.name!r} ({entry.value}) {why}"
            log.warning("%s", _unusable[entry.name])
    return models


def _problem(name: str, kind: object) -> str:
    """Why a package's settings can't be used; empty where they can."""
    if not (isinstance(kind, type) and issubclass(kind, BackendSettings)):
        return "are no BackendSettings"
    prefix = f"{name.replace('-', '_')}_"
    others = [field for field in kind.model_fields if not field.startswith(prefix)]
    required = [field for field, info in kind.model_fields.items() if info.is_required()]
    if others:
        return f"have a field {others[0]!r}: its name must begin with {prefix!r}"
    return f"have a field without a default: {required[0]!r}" if required else ""
