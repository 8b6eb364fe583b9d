"""Images that only the pool's own machine can read, as archives for sandbox servers.

A server's name of such an image has the SHA-256 of its content, so that a changed file is another image.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from atropos.errors import ConfigError
from atropos.images.reference import ImageSource

CHUNK = 1 << 20
REF_NAME = "org.opencontainers.image.ref.name"
"""Annotation that names an image of a layout (OCI image specification, annotations)."""


@dataclass(frozen=True)
class Archive:
    """An image as one file.

    Attributes:
        source: the name for the server: `docker-archive:` or `oci-archive:`, and a digest.
        file: its owner's; or what this process made, which has no name, so that nothing is left of it by one that is killed.
    """

    source: str
    file: Path | IO[bytes]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The content of the file.

        Raises:
            ConfigError: at its end, which breaks the transfer off: the file has changed since it was named.
        """
        owners = self.file if isinstance(self.file, Path) else None
        fd = os.open(self.file, os.O_RDONLY) if isinstance(self.file, Path) else os.dup(self.file.fileno())
        found, at = hashlib.sha256(), 0

        def read() -> bytes:
            chunk = os.pread(fd, CHUNK, at)
            if owners is not None:
                found.update(chunk)
            return chunk

        try:
            while chunk := await asyncio.to_thread(read):
                at += len(chunk)
                yield chunk
        finally:
            os.close(fd)
        if owners is not None and not self.source.endswith(found.hexdigest()):
            raise ConfigError(f"image: {owners} has changed since this pool read it; open another pool")

    def close(self) -> None:
        """Give up what this process made."""
        if not isinstance(self.file, Path):
            self.file.close()


def archive_of(source: ImageSource, docker_host: str | None = None) -> Archive:
    """Read a local source: `oci-archive:`, `docker-archive:`, `oci:`, `docker-daemon:` or `dir:`, a root file system.

    Blocking.

    Raises:
        ConfigError: there is no such image here; names the source and what is wrong.
    """
    path = Path(source.name)
    try:
        if source.transport in {"oci-archive", "docker-archive"}:
            return Archive(f"{source.transport}:sha256-{_digest(path)}", path)
        with contextlib.ExitStack() as failed:
            made = failed.enter_context(tempfile.TemporaryFile())
            if source.transport == "docker-daemon":
                name = f"docker-archive:{_save(source.name, docker_host, made)}"
            else:
                write = _write_layout if source.transport == "oci" else _write_folder
                write(path, made)
                made.seek(0)
                kind = "oci-archive" if source.transport == "oci" else "docker-archive"
                name = f"{kind}:sha256-{hashlib.file_digest(made, 'sha256').hexdigest()}"
            made.flush()
            failed.pop_all()
            return Archive(name, made)
    except OSError as error:
        raise ConfigError(f"image: {source} can't be read: {error.strerror or error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_layout(path: Path, file: IO[bytes]) -> None:
    """Write an OCI layout with one image; files are sorted, so that equal layouts have one digest."""
    layout, index = _one_image(path)
    with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
        for each in sorted(layout.rglob("*")):
            info = tar.gettarinfo(str(each), str(each.relative_to(layout)))
            info.mtime = 0
            if info.name == "index.json":
                info.size = len(index)
                tar.addfile(info, io.BytesIO(index))
                continue
            with each.open("rb") if info.isreg() else io.BytesIO() as content:
                tar.addfile(info, content)


def _one_image(path: Path) -> tuple[Path, bytes]:
    """The folder of `FOLDER` or `FOLDER:NAME`, and its index with that image alone. Both may have colons in them."""
    parts = str(path).split(":")
    for at in range(len(parts), 0, -1):
        folder, name = Path(":".join(parts[:at])), ":".join(parts[at:])
        if (file := folder / "index.json").is_file():
            break
    else:
        raise ConfigError(f"image: oci:{path} is no OCI layout: it has no index.json")
    try:
        index = json.loads(file.read_bytes())
        images = [(each.get("annotations", {}).get(REF_NAME), each) for each in index["manifests"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"image: {file} is no index of an OCI layout: {error!r:.200}") from None
    found = [image for called, image in images if name in {"", called}]
    if len(found) != 1:
        names = ", ".join(sorted(called for called, _ in images if called)) or "none has a name"
        raise ConfigError(f"image: oci:{path}: name an image of the layout, oci:FOLDER:NAME; it has: {names}")
    return folder, json.dumps(index | {"manifests": found}).encode()


def _write_folder(path: Path, file: IO[bytes]) -> None:
    """Write a root file system as an image of one layer (Docker image specification 1.2, combined archive)."""
    if not path.is_dir():
        raise ConfigError(f"image: dir:{path} is not a folder")
    with tempfile.TemporaryFile() as layer:
        with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for each in sorted(path.rglob("*")):
                tar.add(each, str(each.relative_to(path)), recursive=False)
        layer.seek(0)
        diff = hashlib.file_digest(layer, "sha256").hexdigest()
        config = {"os": "linux", "config": {}}
        described = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]}}).encode()
        name = f"{hashlib.sha256(described).hexdigest()}.json"
        manifest = [{"Config": name, "RepoTags": [], "Layers": [f"{diff}/layer.tar"]}]
        with tarfile.open(fileobj=file, mode="w") as tar:
            for member, data in ((name, described), ("manifest.json", json.dumps(manifest).encode())):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            info = tarfile.TarInfo(f"{diff}/layer.tar")
            info.size = layer.seek(0, io.SEEK_END)
            layer.seek(0)
            tar.addfile(info, layer)


def _save(name: str, docker_host: str | None, file: IO[bytes]) -> str:
    """Write an engine's image. Returns its id, which names it: an engine's archives of one image differ."""
    import docker
    from docker.errors import DockerException

    try:
        with contextlib.closing(docker.DockerClient(docker_host) if docker_host else docker.from_env()) as client:
            image = client.images.get(name)
            for chunk in image.save(named=True):
                file.write(chunk)
            return str(image.id).replace(":", "-")
    except DockerException as error:
        raise ConfigError(f"image: docker-daemon:{name}: {error}") from error
