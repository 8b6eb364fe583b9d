"""Devices as the Container Device Interface describes them, in files of vendors' tools (`nvidia-ctk cdi generate`).

Fields and rules are those of its specification 1.1.0. Of what a device wants, a slot gets the nodes, the files that it
wants read-only, the variables, the links and the cache of libraries. No hook is run: those of NVIDIA's tool are read,
and what they would do is done inside the slot, by its own programs. What can't be had is refused by name.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from atropos.config import one_line
from atropos.errors import ConfigError
from atropos.sandbox.host.files.root_changer import Bind

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
ALL = "all"
"""The device that nvidia-ctk adds for all others together."""
NEEDLESS_HOOKS = frozenset(
    ("chmod", "disable-device-node-modification", "enable-cuda-compat", "update-application-profile")
)
"""Hooks of NVIDIA's tool that a slot does without: its nodes can't be changed; the others are for graphics, and for
images whose CUDA is newer than the driver."""


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/"):
        raise ValueError("it must be a whole path, from /")
    return path


def _variable(text: str) -> str:
    if text.find("=") < 1:
        raise ValueError("it must be NAME=VALUE")
    return text


_Path = Annotated[str, AfterValidator(_absolute)]
_Variable = Annotated[str, AfterValidator(_variable)]


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class _Node(_Object):
    path: _Path
    host_path: _Path | None = None
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class _Mount(_Object):
    host_path: _Path
    container_path: _Path
    options: tuple[str, ...] = ()
    type: str = ""


class _Hook(_Object):
    hook_name: str
    path: _Path
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()
    timeout: int | None = None


class _Edits(_Object):
    env: tuple[_Variable, ...] = ()
    device_nodes: tuple[_Node, ...] = ()
    mounts: tuple[_Mount, ...] = ()
    hooks: tuple[_Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()  # who may open a node is checked at the start, whatever groups there are
    net_devices: tuple[dict[str, str], ...] = ()
    intel_rdt: dict[str, Any] | None = None


class _Device(_Object):
    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$")
    annotations: dict[str, str] = Field(default_factory=dict)
    container_edits: _Edits


class _Spec(_Object):
    cdi_version: str
    kind: str = Field(pattern=r"^[A-Za-z]([\w.-]*[A-Za-z0-9])?/[A-Za-z]([\w.-]*[A-Za-z0-9])?$")
    annotations: dict[str, str] = Field(default_factory=dict)
    devices: tuple[_Device, ...] = Field(min_length=1)
    container_edits: _Edits = _Edits()

    def check_version(self) -> None:
        """Check that it has nothing that came after its version, as engines do."""
        declared = self.cdi_version.removeprefix("v")
        if declared not in VERSIONS:
            raise ValueError(f"cdiVersion: {self.cdi_version!r}: known are {', '.join(VERSIONS)}")
        edits = [self.container_edits, *(device.container_edits for device in self.devices)]
        rdt = [key for each in edits for key in each.intel_rdt or ()]
        since = {
            "0.4.0": any(mount.type for each in edits for mount in each.mounts),
            "0.5.0": any(node.host_path for each in edits for node in each.device_nodes)
            or any(device.name[0].isdigit() for device in self.devices),
            "0.6.0": bool(self.annotations)
            or any(device.annotations for device in self.devices)
            or "." in self.kind.partition("/")[2],
            "0.7.0": any(each.intel_rdt is not None or each.additional_gids for each in edits),
            "1.1.0": any(each.net_devices for each in edits) or not {"schemata", "enableMonitoring"}.isdisjoint(rdt),
        }
        needed = max((version for version, used in since.items() if used), default=declared, key=VERSIONS.index)
        if VERSIONS.index(needed) > VERSIONS.index(declared):
            raise ValueError(f"cdiVersion: {declared} has not all that it uses; at least {needed} is needed")


@dataclass(frozen=True)
class Device:
    """What a slot gets with one device.

    Attributes:
        name: KIND=NAME.
        own: device nodes that are this device's, and not every one's of its kind.
        binds: files and nodes.
        env: variables of its programs.
        links: symbolic links, as (target, path).
        libraries: folders for the cache of libraries.
    """

    name: str
    own: frozenset[str]
    binds: tuple[Bind, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ()


def find(folders: Sequence[str], wanted: Sequence[str], count: int) -> list[Device]:
    """The first `count` devices among the wanted ones that this machine has.

    Args:
        folders: where specifications are; one in a later folder comes before one of the same device in an earlier.
        wanted: KIND=NAME, or KIND for all of that kind: each once, whatever names it has.
        count: how many there must be.

    Raises:
        ConfigError: there are fewer, or one of them wants what no slot can have.
    """
    specs, problems = _read_all(folders)
    devices: list[Device] = []
    for name in wanted:
        kind, _, device = name.partition("=")
        named = [each for each in specs.get(kind, {}).values() if device in {"", each[1].name}]
        if not device:
            devices += _alone([_device(*each) for each in named if each[1].name != ALL and _present(each[1])])
        else:
            devices += [_device(*each) for each in named]
    if len(devices) < count:
        has = ", ".join(each.name for each in devices) or "none"
        why = "".join(f"; {problem}" for problem in problems)
        raise ConfigError(
            f"gpus: {count} wanted; of gpu_devices ({', '.join(wanted)}) this machine has {has}, by the files in "
            f"{' and '.join(folders)}{why}"
        )
    return devices[:count]


def _alone(devices: Sequence[Device]) -> list[Device]:
    """Devices that are no part of another: second names of the same one go, and cards that are also there in parts."""
    return [
        each
        for number, each in enumerate(devices)
        if not any(
            each.own < other.own or (each.own == other.own and before < number) for before, other in enumerate(devices)
        )
    ]


def _read_all(folders: Sequence[str]) -> tuple[dict[str, dict[str, tuple[_Spec, _Device]]], list[str]]:
    """Devices by kind and name, and what is wrong with files."""
    kinds: dict[str, dict[str, tuple[_Spec, _Device]]] = {}
    problems: list[str] = []
    for folder in folders:
        here: dict[str, str] = {}
        for path in sorted(Path(folder).glob("*")) if os.path.isdir(folder) else ():
            if path.suffix not in {".json", ".yaml"} or path.is_dir():
                continue
            try:
                spec = _read(path)
            except (OSError, ValueError) as error:
                problems.append(f"{path}: {error}")
                continue
            for device in spec.devices:
                name = f"{spec.kind}={device.name}"
                if name in here:  # an engine takes neither
                    problems.append(f"{path}: {name} is in {here[name]} too")
                    kinds[spec.kind].pop(device.name, None)
                    continue
                here[name] = str(path)
                kinds.setdefault(spec.kind, {})[device.name] = spec, device
    return kinds, problems


def _read(path: Path) -> _Spec:
    text = path.read_text(encoding="utf-8")
    try:
        spec = _Spec.model_validate(json.loads(text) if path.suffix == ".json" else _yaml(text))
    except ValidationError as error:
        raise ValueError(one_line(error)) from None
    spec.check_version()
    return spec


def _yaml(text: str) -> object:
    try:
        import yaml  # few servers need it
    except ImportError:
        raise ValueError("PyYAML is not installed: install it, or write the file as JSON (--format=json)") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _present(device: _Device) -> bool:
    """Whether its nodes are here: a container has only some of its machine's."""
    return all(_source(node.host_path, node.path) for node in device.container_edits.device_nodes)


