"""The values of a compose file that have forms of their own: commands, variables, sizes, health, volumes, hosts."""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, cast, get_args

from atropos.errors import ConfigError
from atropos.tasks.format import health
from atropos.tasks.format.files import read_text
from atropos.tasks.format.service import Condition, ServiceVolume
from atropos.wire import HealthConfig

_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)(?::?-([^}]*)(?=\}))?[^}]*\}?|\$([A-Za-z_]\w*)")
_OF_HARNESS = re.compile(r"\$\{?\w*(?:LOGS|_PATH\})")
"""A volume whose places the harness fills in: its logs."""
_HARNESS = {
    **dict.fromkeys(("TEST_DIR", "T_BENCH_TEST_DIR"), "/tests"),
    "ENV_VERIFIER_LOGS_PATH": "/logs/verifier",
    "ENV_AGENT_LOGS_PATH": "/logs/agent",
    "ENV_ARTIFACTS_PATH": "/logs/artifacts",
}
"""Variables that a harness gives compose files: places in the agent's container."""
_PLACES = re.compile(r"(?:((?:\$\{[^}]*\}|\$(?!\{)|[^:$])*):)?((?:\$\{[^}]*\}|\$(?!\{)|[^:$])*)")
"""The source and the target of a volume in its short form, where a colon within `${}` parts nothing."""
_OPTIONS = {"rw", "ro", "z", "Z", "cached", "delegated", "consistent", "nocopy"}
"""Of a volume in its short form; but for `ro` they say what is so here, or nothing."""
NOWHERE = "192.0.2.1"
"""What a slot has for its host, which it can't reach: an address that is nobody's (RFC 5737)."""
_TMPFS_OPTIONS = {"size", "mode", "rw", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "noatime", "relatime"}
"""But for `mode` they bound what is bounded otherwise here, or say nothing."""


def table(value: object) -> dict[str, object]:
    """A table; empty where there is none."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def truth(value: object) -> bool:
    """Whether something is said to be so, in one of the words that compose knows."""
    return str(value).lower() in {"true", "yes", "on", "y", "1"}


def filled(text: str, where: str) -> str:
    """A value with `${NAME:-default}` replaced by the default: nothing of this machine comes into a task.

    But for places in the agent's container that a harness names.
    """

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if (place := _HARNESS.get(match[1] or match[3])) is not None:
            return place
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


def gpus(value: object, reserved: object, where: str) -> int | None:
    """How many GPUs a service has.

    Args:
        value: of `gpus`: `all`, or requests.
        reserved: the requests of `deploy.resources.reservations.devices`.
        where: the service, for messages.

    Raises:
        ConfigError: other devices are asked for, or it doesn't say how many.
    """
    asked = {
        f"{where}.gpus": [value] if value == "all" else value,
        f"{where}.deploy.resources.reservations.devices": reserved,
    }
    counts = [
        _gpus_of(table(each), at) for at, requests in asked.items() for each in cast("Sequence[object]", requests or ())
    ]
    return sum(counts) if counts else None


def _gpus_of(request: Mapping[str, object], where: str) -> int:
    capabilities = cast("Sequence[object]", request.get("capabilities") or ["gpu"])
    if "gpu" not in capabilities:
        raise ConfigError(f"{where}: {', '.join(map(str, capabilities))} can't be honoured in a slot; remove it")
    ids = request.get("device_ids")
    count = len(cast("list[object]", ids)) if isinstance(ids, list) else request.get("count")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"{where}: {'all' if count is None else count}: a slot has as many as it asks for; write how many in count"
        )
    return count


def environment(value: Mapping[str, object] | Sequence[str] | None, where: str) -> dict[str, str]:
    """Variables of a service, or of its build; those that the harness itself fills in are left to it."""
    pairs: list[tuple[str, object]]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [(name, text if equals else None) for name, equals, text in (one.partition("=") for one in value or ())]
    variables: dict[str, str] = {}
    for name, content in pairs:
        if content is None:
            raise ConfigError(f"{where}.{name}: takes the value of this machine; write the value")
        text = str(content)
        if isinstance(content, bool):
            text = text.lower()
        elif isinstance(content, float):
            text = text.removesuffix(".0")
        if not text.startswith("${T_BENCH_"):
            variables[name] = filled(text, f"{where}.{name}")
    return variables


def env_files(value: object, folder: Path, where: str) -> dict[str, str]:
    """Variables of the files that `env_file` names, of which a later one has the last word.

    Raises:
        ConfigError: one is outside of the task's folder, can't be read, or has a line that is none.
    """
    variables: dict[str, str] = {}
    for each in cast("list[object]", value) if isinstance(value, list) else [value] if value else []:
        entry = table(each) or {"path": each}
        path = _inside(folder, filled(str(entry.get("path")), where), where)
        if unknown := entry.keys() - {"path", "required"}:
            raise ConfigError(f"{where}: {min(unknown)} can't be honoured; remove it")
        if not truth(entry.get("required", True)) and not path.exists():
            continue
        for number, line in enumerate(read_text(path, "write it, or remove it").splitlines(), 1):
            text = line.strip().removeprefix("export ").lstrip()
            if text and not text.startswith("#"):
                name, content = _variable(text, f"{path}:{number}")
                variables[name] = content
    return variables


def _variable(text: str, where: str) -> tuple[str, str]:
    """A line of a file of variables, as Compose reads it."""
    match = re.fullmatch(
        r"""([\w.\[\]-]+)\s*[=:]\s*(?:'([^']*)'\s*(?:\#.*)?|"((?:[^"\\]|\\.)*)"\s*(?:\#.*)?|([^'"].*)?)""", text
    )
    if match is None:
        raise ConfigError(f"{where}: {text!r:.80} is no line like NAME=VALUE, with its quotes closed; write the value")
    name, literal, quoted, plain = match.groups()
    if literal is not None:
        return name, literal
    if quoted is not None:
        escapes = {"n": "\n", "r": "\r", "t": "\t"}
        return name, re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), filled(quoted, where))
    return name, filled(re.sub(r"(^|\s+)#.*", "", plain or "").rstrip(), where)


