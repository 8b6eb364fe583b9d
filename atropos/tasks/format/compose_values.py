"""The values of a compose file that have forms of their own: commands, variables, sizes, times, health, volumes."""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from atropos.errors import ConfigError
from atropos.tasks.format.config import Healthcheck
from atropos.tasks.format.service import Condition, ServiceVolume

_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)(?::?-([^}]*)(?=\}))?[^}]*\}?|\$([A-Za-z_]\w*)")
_OF_HARNESS = re.compile(r"\$\{?\w*(?:LOGS|_PATH\})")
"""A volume whose places the harness fills in: its logs."""
_TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d*\.?\d+)s)?(?:(\d+)ms)?(?:(\d+)us)?")
_TIMES = {"interval": 30.0, "timeout": 30.0, "start_period": 0.0, "start_interval": 5.0}
_OPTIONS = {"rw", "ro", "z", "Z", "cached", "delegated", "consistent", "nocopy"}
"""Of a volume in its short form; but for `ro` they say what is so here, or nothing."""


def table(value: object) -> dict[str, object]:
    """A table; empty where there is none."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def filled(text: str, where: str) -> str:
    """A value with `${NAME:-default}` replaced by the default: nothing of this machine comes into a task."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[2] is None or "$" in match[2]:
            raise ConfigError(f"{where}: {match[0]:.80} is not given to tasks; write the value, or a plain default")
        return match[2]

    return _VARIABLE.sub(one, text)


def number(value: object, where: str) -> float | None:
    """A number, or a size in bytes; None where the harness is to fill it in."""
    if value is None or str(value).startswith("$"):
        return None
    match = re.fullmatch(r"(\d*\.?\d+)\s*([bkmgt]?)i?b?", str(value).strip(), re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ConfigError(f"{where}: {value!r:.50} is no size; write one like 2 or 512m")
    return float(match[1]) * (1 << 10 * "bkmgt".find(match[2].lower()) if match[2] else 1)


def environment(value: Mapping[str, object] | Sequence[str] | None, where: str) -> dict[str, str]:
    """Variables of the service; those that the harness itself fills in are left to it."""
    pairs: list[tuple[str, object]]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [(name, text if equals else None) for name, equals, text in (one.partition("=") for one in value or ())]
    variables: dict[str, str] = {}
    for name, content in pairs:
        if content is None:
            raise ConfigError(f"{where}.environment.{name}: takes the value of this machine; write the value")
        text = str(content).lower() if isinstance(content, bool) else str(content)
        if not text.startswith("${T_BENCH_"):
            variables[name] = filled(text, f"{where}.environment.{name}")
    return variables


def words(value: str | Sequence[str], where: str) -> tuple[str, ...]:
    """A command: its words, or a text that is split into words as a shell would."""
    if not isinstance(value, str):
        return tuple(filled(word, where) for word in value)
    try:
        return tuple(shlex.split(filled(value, where)))
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r:.80}: {error}; write a list of words") from None


def healthcheck(value: object, where: str) -> Healthcheck | None:
    """A health check; None: there is none, or it is disabled."""
    said = table(value)
    test = said.get("test")
    if not said or said.get("disable") is True or test in ("NONE", ["NONE"]):
        return None
    if isinstance(test, list):
        kind, *rest = [str(word) for word in cast("list[object]", test)] or [""]
        if kind == "CMD" and rest:
            command = shlex.join(filled(word, where) for word in rest)
        elif kind == "CMD-SHELL" and len(rest) == 1:
            command = filled(rest[0], where)
        else:
            raise ConfigError(f"{where}.test: begins with {kind!r:.50}; write CMD and words, or CMD-SHELL and a line")
    elif isinstance(test, str):
        command = filled(test, where)
    else:
        raise ConfigError(f"{where}.test: is missing; write a command")
    times = {name: _seconds(said.get(name, default), f"{where}.{name}") for name, default in _TIMES.items()}
    retries = said.get("retries", 3)
    if not isinstance(retries, int) or retries < 0:
        raise ConfigError(f"{where}.retries: {retries!r:.50} is no number")
    return Healthcheck(
        command=command,
        interval_sec=times["interval"] or _TIMES["interval"],
        timeout_sec=times["timeout"] or _TIMES["timeout"],
        start_period_sec=times["start_period"],
        start_interval_sec=times["start_interval"],
        retries=retries or 3,
    )


