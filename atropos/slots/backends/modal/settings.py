"""What a pool's configuration says of Modal."""

from __future__ import annotations

from pydantic import Field

from atropos.slots.plugins import BackendSettings


class ModalSettings(BackendSettings):
    """Settings of the Modal backend."""

    modal_cpus: float = Field(default=4.0, gt=0, description="modal: cores of a container")
