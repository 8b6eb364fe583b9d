"""The base of all messages, and their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "MAX_COMMAND_BYTES",
    "MAX_FILE_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_HOSTS",
    "MAX_MEMBERS",
    "VERSION",
    "WireMessage",
]

VERSION = 10
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest WebSocket frame either end accepts, in bytes."""
MAX_FILE_BYTES = 32 * 1024 * 1024
"""Largest content of one file read or write on the wire, in bytes; larger files go in pieces (`offset`, `append`)."""
MAX_HOSTS = 256
"""Most hosts that `SetNetwork` names."""
MAX_COMMAND_BYTES = 2 * 1024 * 1024
"""Longest command, or data written to a process at once. Above the kernel's bound of an argument, a file passes it."""

MAX_MEMBERS = 32
"""Most leases that join another one."""
HostName = Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")]
"""A name that a slot is known by in the network of its group."""
ChosenId = Annotated[str, Field(min_length=8, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
"""An id that the client chooses, so that a repeated request is seen to be one."""

DEFERRED = ConfigDict(defer_build=True)
"""Builds a validator at its first use: no process uses all of them, and building them all takes a tenth of a server's
start."""


class WireMessage(BaseModel):
    """Base of all messages: frozen, unknown fields refused.

    An endless time is `Infinity`, which both ends read as JSON.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
        defer_build=True,
    )