def _seconds(value: object, where: str) -> float:
    if isinstance(value, int | float):
        return float(value)
    match = _TIME.fullmatch(str(value).strip())
    if match is None or not any(match.groups()):
        raise ConfigError(f"{where}: {value!r:.50} is no time; write one like 10s or 1m30s")
    parts = [float(each or 0) for each in match.groups()]
    return sum(part * unit for part, unit in zip(parts, (3600, 60, 1, 1e-3, 1e-6), strict=True))


def dependencies(value: object, names: Sequence[str], where: str) -> dict[str, Condition]:
    """What a service waits for, of the file's services; one that need not be there is left out where it isn't."""
    conditions: dict[str, Condition] = {}
    if isinstance(value, list):
        return {str(name): "service_started" for name in cast("list[object]", value)}
    for name, said in table(value).items():
        condition = table(said).get("condition", "service_started")
        if condition not in get_args(Condition):
            raise ConfigError(f"{where}.{name}.condition: {condition!r:.50} is none; write service_healthy, or another")
        if name in names or table(said).get("required", True):
            conditions[name] = cast("Condition", condition)
    return conditions


def volumes(value: Sequence[object], folder: Path, where: str) -> tuple[ServiceVolume, ...]:
    """What a service mounts, but for the harness's logs, which every slot has, and temporary folders, as all are here.

    Raises:
        ConfigError: it is outside of the task's folder, or of another kind.
    """
    return tuple(
        found for each in value if not _OF_HARNESS.search(_said_of(each)) and (found := _volume(each, folder, where))
    )


def _said_of(value: object) -> str:
    """A volume as its short form says it."""
    said = table(value)
    return f"{said.get('source', '')}:{said.get('target')}" if said else str(value)


def _volume(value: object, folder: Path, where: str) -> ServiceVolume | None:
    if isinstance(value, dict):
        said = table(cast("object", value))
        kind, source, target = (str(said.get(name) or "") for name in ("type", "source", "target"))
        read_only = said.get("read_only") is True
    else:
        *source_and, target = parts = filled(str(value), where).split(":")
        options = set[str]()
        if len(parts) == 3:
            source_and, target, options = [parts[0]], parts[1], set(parts[2].split(","))
        source, read_only = ":".join(source_and), "ro" in options
        kind = "bind" if source.startswith((".", "/", "~")) else "volume"
        if unknown := options - _OPTIONS:
            raise ConfigError(f"{where}: {value}: option {min(unknown)!r} can't be honoured; remove it")
    if (
        not posixpath.normpath(target).strip("/")
        or not target.startswith("/")
        or kind not in {"bind", "volume", "tmpfs"}
    ):
        raise ConfigError(f"{where}: {value!s:.200}: write SOURCE:/TARGET, where SOURCE is a name, or ./ and a path")
    target = posixpath.normpath(target)
    if kind == "tmpfs" or not source:
        return None
    if kind == "volume":
        return ServiceVolume(source, target, None, read_only)
    path = (folder / source).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{where}: {value!s:.200}: is outside of {folder}, and a task gets nothing else of this machine; "
            "put what it needs there"
        )
    return ServiceVolume(f"./{path.relative_to(folder.resolve())}", target, path, read_only)


def networks(value: object) -> dict[str, tuple[str, ...]]:
    """The networks of a service, each with the names that it has there beside its own."""
    if isinstance(value, list):
        return {str(name): () for name in cast("list[object]", value)}
    named = {name: table(said).get("aliases") for name, said in table(value).items()}
    found = {name: tuple(map(str, cast("list[object]", each))) if each else () for name, each in named.items()}
    return found or {"default": ()}


def restarts(value: object, where: str) -> Literal["no", "on-failure", "always"]:
    """After which end a service is started again."""
    text = {False: "no"}.get(cast("bool", value), str(value)).partition(":")[0] if value is not None else "no"
    if text not in {"no", "on-failure", "always", "unless-stopped"}:
        raise ConfigError(f"{where}: {value!r:.50} is none; write no, on-failure or always")
    return "always" if text == "unless-stopped" else cast("Literal['no', 'on-failure', 'always']", text)
