"""What a pool's configuration says of processes of this machine."""

from __future__ import annotations

from typing import ClassVar

from atropos.slots.plugins import BackendSettings


class LocalSettings(BackendSettings):
    """The local backend has no settings of its own."""

    takes_image: ClassVar[bool] = False
    gpu_containers: ClassVar[int | None] = 1
