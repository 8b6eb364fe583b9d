"""Files of the Container Device Interface, which vendors' tools write (`nvidia-ctk cdi generate`).

Fields and rules are those of its specification 1.1.0, and of the library with which engines read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from atropos.wire.base import one_line

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")


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
    # forbid: an unknown field may be one that a device can't do without, and engines refuse it as well.
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        """A field that is null is absent, as YAML's `mounts:` with nothing after it."""
        if isinstance(data, dict):
            return {key: value for key, value in cast("dict[object, object]", data).items() if value is not None}
        return data


class SpecNode(_Object):
    """A device node."""

    path: _Path
    host_path: _Path | None = None
    type: Literal["", "b", "c", "u", "p"] = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = Field(default="", pattern="^([rwm]*|none)$")
    uid: int | None = None
    gid: int | None = None


class SpecMount(_Object):
    """What is mounted beside."""

    host_path: _Path
    container_path: _Path
    options: tuple[str, ...] = ()
    type: str = ""


class SpecHook(_Object):
    """What an engine runs while it makes a container."""

    hook_name: Literal["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"]
    path: _Path
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()
    timeout: int | None = None


class SpecEdits(_Object):
    """What a container gets."""

    env: tuple[_Variable, ...] = ()
    device_nodes: tuple[SpecNode, ...] = ()
    mounts: tuple[SpecMount, ...] = ()
    hooks: tuple[SpecHook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    net_devices: tuple[dict[str, str], ...] = ()
    intel_rdt: dict[str, Any] | None = None


class SpecDevice(_Object):
    """A device, by its name within its kind."""

    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$")
    annotations: dict[str, str] = Field(default_factory=dict)
    container_edits: SpecEdits

    @property
    def own(self) -> frozenset[tuple[str, str]]:
        """Its own nodes, and not every one's of its kind: where each is on the host, and in a container."""
        return frozenset((node.host_path or node.path, node.path) for node in self.container_edits.device_nodes)


class Spec(_Object):
    """A file: devices of one kind, and what each of them wants beside its own."""

    cdi_version: str
    kind: str = Field(pattern=r"^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")
    annotations: dict[str, str] = Field(default_factory=dict)
    devices: tuple[SpecDevice, ...] = Field(min_length=1)
    container_edits: SpecEdits = SpecEdits()

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


Listed = tuple[Spec, SpecDevice]
"""A device, and the file that it is in."""


def read_all(folders: Sequence[str]) -> tuple[dict[str, dict[str, Listed]], list[str]]:
    """Devices by kind and name, and what is wrong with files.

    Args:
        folders: a device in a later one comes before one of the same name in an earlier.
    """
    kinds: dict[str, dict[str, Listed]] = {}
    problems: list[str] = []
    twice: set[tuple[str, str]] = set()
    for folder in folders:
        here: dict[str, str] = {}
        # Not recursive, and these two suffixes alone, as engines read the folder.
        for path in sorted(Path(folder).glob("*")) if os.path.isdir(folder) else ():
            if path.suffix not in {".json", ".yaml"} or path.is_dir():
                continue
            try:
                spec = _read(path)
            except (OSError, ValueError) as error:
                # One broken file of another vendor must not take away every other device.
                problems.append(f"{path}: {error}")
                continue
            for device in spec.devices:
                name = f"{spec.kind}={device.name}"
                if name in here:
                    problems.append(f"{path}: {name} is in {here[name]} too")
                    twice.add((spec.kind, device.name))
                    continue
                here[name] = str(path)
                kinds.setdefault(spec.kind, {})[device.name] = spec, device
    for kind, device_name in twice:  # an engine takes none of them, nor one of a later folder
        del kinds[kind][device_name]
    return kinds, problems


def _read(path: Path) -> Spec:
    text = path.read_text(encoding="utf-8")
    try:
        spec = Spec.model_validate(json.loads(text) if path.suffix == ".json" else _yaml(text))
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
