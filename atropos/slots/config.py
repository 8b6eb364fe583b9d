"""The settings of a slot pool. Each is declared once, a backend's beside it; envs inherit the declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)

from atropos.config import SandboxSettings, ServerConfig, SlotSettings
from atropos.errors import ConfigError
from atropos.images.manifests import MACHINE
from atropos.images.reference import ImageSource
from atropos.slots.plugins import BackendSettings, find_settings, known
from atropos.wire.base import MadeByUsers, one_line

S = TypeVar("S", bound=BackendSettings)


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


BACKEND_SETTINGS = find_settings()
"""The settings of each backend that has any."""
if TYPE_CHECKING:
    AllBackendSettings = BackendSettings
else:
    AllBackendSettings = create_model("AllBackendSettings", __base__=tuple(BACKEND_SETTINGS.values()))


class PoolSettings(AllBackendSettings, SlotSettings):
    """The settings of a pool that an env has under the same names, those of all backends among them."""

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
        description="docker, modal and nomad: memory of a container; None: the server's and all slots' limits. Less is "
        "over-commit",
    )
    architecture: Literal["amd64", "arm64"] | None = Field(
        default=None,
        description="what containers run on: others are refused, Nomad places by it, Dockerfiles are read for it; "
        "None: any, and Dockerfiles for this machine's",
    )
    privileged: bool = Field(default=False, description="kept for compatibility; True is refused")
    purge_job_on_start: bool = Field(default=False, description="remove the job of an earlier run first")
    purge_job_on_shutdown: bool = Field(default=True, description="remove the job at the end")

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.max_containers < self.min_containers:
            raise ValueError(
                f"max_containers ({self.max_containers}) is less than min_containers ({self.min_containers}): "
                "raise the first or lower the second"
            )
        if self.privileged:
            raise ValueError(
                "privileged: sandbox containers are never privileged (a slot needs user namespaces, not host rights); "
                "set it to False"
            )
        return self

    @property
    def built_for(self) -> str:
        """The architecture that Dockerfiles are read for before a container has said its own."""
        return self.architecture or MACHINE


class Quotas(MadeByUsers):
    """What one client of a pool may use; None: as much as there is. Sizes in MiB."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1, gt=0, allow_inf_nan=False, description="its part of a full pool, against others'")
    slots: int | None = Field(default=None, ge=0, description="slots at once, those that are waited for among them")
    memory_mib: int | None = Field(default=None, ge=0, description="memory of its slots together")
    cpu: float | None = Field(default=None, ge=0, description="cores of its slots together, by their limit cpu_quota")
    disk_mib: int | None = Field(default=None, ge=0, description="what its slots may write and its snapshots hold")
    snapshots: int | None = Field(default=None, ge=0, description="snapshots at once, paused sandboxes among them")
    images: int | None = Field(default=None, ge=0, description="different images a day (UTC)")
    egress_mib: int | None = Field(
        default=None,
        ge=0,
        description="bytes through the egress proxy a day (UTC), both ways; then no lease has a network",
    )


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
        kind = BACKEND_SETTINGS.get(self.backend, BackendSettings)
        if not kind.takes_image and self.image != type(self).model_fields["image"].default:
            raise ValueError(
                f"image: it names the containers' image, and backend {self.backend!r} has no containers; "
                "set slot_image for the image that slots start from"
            )
        if self.base is not None and self.slot_image is not None:
            raise ValueError("base, slot_image: slots start from one of them; remove the other")
        return self

    @model_validator(mode="after")
    def _check_other_backends(self) -> Self:
        for name, kind in BACKEND_SETTINGS.items():
            for field in kind.never_ignored:
                if name != self.backend and getattr(self, field) != kind.model_fields[field].default:
                    raise ValueError(
                        f"{field}: a setting of {name!r}, which backend {self.backend!r} lacks; remove it, or use "
                        f"{name!r}"
                    )
        return self

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        most = BACKEND_SETTINGS.get(self.backend, BackendSettings).gpu_containers
        if self.gpus and most is not None:
            if "max_containers" not in self.model_fields_set and self.min_containers <= most:
                object.__setattr__(self, "max_containers", most)  # the only way to set a field of a frozen model
            if self.max_containers > most:
                raise ValueError(
                    f"max_containers: of backend {self.backend!r}, {most} can have GPUs; set it to that, and "
                    "slots_per_container higher"
                )
        return self

    def of(self, kind: type[S]) -> S:
        """These settings as a backend's own; its defaults where it came after `atropos.slots` was imported."""
        return self if isinstance(self, kind) else kind()

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