def words(value: str | Sequence[str], where: str) -> tuple[str, ...]:
    """A command: its words, or a text that is split into words as a shell would."""
    if not isinstance(value, str):
        return tuple(filled(word, where) for word in value)
    try:
        return tuple(shlex.split(filled(value, where)))
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r:.80}: {error}; write a list of words") from None


def healthcheck(value: object, where: str) -> HealthConfig | None:
    """What is said of a health check; None: nothing, so that the image's holds."""
    entry = table(value)
    if not entry:
        return None
    test = entry.get("test")
    if truth(entry.get("disable")) or test in ("NONE", ["NONE"]):
        return HealthConfig(test=health.NONE)
    command = ["CMD-SHELL", test] if isinstance(test, str) else test
    words = [filled(str(word), where) for word in cast("list[object]", command)] if isinstance(command, list) else []
    known = (words[:1] == ["CMD"] and len(words) > 1) or (words[:1] == ["CMD-SHELL"] and len(words) == 2)
    if command is not None and not known:
        raise ConfigError(f"{where}.test: {test!r:.80}: write CMD and words, or CMD-SHELL and a line")
    return health.described(words, entry, f"{where}.")


def dependencies(value: object, names: Sequence[str], where: str) -> dict[str, Condition]:
    """What a service waits for, of the file's services; one that need not be there is left out where it isn't."""
    conditions: dict[str, Condition] = {}
    if isinstance(value, list):
        return {str(name): "service_started" for name in cast("list[object]", value)}
    for name, entry in table(value).items():
        condition = table(entry).get("condition", "service_started")
        if condition not in get_args(Condition):
            raise ConfigError(f"{where}.{name}.condition: {condition!r:.50} is none; write service_healthy, or another")
        if name in names or truth(table(entry).get("required", True)):
            conditions[name] = cast("Condition", condition)
    return conditions


def volumes(value: Sequence[object], folder: Path, where: str, shared: Collection[str]) -> tuple[ServiceVolume, ...]:
    """What a service mounts, but for logs, which every slot has, and temporary folders, as all are here.

    Logs are what the harness mounts, and what a service mounts at /logs for itself, from wherever.

    Args:
        value: as the file says.
        folder: the task's.
        where: in which file, for messages.
        shared: see `shared_sources`.

    Raises:
        ConfigError: it is outside of the task's folder, or of another kind.
    """
    return tuple(
        volume
        for each in value
        if not _OF_HARNESS.search(_said_of(each))
        and (not _is_log(each) or _source(each) in shared)
        and (volume := _volume(each, folder, where))
    )


def shared_sources(services: Iterable[Sequence[object]]) -> set[str]:
    """The sources that several services mount."""
    users = Counter(source for mounted in services for source in {_source(each) for each in mounted})
    return {source for source, count in users.items() if source and count > 1}


def _said_of(value: object) -> str:
    """A volume as its short form says it."""
    entry = table(value)
    return f"{entry.get('source') or ''}:{entry.get('target')}" if entry else str(value)


def _source(value: object) -> str:
    """The source as the file names it, a path with a / in it; empty: there is none."""
    match = _PLACES.match(_said_of(value))
    source = (match and match[1]) or ""
    if table(value).get("type") == "bind" or source.startswith((".", "/", "~")):
        return posixpath.join("./", posixpath.normpath(source))
    return source


