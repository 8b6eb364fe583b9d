"""What a sandbox or a build starts from by a name that is neither a snapshot's nor a template's."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from atropos.errors import ConfigError
from atropos.images.reference import ImageSource
from atropos.wire import LeaseLimits

if TYPE_CHECKING:
    from atropos.slots import Snapshot

_OWN_BASE = frozenset({"base", "e2bdev/base", "e2bdev/base:latest"})
"""What stands for the pool's own base."""


class Root(NamedTuple):
    """What a sandbox starts from; nothing: the pool's base. `limits`: what it has instead of the pool's."""

    snapshot: Snapshot | None = None
    base: str | None = None
    image: str | None = None
    limits: LeaseLimits | None = None


def is_base(name: str, bases: Container[str]) -> bool:
    """Whether a name means the pool's own base or one of its `bases`."""
    return name in _OWN_BASE or name in bases


def root_of(name: str, bases: Container[str], field: str) -> Root:
    """What a name means: a base, or an image of a registry.

    Raises:
        ConfigError: neither; it names the `field`.
    """
    if is_base(name, bases):
        return Root(base=None if name in _OWN_BASE else name)
    if ImageSource.parse(name).transport != "docker":  # on the server's own machine: not for clients
        raise ConfigError(f"{field}: {name!r}: name `base`, a base of the pool, or an image of a registry")
    return Root(image=name)
