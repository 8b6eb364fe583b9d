"""The base of all messages, and their bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from atropos.errors import ConfigError

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


def is_secret(setting: str) -> bool:
    """Whether a setting's value is never shown, by its name."""
    return setting in {"api_key", "tls", "token"} or setting.endswith("_token")


def one_line(error: ValidationError, space: str = "", *, shown: bool = True) -> str:
    """A validation error in one line: each setting, what is wrong with it, and what was given.

    Args:
        error: of a model of settings.
        space: what goes before each setting's name.
        shown: whether it may say what was given.
    """
    parts: list[str] = []
    for item in error.errors(include_url=False):
        where = ".".join([*filter(None, [space]), *map(str, item["loc"])])
        text = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        text = text.replace("a valid tuple", "a list")
        if item["type"] == "extra_forbidden":
            text = "no such setting"
        elif item["loc"] and item["type"] != "missing":
            hidden = isinstance(item["input"], SecretStr) or is_secret(str(item["loc"][-1]))
            got = f" (got {'' if hidden else item['input']!r:.80})" if shown else ""
            text = f"{text[:1].lower()}{text[1:]}{got}"
        elif not item["loc"] and (":" in text or "(" in text):  # it already begins with a setting's name
            where, text = "", f"{space}.{text}" if space else text
        parts.append(f"{where}: {text}" if where else text)
    return "; ".join(parts)


class MadeByUsers(BaseModel):
    """Base of models that users of the package make.

    Raises:
        ConfigError: a field is wrong; one line that names it and says what would be right. One that is a part of
            another model fails as pydantic's own do.
    """

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            shown = not self.model_config.get("hide_input_in_errors", False)
            raise ConfigError(one_line(error, shown=shown)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic makes parts of others without it
