"""Which image is meant, by manifests and indices from strangers. Plain data, no I/O; standard library only.

Sources: OCI image specification 1.1, index and manifest; Docker image manifest V2, schema 2; containerd,
platforms.Normalize.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, cast

from atropos.images.reference import check_digest

# Docker's registry takes manifests of up to 4 MiB; configurations with long histories are larger.
MAX_JSON_BYTES = 8 << 20
"""Largest manifest or configuration that is read."""
MAX_DEPTH = 8
"""Indices that are followed from one to the next."""
_ALIASES = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
MACHINE = _ALIASES.get(os.uname().machine, os.uname().machine)
"""This machine's architecture, as images name it."""
_ANY_MACHINE = {("amd64", "v1"), ("arm64", "v8"), ("arm64", "8")}
"""Variants that every machine of an architecture is."""
_LEVELS = {("amd64", "v2"), ("amd64", "v3"), ("amd64", "v4")}
"""Variants that stand for newer instructions, which an image may use or not."""
NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
"""Annotations that name an image of a layout; the second is BuildKit's and Docker's."""
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.v1+json",
)
"""Media types of what may name an image; the last one is refused in a sentence."""
SCHEMA_1 = "its manifest is one of Docker's schema 1, which Docker itself reads no more: push it again"


def parse(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none, or too large.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{what}: larger than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: not an object")  # noqa: TRY004 (it was read)
    return cast("dict[str, Any]", value)


def objects(container: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """A list of objects; an absent one is empty.

    Raises:
        ValueError: it is something else.
    """
    value: object = container.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in cast("list[object]", value)):
        raise ValueError(f"{key}: no list of objects")
    return cast("list[dict[str, Any]]", value)


def architecture(text: str) -> str:
    """An architecture's one name."""
    return _ALIASES.get(text, text)


def is_for(platform: str, machine: str) -> bool:
    """Whether a platform, such as `linux/arm64/v8`, `linux/amd64/v2` or `arm64`, is that of an architecture."""
    name, _, variant = platform.lower().removeprefix("linux").removeprefix("/").partition("/")
    name = architecture(name)
    return name in {"", machine} and (not variant or (name, variant) in _ANY_MACHINE | _LEVELS)


def is_index(manifest: dict[str, Any]) -> bool:
    """Whether it names manifests instead of layers."""
    return "manifests" in manifest


def config_digest(manifest: dict[str, Any]) -> str:
    """The digest (hexadecimal) of the configuration that a manifest names.

    Raises:
        ValueError: it names none.
    """
    if manifest.get("schemaVersion") == 1:
        raise ValueError(SCHEMA_1)
    config: object = manifest.get("config")
    if not isinstance(config, dict):
        raise ValueError("its manifest names no configuration")  # noqa: TRY004 (it was read)
    return check_digest(cast("dict[str, Any]", config).get("digest"))


def chosen(manifests: list[dict[str, Any]]) -> str:
    """The digest (hexadecimal) of the manifest for this machine: of several one without a variant, else the first.

    What names no platform comes last: its configuration says what it is for.

    Raises:
        ValueError: there is none.
    """
    # Attestations of BuildKit are in the index, too, for `unknown/unknown`, which ranks as None.
    ranked = [(rank, each) for each in manifests if (rank := _rank(each.get("platform"))) is not None]
    if not ranked:
        raise ValueError(f"it has no image for linux/{MACHINE}")
    # min keeps the first of equals, as containerd and Docker do.
    return check_digest(min(ranked, key=lambda each: each[0])[1].get("digest"))


def _rank(platform: object) -> int | None:
    if platform is None:
        return 2
    if not isinstance(platform, dict):
        return None
    on = cast("dict[str, object]", platform)
    machine, variant = architecture(str(on.get("architecture") or MACHINE)), str(on.get("variant") or "")
    if on.get("os") not in {None, "", "linux"} or machine != MACHINE:
        return None
    return 0 if not variant or (machine, variant) in _ANY_MACHINE else 1


def named(index: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The entries of a layout's index that a name means: several are one image for several machines.

    Without a name: all.

    Raises:
        ValueError: none has it, or there are several images and no name; lists the names.
    """
    manifests = objects(index, "manifests")
    matching = [each for each in manifests if not name or name in _names(each)]
    # `docker buildx` writes an entry for each machine under one name.
    one = len(matching) == 1 or (
        len({tuple(_names(each)) for each in matching}) == 1 and all("platform" in each for each in matching)
    )
    if not one:
        raise ValueError(which(names for each in manifests for names in _names(each)))
    return matching


def which(names: Iterable[str]) -> str:
    """The error's text where no name, or a wrong one, was given."""
    return f"name one of its images; it has: {', '.join(dict.fromkeys(names)) or 'none has a name'}"


def _names(entry: dict[str, Any]) -> list[str]:
    annotations = entry.get("annotations")
    if not isinstance(annotations, dict):
        return []
    values = (cast("dict[str, object]", annotations).get(each) for each in NAMES)
    return [each for each in values if isinstance(each, str)]
