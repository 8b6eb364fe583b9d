"""What a pool's configuration says of Nomad."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from atropos.slots.plugins import BackendSettings


def _expressions(value: object) -> object:
    """Values that are no text as HCL."""
    if not isinstance(value, Mapping):
        return value
    mapping = cast("Mapping[object, object]", value)
    return {name: each if isinstance(each, str) else hcl(each) for name, each in mapping.items()}


def hcl(value: object) -> str:
    """A value as an HCL literal: JSON, with template marks escaped."""
    return json.dumps(value).replace("${", "$${").replace("%{", "%%{")


Variables = Annotated[dict[str, str], BeforeValidator(_expressions)]
"""Variables of the job: text as `nomad job run -var` takes it; numbers, booleans and lists as they are."""


class NomadSettings(BackendSettings):
    """Settings of the Nomad backend."""

    never_ignored: ClassVar[tuple[str, ...]] = ("tls_certificate",)

    nomad_address: str | None = Field(default=None, description="unset or None: NOMAD_ADDR, else http://localhost:4646")
    nomad_variables: Variables = Field(
        default_factory=dict,
        description="more variables of nomad/sandbox.nomad.hcl, as `nomad job run -var` takes them",
    )
    placement_s: float = Field(
        default=5.0,
        ge=0,
        description="nomad: how long the first container may be without a place before `start` fails; more where nodes "
        "are added on demand",
    )
    tls_certificate: str | None = Field(
        default=None, description="nomad: PEM file with the certificate of the sandbox ports; None: plain HTTP"
    )
    tls_key: str | None = Field(default=None, description="nomad: PEM file with the certificate's key, unencrypted")

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate, tls_key: set both, or none")
        return self
