"""What one slot may use: the server's limits, a lease's own, and the names of those that programs reach.

A limit of slots is declared here. Where it is kept, `atropos/sandbox/host` reads it from `SlotLimits`; an env has it as
a flag (`envs/config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atropos.resources import Resources
from atropos.wire.base import MAX_MEMBERS, MadeByUsers, WireMessage

__all__ = ["LIMIT_REACHED", "LeaseLimits", "Limit", "SlotLimits"]

Limit = Literal["memory", "pids", "disk", "inodes", "time", "output", "files", "cpu"]
"""The name of the limit that stopped or truncated a program."""
LIMIT_REACHED: Mapping[Limit, str] = {
    "memory": "it used more memory than the slot has",
    "pids": "the slot's limit of processes was reached",
    "disk": "the slot's disk is full",
    "inodes": "the slot's limit of files was reached",
    "time": "the longest time of a command was reached",
    "files": "the slot's limit of open files was reached",
    "cpu": "its limit of CPU time was reached",
}
"""How a limit stopped a program, in words."""


class SlotLimits(BaseModel):
    """What one slot may use. Sizes in MiB of 1,048,576 bytes.

    A volume's pages count as the slot's memory, so `disk_mib` above `memory_mib` can't be filled: the memory limit
    ends the program that tries.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mib: int = Field(default=1024, ge=32, description="memory, its files in the volume included")
    pids: int = Field(default=256, ge=8, le=1 << 22, description="processes and threads at once")
    cpu_weight: int = Field(default=100, ge=1, le=10_000, description="share of the CPU against the other slots")
    cpu_quota: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="most cores used; None: half of the machine's, all where a server has one slot",
    )
    disk_mib: int = Field(default=512, ge=8, description="bytes the slot may write, /tmp and /dev/shm included")
    inodes: int = Field(default=262_144, ge=1000, description="files and folders the slot may make")
    open_files: int = Field(default=4096, ge=64, description="descriptors a process may hold")
    output_bytes: int = Field(  # a frame holds three of them: both streams, together and apart
        default=1_000_000, ge=1000, le=16_000_000, description="output kept of a command: its head and tail"
    )
    wall_s: float = Field(default=3600, gt=0, description="longest a command may run")

    @property
    def resources(self) -> Resources:
        """What a slot has."""
        return Resources(self.memory_mib, self.disk_mib, self.pids, self.cpu_quota or 0)

    def with_own(self, lease: LeaseLimits) -> SlotLimits:
        """The same with what a lease sets itself."""
        return self.model_copy(update=lease.model_dump(exclude_none=True, include=set(SlotLimits.model_fields)))


class LeaseLimits(MadeByUsers, WireMessage):
    """Limits of one lease instead of the server's `SlotLimits`; None: the server's."""

    memory_mib: int | None = Field(default=None, ge=32, le=1 << 30)
    pids: int | None = Field(default=None, ge=8, le=1 << 22)
    cpu_weight: int | None = Field(default=None, ge=1, le=10_000)
    cpu_quota: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    disk_mib: int | None = Field(default=None, ge=8, le=1 << 30)
    inodes: int | None = Field(default=None, ge=1000)
    wall_s: float | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=1, le=1000)
    gpu_types: tuple[str, ...] = Field(default=(), max_length=64, description="any of these will do; empty: every type")
    members: tuple[LeaseLimits, ...] = Field(
        default=(), max_length=MAX_MEMBERS, description="of leases that will join it, whose room is kept for them"
    )

    @model_validator(mode="after")
    def _check_types(self) -> LeaseLimits:
        if self.gpu_types and self.gpus is None:
            raise ValueError("gpu_types: say in gpus how many of them")
        if any(each.members or each.gpus for each in self.members):
            raise ValueError("members: have neither members nor gpus")
        return self

    @property
    def resources(self) -> Resources:
        """What it asks for; what it leaves to the server is none."""
        return Resources(
            self.memory_mib or 0, self.disk_mib or 0, self.pids or 0, cpus=self.cpu_quota or 0, gpus=self.gpus or 0
        )