def _source(host: str | None, inside: str) -> str | None:
    """Where this server finds it: on the host, or where an engine has put it into the server's own container."""
    return next((path for path in (host, inside) if path is not None and os.path.exists(path)), None)


def _device(spec: _Spec, device: _Device) -> Device:
    name = f"{spec.kind}={device.name}"
    edits = (spec.container_edits, device.container_edits)
    links: list[tuple[str, str]] = []
    libraries: list[str] = []
    for each in edits:
        if each.net_devices or each.intel_rdt is not None:
            raise ConfigError(f"gpus: {name} wants a network interface or Intel RDT, which no slot has")
        for hook in each.hooks:
            _read_hook(name, hook, links, libraries)
    nodes = [_node(name, node) for each in edits for node in each.device_nodes]
    files = [bind for each in edits for mount in each.mounts for bind in _file(name, mount)]
    by_target = {bind.target: bind for bind in (*nodes, *files)}
    return Device(
        name,
        frozenset(node.path for node in device.container_edits.device_nodes),
        tuple(by_target[target] for target in sorted(by_target)),
        tuple((key, value) for each in edits for key, _, value in (text.partition("=") for text in each.env)),
        tuple(dict.fromkeys(links)),
        tuple(dict.fromkeys(libraries)),
    )


def _node(name: str, node: _Node) -> Bind:
    source = _source(node.host_path, node.path)
    if source is None or not (stat.S_ISCHR(mode := os.stat(source).st_mode) or stat.S_ISBLK(mode)):
        raise ConfigError(f"gpus: {name}: {node.host_path or node.path} is no device node of this machine")
    if not os.access(source, os.R_OK | os.W_OK):
        raise ConfigError(
            f"gpus: {name}: {source} has mode {stat.S_IMODE(mode):o}: a slot's users, who are none of the host's, "
            "can't open it; "
            'give it MODE="0666" in a udev rule'
        )
    return Bind(source, node.path, device=True)


def _file(name: str, mount: _Mount) -> Iterator[Bind]:
    """What a slot gets of a mount: nothing writable, which all slots and the host would share (NVIDIA's sockets)."""
    if "ro" not in mount.options:
        return
    source = _source(mount.host_path, mount.container_path)
    if source is None or mount.type not in {"", "none", "bind"}:
        raise ConfigError(f"gpus: {name}: there is no {mount.host_path} to mount at {mount.container_path}")
    yield Bind(source, mount.container_path)


def _read_hook(name: str, hook: _Hook, links: list[tuple[str, str]], libraries: list[str]) -> None:
    """What a hook would do: add its links and its folders of libraries."""
    arguments = list(hook.args[1:])
    values = [value for flag in ("link", "folder") for value in _values(arguments, flag)]
    if "create-symlinks" in arguments:
        pairs = [re.fullmatch(r"(.+)::(/.+)", value) for value in values]
        links += [(pair[1], pair[2]) for pair in pairs if pair is not None]
    elif "update-ldcache" in arguments:
        libraries += values
    elif NEEDLESS_HOOKS.isdisjoint(arguments):
        raise ConfigError(
            f"gpus: {name}: the hook {' '.join([hook.path, *arguments])} is not run for a slot; take it out of the "
            "file if the device works without"
        )


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """The values of a flag, as `--flag VALUE` or `--flag=VALUE`."""
    for number, text in enumerate(arguments):
        if text == f"--{flag}" and number + 1 < len(arguments):
            yield arguments[number + 1]
        elif text.startswith(f"--{flag}="):
            yield text.partition("=")[2]
