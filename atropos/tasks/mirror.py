"""A folder that has what a set of tasks fetches, as any web server serves it.

v2/HOST/NAME/manifests/TAG    images, as registries have them; `blobs/` beside it
blobs/                        what those lead to, each once
simple/NAME/                  wheels, as indices of packages have them (PEP 503)
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from atropos.config import ImageStoreSettings
from atropos.errors import ConfigError
from atropos.images.manifests import MAX_DEPTH, chosen, config_digest, is_index, objects, parse
from atropos.images.pulling import PAUSES_S
from atropos.images.reference import check_digest
from atropos.images.registry import Registry
from atropos.images.untrusted import ImageRefused
from atropos.tasks.needs import SetNeeds

_PLATFORMS = ("manylinux_2_17", "manylinux_2_28", "manylinux_2_34", "manylinux2014", "linux")
WHEELS_S = 600.0
"""Longest that pip may take."""


def fetch(
    wanted: SetNeeds, folder: Path, store: ImageStoreSettings, say: Callable[[str], None], python: str = ""
) -> list[str]:
    """Get all that a set needs. Blocking.

    Args:
        wanted: what it needs.
        folder: the folder; images' layers that are there already stay.
        store: how registries are asked.
        say: called with what is about to be done.
        python: which Python (`3.12`) wheels are for where a set names none; empty: the one that pip is of.

    Returns:
        What could not be had, and why.

    Raises:
        ConfigError: there is no pip.
    """
    failed: list[str] = []
    for name in wanted.images:
        say(f"image {name}")
        try:
            _image(name, folder, store)
        except (ImageRefused, ValueError) as error:
            failed.append(f"image {name}: {error}")
    groups = [*wanted.wheels, *(("", (f"uv=={version}" if version else "uv",)) for version in wanted.uv)]
    for named, requirements in groups:
        words = " ".join(requirements)
        say(f"wheels of {words}")
        if error := _wheels(named or python, requirements, folder / "simple"):
            failed.append(f"wheels of {words}: {error}")
    if groups:
        _index(folder / "simple")
    return failed


def _image(name: str, folder: Path, store: ImageStoreSettings) -> None:
    registry = Registry(name, store.mirrors, [*store.insecure_registries], store.auth_file, [*PAUSES_S])
    path = re.split(r"@|:(?=[^/:]*$)", name, maxsplit=1)[0]
    repository = folder / "v2" / path
    reference = registry.reference
    for _ in range(MAX_DEPTH):
        data = registry.manifest(reference)
        manifest = parse(data, "its manifest")
        for each in (reference, f"sha256:{hashlib.sha256(data).hexdigest()}"):
            _write(repository / "manifests" / each, data)
        if not is_index(manifest):
            break
        reference = f"sha256:{chosen(objects(manifest, 'manifests'))}"
    else:
        raise ValueError(f"more than {MAX_DEPTH} indices, each in another")
    config = config_digest(manifest)
    _blob(repository, folder, config, lambda file: _write(file, registry.small(config)))
    for layer in objects(manifest, "layers"):
        digest, size = check_digest(layer.get("digest")), int(layer.get("size") or 0)
        _blob(repository, folder, digest, lambda file, digest=digest, size=size: _layer(registry, digest, size, file))


def _layer(registry: Registry, digest: str, size: int, file: Path) -> None:
    actual = hashlib.sha256()
    with file.open("wb") as part:

        def take(piece: bytes) -> bool:
            actual.update(piece)
            part.write(piece)
            return True

        registry.blob(digest, size, take)
    if actual.hexdigest() != digest:
        raise ValueError(f"layer {digest[:12]} is not what its digest says")


def _blob(repository: Path, folder: Path, digest: str, fill: Callable[[Path], None]) -> None:
    """Have a blob in a repository: a link to where it is once."""
    blob = folder / "blobs" / digest
    if not blob.exists():
        blob.parent.mkdir(parents=True, exist_ok=True)
        part = blob.with_name(f"{digest}.part")
        fill(part)
        part.rename(blob)
    link = repository / "blobs" / f"sha256:{digest}"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(os.path.relpath(blob, link.parent))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _wheels(python: str, requirements: Sequence[str], simple: Path) -> str:
    """Get wheels, with all that they need; why that failed, if it did."""
    simple.mkdir(parents=True, exist_ok=True)
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--dest", str(simple))
    command = [*pip(), "download", *options]
    if version := re.match(r"3\.\d+", python):
        machine = os.uname().machine
        command += ["--python-version", version[0], "--implementation", "cp"]
        command += [f"--platform={each}_{machine}" for each in _PLATFORMS]
    try:
        done = subprocess.run(
            [*command, *requirements],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=WHEELS_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {WHEELS_S:g} s"
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
    return " ".join(lines)[:500] or f"exit code {done.returncode}" if done.returncode else ""


def pip() -> list[str]:
    """How pip is run here.

    Raises:
        ConfigError: there is none.
    """
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["uvx", "pip"]):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([*command, "--version"], check=True, capture_output=True)
            return command
    raise ConfigError("atropos tasks mirror: pip is needed to fetch wheels; install it (apt-get install python3-pip)")


def _index(simple: Path) -> None:
    """Put each wheel into the folder of its package, and a page beside it."""
    for wheel in simple.glob("*.whl"):
        name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        (simple / name).mkdir(exist_ok=True)
        wheel.replace(simple / name / wheel.name)
    packages = sorted(each for each in simple.iterdir() if each.is_dir())
    for package in packages:
        names = (html.escape(each.name) for each in sorted(package.glob("*.whl")))
        _page(package, "".join(f'<a href="{each}">{each}</a><br>\n' for each in names))
    _page(simple, "".join(f'<a href="{each.name}/">{each.name}</a><br>\n' for each in packages))


def _page(folder: Path, body: str) -> None:
    (folder / "index.html").write_text(f"<!DOCTYPE html>\n<title>{folder.name}</title>\n{body}", encoding="utf-8")
