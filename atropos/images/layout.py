"""An image in an OCI layout: its manifest, configuration and layers, read from files that nobody has checked.

Source: OCI image specification 1.1, image-layout, manifest and config.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from atropos.images.reference import check_digest
from atropos.wire import ImageInfo

MAX_JSON_BYTES = 8 << 20
"""Largest manifest or configuration that is read."""
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
"""This machine's architecture, as images name it."""


@dataclass(frozen=True)
class PulledImage:
    """An image's parts in an OCI layout.

    Attributes:
        id: SHA-256 of the configuration: what names the image.
        layers: each layer's file and the SHA-256 of its uncompressed tar, lowest first.
    """

    id: str
    config: dict[str, Any]
    layers: tuple[tuple[str, str], ...]


def read_layout(layout: Path) -> PulledImage:
    """What an OCI layout with one image holds (OCI image specification, image-layout and config).

    Raises:
        ValueError: it isn't one; says what is wrong, in one line.
    """
    try:
        return _read(layout)
    except (OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(layout: Path) -> PulledImage:
    index = _json(layout / "index.json")
    manifest = _json(_blob(layout, index["manifests"][0]["digest"]))
    digest = check_digest(manifest["config"]["digest"])
    config = _json(_blob(layout, manifest["config"]["digest"]))
    if config.get("os", "linux") != "linux":
        raise ValueError(f"it is for {config['os']!r}, not for Linux")
    machine = config.get("architecture") or MACHINE
    if machine != MACHINE:  # every program in it would end as one that can't be executed
        raise ValueError(f"it is for {machine!r:.100}, and this machine is {MACHINE!r}")
    _check_settings(config.get("config") or {})
    diffs = [check_digest(each) for each in config["rootfs"]["diff_ids"]]
    blobs = [str(_blob(layout, layer["digest"])) for layer in manifest["layers"]]
    return PulledImage(digest, config, tuple(zip(blobs, diffs, strict=True)))


def _check_settings(settings: object) -> None:
    """Refuse what no command could start with."""
    if not isinstance(settings, dict):
        raise ValueError("config: not an object")  # noqa: TRY004 (what was read is wrong, not a type here)
    for name in ("Env", "Entrypoint", "Cmd", "OnBuild", "WorkingDir", "User"):
        value = cast("dict[str, object]", settings).get(name)
        texts: object = [value] if name in {"WorkingDir", "User"} else value
        if value is not None and not (isinstance(texts, list) and all(map(_is_text, cast("list[object]", texts)))):
            raise ValueError(f"config: {name}: no valid settings of commands")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)


def _blob(layout: Path, digest: object) -> Path:
    return layout / "blobs" / "sha256" / check_digest(digest)


def _json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise TypeError(f"{path.name}: not an object")
    return cast("dict[str, object]", found)


def image_info(pulled: PulledImage, source: str, size: int) -> ImageInfo:
    """What the store keeps of an image beside its files."""
    settings: dict[str, Any] = pulled.config.get("config") or {}
    pairs = [text.partition("=") for text in settings.get("Env") or ()]
    return ImageInfo(
        id=pulled.id,
        source=source,
        bytes=size,
        env={name: value for name, equals, value in pairs if equals and name},
        workdir=settings.get("WorkingDir") or None,
        user=settings.get("User") or None,
        entrypoint=tuple(settings.get("Entrypoint") or ()),
        cmd=tuple(settings.get("Cmd") or ()),
        onbuild=tuple(settings.get("OnBuild") or ()),
    )
