"""Health checks of containers: as Dockerfiles and compose files write them, and what holds where both do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from atropos.errors import ConfigError
from atropos.wire import HealthConfig

NONE = ("NONE",)
"""The test of a container that is to have no check."""
TIMES = ("interval", "timeout", "start_period", "start_interval")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(sorted(_UNITS, key=len, reverse=True))})")


def described(test: Sequence[str], said: Mapping[str, object], where: str) -> HealthConfig:
    """A check as a file describes it.

    Args:
        test: CMD and words, CMD-SHELL and a line, or NONE; empty: it says none.
        said: its times and `retries`.
        where: what stands before their names in messages.

    Raises:
        ConfigError: one of them is none.
    """
    times = {f"{name}_s": _seconds(said.get(name) or 0, f"{where}{name}") for name in TIMES}
    retries = str(said.get("retries") or 0)
    if not re.fullmatch(r"[0-9]{1,9}", retries):
        raise ConfigError(f"{where}retries: {retries!r:.50} is no number")
    return HealthConfig(test=tuple(test), retries=int(retries), **times)


def _seconds(value: object, where: str) -> float:
    """A time as Go writes it; a number is one of seconds."""
    if isinstance(value, int | float) and value >= 0:
        return float(value)
    text = str(value).strip()
    parts: list[tuple[str, str]] = _PART.findall(text)
    if text != "0" and (not parts or "".join(map("".join, parts)) != text):
        raise ConfigError(f"{where}: {value!r:.50} is no time; write one like 10s or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def merged(own: HealthConfig | None, image: HealthConfig | None) -> HealthConfig | None:
    """The check of a container: what a compose file says, over what the image says. None: it has none."""
    health = image if own is None else own
    if own is not None and image is not None:
        health = image.model_copy(update=own.model_dump(exclude_defaults=True))
    return health if health is not None and health.test[:1] in {("CMD",), ("CMD-SHELL",)} else None