def _is_log(value: object) -> bool:
    """Whether a volume is mounted at /logs or below."""
    match = _PLACES.match(_said_of(value))
    target = _VARIABLE.sub(lambda variable: variable[2] or variable[0], match[2]) if match else ""
    return f"{posixpath.normpath(target)}/".startswith("/logs/")


def _volume(value: object, folder: Path, where: str) -> ServiceVolume | None:
    if isinstance(value, dict):
        entry = table(cast("object", value))
        kind, source, target = (str(entry.get(name) or "") for name in ("type", "source", "target"))
        read_only = truth(entry.get("read_only"))
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
    path = _inside(folder, source, f"{where}: {value!s:.200}")
    return ServiceVolume(f"./{path.relative_to(folder.resolve())}", target, path, read_only)


def _inside(folder: Path, source: str, where: str) -> Path:
    path = (folder / source).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{where}: is outside of {folder}, and a task gets nothing else of this machine; put what it needs there"
        )
    return path


def tmpfs(value: object, mounts: Sequence[object], where: str) -> dict[str, str]:
    """The folders that `tmpfs` and volumes of this type name, each with its mode."""
    folders: dict[str, str] = {}
    for each in cast("list[object]", value) if isinstance(value, list) else [value] if value else []:
        target, _, text = filled(str(each), where).partition(":")
        options = dict[str, str](
            (name, content) for name, _, content in (one.partition("=") for one in filter(None, text.split(",")))
        )
        if unknown := options.keys() - _TMPFS_OPTIONS:
            raise ConfigError(f"{where}: {each}: option {min(unknown)!r} can't be honoured; remove it")
        folders[target] = options.get("mode", "1777")
    for mount in map(table, mounts):
        if mount.get("type") == "tmpfs":
            mode = table(mount.get("tmpfs")).get("mode", 0o1777)
            folders[filled(str(mount.get("target")), where)] = (
                f"{mode:o}" if isinstance(mode, int) else str(mode).removeprefix("0o")
            )
    for target, mode in folders.items():
        if not posixpath.normpath(target).strip("/") or not target.startswith("/") or not re.fullmatch("[0-7]+", mode):
            raise ConfigError(f"{where}: {target:.200}, mode {mode:.20}: write a whole path, and a mode like 1777")
    return folders


def extra_hosts(value: object, where: str) -> dict[str, tuple[str, ...]]:
    """The addresses of names that a service knows beside those of the others.

    Raises:
        ConfigError: one is no address.
    """
    pairs: list[tuple[str, object]] = [*table(value).items()]
    for each in cast("list[object]", value) if isinstance(value, list) else ():
        name, _, addresses = str(each).partition("=" if "=" in str(each) else ":")
        pairs.append((name, addresses.split(",")))
    by_name: dict[str, tuple[str, ...]] = {}
    for name, entry in pairs:
        texts = [str(text) for text in cast("list[object]", entry)] if isinstance(entry, list) else [str(entry)]
        by_name[name] = (*by_name.get(name, ()), *(_address(text, f"{where}.{name}") for text in texts))
    return by_name


def _address(text: str, where: str) -> str:
    address = filled(text, where).strip("[]")
    try:
        return NOWHERE if address == "host-gateway" else str(ip_address(address))
    except ValueError:
        raise ConfigError(f"{where}: {text!r:.80} is no address; write one, or host-gateway") from None


def networks(value: object, where: str = "") -> dict[str, tuple[str, ...]]:
    """The networks of a service, each with the names that it has there beside its own.

    Raises:
        ConfigError: it is to have an address there, or another thing that slots have not.
    """
    for name, entry in table(value).items():
        if unknown := table(entry).keys() - {"aliases", "priority", "gw_priority"}:
            raise ConfigError(
                f"{where}.{name}.{min(unknown)}: can't be honoured: a slot's address is chosen for it; use names"
            )
    if isinstance(value, list):
        return {str(name): () for name in cast("list[object]", value)}
    named = {name: table(entry).get("aliases") for name, entry in table(value).items()}
    names = {name: tuple(map(str, cast("list[object]", each))) if each else () for name, each in named.items()}
    return names or {"default": ()}


def restarts(value: object, where: str) -> Literal["no", "on-failure", "always"]:
    """After which end a service is started again."""
    text = {False: "no"}.get(cast("bool", value), str(value)).partition(":")[0] if value is not None else "no"
    if text not in {"no", "on-failure", "always", "unless-stopped"}:
        raise ConfigError(f"{where}: {value!r:.50} is none; write no, on-failure or always")
    return "always" if text == "unless-stopped" else cast("Literal['no', 'on-failure', 'always']", text)
