"""An image by its manifest and its configuration, read from unchecked files.

Sources: OCI image specification 1.1, manifest and config; containers-transports(5); Docker image manifest V2, schema 2.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from atropos.images.manifests import MACHINE, MAX_JSON_BYTES, architecture, config_digest, objects, parse
from atropos.images.reference import check_digest
from atropos.wire import HealthConfig, ImageInfo

_TIMES = {
    "interval_s": "Interval",
    "timeout_s": "Timeout",
    "start_period_s": "StartPeriod",
    "start_interval_s": "StartInterval",
}
"""Of a health check; the image's are in nanoseconds."""


@dataclass(frozen=True)
class PackedLayer:
    """A layer as it was packed.

    Attributes:
        digest: of the packed file, SHA-256 as all digests here.
        size: bytes of it.
        diff_id: digest of the tar.
        file: where it is; None: still where the image comes from.
    """

    digest: str
    size: int
    diff_id: str
    file: str | None = None


@dataclass(frozen=True)
class PulledImage:
    """What an image is.

    Attributes:
        id: digest of the configuration: what names the image.
        layers: lowest first.
        in_order: whether they come one after the other, as plain tars: from another host.
    """

    id: str
    config: dict[str, Any]
    layers: tuple[PackedLayer, ...]
    in_order: bool = False


def read_folder(folder: Path) -> PulledImage:
    """The image of a folder: `manifest.json`, and its parts, named by their digests; layers may be missing.

    Raises:
        ValueError: it isn't one; says what is wrong, in one line.
    """
    try:
        return _read(folder)
    except (OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(folder: Path) -> PulledImage:
    manifest = _json(folder / "manifest.json")
    digest = config_digest(manifest)
    config = _json(folder / digest)
    if (config.get("os") or "linux") != "linux":  # crane writes an empty one
        raise ValueError(f"it is for {config['os']!r:.100}, not for Linux")
    machine = architecture(config.get("architecture") or MACHINE)
    if machine != MACHINE:  # every program in it would end as one that can't be executed
        raise ValueError(f"it is for {machine!r:.100}, and this machine is {MACHINE!r}")
    _check_settings(config.get("config") or {})
    rootfs: object = config.get("rootfs")
    if not isinstance(rootfs, dict):
        raise ValueError("its configuration has no rootfs, which says what its layers are")  # noqa: TRY004
    diffs = [check_digest(each) for each in cast("dict[str, Any]", rootfs).get("diff_ids") or ()]
    packed = objects(manifest, "layers")
    # They belong together by position alone; unequal, each layer would be checked by another one's digest.
    if len(packed) != len(diffs):
        raise ValueError(
            f"its manifest has {len(packed)} layers, and its configuration the digests (diff_ids) of {len(diffs)}"
        )
    return PulledImage(digest, config, tuple(_layer(folder, *each) for each in zip(packed, diffs, strict=True)))


def _layer(folder: Path, part: dict[str, Any], diff_id: str) -> PackedLayer:
    digest, size = check_digest(part.get("digest")), part.get("size")
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"a layer of {size!r:.100} bytes")
    file = folder / digest
    # A path below `folder`, as check_digest lets nothing but hexadecimal digits through.
    return PackedLayer(digest, size, diff_id, str(file) if file.exists() else None)


def _check_settings(settings: object) -> None:
    """Refuse what no command could start with."""
    if not isinstance(settings, dict):
        raise ValueError("config: not an object")  # noqa: TRY004 (what was read is wrong, not a type here)
    for name in ("Env", "Entrypoint", "Cmd", "OnBuild", "Shell", "WorkingDir", "User"):
        value = cast("dict[str, object]", settings).get(name)
        texts: object = [value] if name in {"WorkingDir", "User"} else value
        if value is not None and not (isinstance(texts, list) and all(map(_is_text, cast("list[object]", texts)))):
            raise ValueError(f"config: {name}: no valid settings of commands")
    try:
        _healthcheck(cast("dict[str, Any]", settings))
        _volumes(cast("dict[str, Any]", settings))
    except (TypeError, AttributeError):
        raise ValueError("config: Healthcheck, Volumes: no valid settings of a container") from None


def _healthcheck(settings: dict[str, Any]) -> HealthConfig | None:
    health: dict[str, Any] = settings.get("Healthcheck") or {}
    test: object = health.get("Test") or []
    # 0 stands for Docker's default, as does a missing one.
    numbers: dict[str, Any] = {name: health.get(name) or 0 for name in (*_TIMES.values(), "Retries")}
    if not isinstance(test, list) or not all(map(_is_text, cast("list[object]", test))):
        raise TypeError("test")
    # Go's time.Duration: signed, 64 bits.
    if not all(isinstance(each, int) and 0 <= each < 1 << 63 for each in numbers.values()):
        raise TypeError("numbers")
    times = {ours: numbers[theirs] / 1e9 for ours, theirs in _TIMES.items()}
    return HealthConfig(test=tuple(cast("list[str]", test)), retries=numbers["Retries"], **times) if health else None


def _volumes(settings: dict[str, Any]) -> tuple[str, ...]:
    paths: list[str] = [*(settings.get("Volumes") or {}).keys()]
    if not all(map(_is_text, paths)):
        raise TypeError("paths")
    return tuple(posixpath.normpath(posixpath.join("/", path)) for path in paths)


def _is_text(value: object) -> bool:
    # A NUL ends an argument in execve(2); half of a surrogate pair, which JSON may escape, has no UTF-8.
    return isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)


def _json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return parse(file.read(MAX_JSON_BYTES + 1), path.name)


def image_info(pulled: PulledImage, source: str) -> ImageInfo:
    """What a configuration says of an image, beside its files."""
    settings: dict[str, Any] = pulled.config.get("config") or {}
    workdir = settings.get("WorkingDir")
    pairs = [text.partition("=") for text in settings.get("Env") or ()]
    return ImageInfo(
        id=pulled.id,
        source=source,
        bytes=0,
        layers=tuple(layer.diff_id for layer in pulled.layers),
        # One without `=` is Docker's form for a variable that is to be removed.
        env={name: value for name, equals, value in pairs if equals and name},
        workdir=posixpath.normpath(posixpath.join("/", workdir)) if workdir else None,
        user=settings.get("User") or None,
        entrypoint=tuple(settings.get("Entrypoint") or ()),
        cmd=tuple(settings.get("Cmd") or ()),
        onbuild=tuple(settings.get("OnBuild") or ()),
        shell=tuple(settings.get("Shell") or ()),
        healthcheck=_healthcheck(settings),
        volumes=_volumes(settings),
    )
