"""The settings of a slot pool. Each is declared once; envs inherit the declaration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator

from atropos.config import HostNames, SandboxSettings, ServerConfig, SlotSettings, one_line
from atropos.errors import ConfigError
from atropos.images.reference import ImageSource
from atropos.slots.plugins import known


def _expressions(value: object) -> object:
    """Values that are no text as HCL."""
    if not isinstance(value, Mapping):
        return value
    given = cast("Mapping[object, object]", value)
    return {name: each if isinstance(each, str) else hcl(each) for name, each in given.items()}


def hcl(value: object) -> str:
    """A value as an HCL literal: JSON, with template marks escaped."""
    return json.dumps(value).replace("${", "$${").replace("%{", "%%{")


NomadVariables = Annotated[dict[str, str], BeforeValidator(_expressions)]
"""Variables of the Nomad job: text as `nomad job run -var` takes it; numbers, booleans and lists as they are."""


def _named(image: str) -> str:
    """A name of an image."""
    try:
        ImageSource.parse(image)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("image: ")) from None
    return image


ImageName = Annotated[str, AfterValidator(_named)]
"""A source of an image, as leases name it."""
BackendName = Annotated[str, AfterValidator(known)]
"""A built-in backend, or one that an installed package registers."""


class PoolSettings(SlotSettings):
    """The settings of a pool that an env has under the same names."""

    slots_per_container: int = Field(default=10, ge=1, le=1000, description="slots in each container")
    min_containers: int = Field(default=1, ge=0, le=100_000, description="containers kept even when idle")
    max_containers: int = Field(default=10, ge=1, le=100_000, description="most containers")
    acquire_timeout_s: float = Field(default=30.0, gt=0, description="longest an acquire waits for a slot")
    start_timeout_s: float = Field(default=60.0, gt=0, description="longest the start waits for the first container")
    prepare_timeout_s: float = Field(default=1200.0, gt=0, description="longest an image may take to be prepared")
    outage_s: float = Field(
        default=900.0,
        ge=0,
        description="how long Nomad or Docker may be away, with no container left, before that is final",
    )
    slot_image: ImageName | None = Field(
        default=None,
        description="image of the leases that name none: python:3.12-slim, oci-archive:FILE …; None: the base",
    )
    idle_container_s: float = Field(default=60.0, gt=0, description="unused for this long, a container may be closed")
    lease_ttl_s: float = Field(default=60.0, gt=0, le=86_400, description="a dead client's leases end after this")
    travel_mib: int = Field(default=512, ge=0, description="larger snapshots are not copied to other containers")
    reconnect_s: float = Field(default=30.0, gt=0, description="a lost connection is tried for so long; then SlotLost")
    container_memory_mib: int | None = Field(
        default=None,
        ge=64,
        description="docker, modal and nomad: memory of a container; None: the server's and all slots' limits. Less is over-commit",
    )
    docker_host: str | None = Field(default=None, description="None: DOCKER_HOST, else the local engine")
    nomad_address: str | None = Field(default=None, description="unset or None: NOMAD_ADDR, else http://localhost:4646")
    nomad_variables: NomadVariables = Field(
        default_factory=dict,
        description="more variables of nomad/sandbox.nomad.hcl, as `nomad job run -var` takes them",
    )
    placement_s: float = Field(
        default=5.0,
        ge=0,
        description="nomad: how long the first container may be without a place before `start` fails; more where nodes are added on demand",
    )
    tls_certificate: str | None = Field(
        default=None, description="nomad: PEM file with the certificate of the sandbox ports; None: plain HTTP"
    )
    tls_key: str | None = Field(default=None, description="nomad: PEM file with the certificate's key, unencrypted")
    ssh_hosts: HostNames = Field(default=(), description="ssh: [user@]host[:port], a container each")
    ssh_python: str = Field(
        default="python3", min_length=1, description="ssh: the hosts' Python, with this version of atropos installed"
    )
    ssh_config: str | None = Field(
        default=None, description="ssh: file with users, ports, keys and known hosts; None: ~/.ssh/config"
    )
    modal_cpus: float = Field(default=4.0, gt=0, description="modal: cores of a container")
    privileged: bool = Field(default=False, description="kept for compatibility; True is refused")
    purge_job_on_start: bool = Field(default=False, description="remove the job of an earlier run first")
    purge_job_on_shutdown: bool = Field(default=True, description="remove the job at the end")

    @model_validator(mode="after")
    def _one_container_a_host(self) -> Self:
        """With ssh hosts, `max_containers` defaults to their number."""
        if self.ssh_hosts and "max_containers" not in self.model_fields_set:
            object.__setattr__(self, "max_containers", len(self.ssh_hosts))  # a frozen model takes no other way
        return self

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.max_containers < self.min_containers:
            raise ValueError(
                f"max_containers ({self.max_containers}) is less than min_containers ({self.min_containers}): "
                "raise the first or lower the second"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate, tls_key: set both, or none")
        if self.privileged:
            raise ValueError(
                "privileged: sandbox containers are never privileged (a slot needs user namespaces, not host rights); "
                "set it to False"
            )
        return self


class SlotPoolConfig(PoolSettings, SandboxSettings):
    """What a `SlotPool` is made of. Frozen; unknown fields are refused.

    Raises:
        ConfigError: a field is wrong; one line that names it and says what would be right.
    """

    backend: BackendName = Field(default="local", description="what makes containers exist: a backend's name")
    image: str = Field(
        default="atropos-sandbox:local", min_length=1, description="docker, modal and nomad: the containers' image"
    )
    job_id: str = Field(
        default="atropos-sandbox-agent-env",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$",
        description="nomad: name of the job",
    )
    images: tuple[ImageName, ...] = Field(default=(), description="images prepared when the pool starts")
    max_batch_size: int = Field(default=200, ge=1, le=10_000, description="most calls in a frame")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(one_line(error)) from None

    @classmethod
    def model_validate(cls, obj: object, **options: Any) -> Self:
        """As pydantic's, with the errors of the constructor."""
        if isinstance(obj, Mapping) and not options:
            return cls(**cast("Mapping[str, object]", obj))
        return super().model_validate(obj, **options)

    @model_validator(mode="before")
    @classmethod
    def _accept_acquire_timeout(cls, data: object) -> object:
        """`acquire_timeout` is another spelling of `acquire_timeout_s`."""
        if isinstance(data, dict) and "acquire_timeout" in data:
            values: dict[str, object] = dict(data)
            short = values.pop("acquire_timeout")
            if values.setdefault("acquire_timeout_s", short) != short:
                raise ValueError("acquire_timeout and acquire_timeout_s differ: give one of them")
            return values
        return data

    @model_validator(mode="after")
    def _check_roots(self) -> Self:
        if self.backend in {"local", "ssh"} and self.image != type(self).model_fields["image"].default:
            raise ValueError(
                f"image: it names the containers' image, and backend {self.backend!r} has no containers; "
                "set slot_image for the image that slots start from"
            )
        if self.base is not None and self.slot_image is not None:
            raise ValueError("base, slot_image: slots start from one of them; remove the other")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.tls_certificate is not None and self.backend in {"local", "docker", "modal", "singularity", "ssh"}:
            raise ValueError(f"tls_certificate: backend {self.backend!r} has no TLS; remove it, or use 'nomad'")
        return self

    def server_config(self, token: str, **changes: object) -> ServerConfig:
        """The configuration of each of this pool's sandbox servers; `changes` are fields of `ServerConfig`."""
        values: dict[str, object] = {name: getattr(self, name) for name in SandboxSettings.model_fields}
        values |= {
            "token": SecretStr(token),
            "slots": self.slots_per_container,
            "heartbeat_s": min(5.0, self.lease_ttl_s / 4),
        }
        return ServerConfig.model_validate({**values, **changes})


def server_json(config: ServerConfig) -> bytes:
    """The configuration as `python -m atropos.sandbox` reads it, its token included: never log it."""
    return config.revealed().encode()
