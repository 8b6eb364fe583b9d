"""What a template's name means: what new sandboxes start from, and how they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from atropos.api.e2b.connect import Json
from atropos.api.e2b.recipes import SandboxStart
from atropos.api.e2b.templates import OWN_BASE, Templates
from atropos.errors import ConfigError
from atropos.images.reference import ImageSource
from atropos.wire import LeaseLimits

if TYPE_CHECKING:
    from atropos.slots import Snapshot


class Root(NamedTuple):
    """What a sandbox starts from; nothing: the pool's base. `limits`: what it has instead of the pool's."""

    snapshot: Snapshot | None = None
    base: str | None = None
    image: str | None = None
    limits: LeaseLimits | None = None


@dataclass(frozen=True)
class NamedSnapshot:
    """A snapshot that new sandboxes name as their template."""

    id: str
    names: tuple[str, ...]
    sandbox_id: str
    snapshot: Snapshot
    start: SandboxStart

    def info(self) -> Json:
        """As clients see it."""
        return {"snapshotID": self.id, "names": [*self.names]}


def root_of(
    template: str, snapshots: Mapping[str, NamedSnapshot], templates: Templates, bases: Mapping[str, object]
) -> tuple[Root, SandboxStart]:
    """What a template's name means among a key's snapshots and templates and the pool's bases.

    Raises:
        ConfigError: nothing that clients may name.
        RpcError: the template is not built.
    """
    if (named := snapshots.get(template)) is not None:
        return Root(named.snapshot), named.start
    if (build := templates.build_of(template)) is not None:
        return Root(image=build.image, limits=build.limits), build.start
    if template in OWN_BASE:
        return Root(), SandboxStart()
    if template in bases:
        return Root(base=template), SandboxStart()
    if template.startswith("code-interpreter"):
        raise ConfigError(
            f"template {template!r}: it has a Jupyter server of E2B's, which slots lack; use `Sandbox` of "
            "the package e2b, or name a root file system so in the pool's `bases`"
        )
    if ImageSource.parse(template).transport != "docker":  # on the server's own machine: not for clients
        raise ConfigError(
            f"template {template!r}: name `base`, a base of the pool, a snapshot, a template that was built, or an "
            "image of a registry"
        )
    return Root(image=template), SandboxStart()
