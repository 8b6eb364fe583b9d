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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from atropos.aio import Tasks
from atropos.errors import ConfigError
from atropos.images.manifests import named, parse
from atropos.images.reference import ImageSource, check_digest

CHUNK = 1 << 20


class LocalImage:
    """An image as servers can read it: as one file.

    A file that is made for them is there as long as one reads it. It has no name in the file system, so that nothing is
    left of it by a process that is killed.

    Args:
        source: where it comes from.
        name: its name for servers: `docker-archive:` or `oci-archive:`, a digest, and `:` with the image's name in a
            file of several.
        file: the file, of its owner or made for good; or what writes it, which blocks.
        turns: taken for each file that is made.
    """

    def __init__(
        self,
        source: ImageSource,
        name: str,
        file: Path | IO[bytes] | Callable[[IO[bytes]], None],
        turns: asyncio.Semaphore,
    ) -> None:
        self.source = source
        self.name = name
        self._file = file
        self._turns = turns
        self._readers = 0
        self._tasks = Tasks(f"image {name}")
        self._making: asyncio.Task[IO[bytes]] | None = None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Its bytes. Concurrent readers share what is made for them.

        Raises:
            ConfigError: it is not here any more, or there is no room for it. At the end of the bytes, which breaks the
                transfer off: its owner's file has changed since it was named.
        """
        if isinstance(self._file, Path):
            with contextlib.ExitStack() as stack:
                # Around the opening alone: an OSError of the reader's own connection is none of the file's.
                with _readable(self.source):
                    file = stack.enter_context(self._file.open("rb"))
                yield self._bytes_of(file, self._file)
            return
        if not callable(self._file):
            yield self._bytes_of(self._file)
            return
        # Counted before the first await, so that a reader that is cancelled can't close the file of another.
        self._readers += 1
        try:
            if self._making is None:
                self._making = self._tasks.spawn(self._make(self._file), "archive", awaited=True)
            # One reader's cancellation must not end the archive that others wait for.
            yield self._bytes_of(await asyncio.shield(self._making))
        finally:
            self._readers -= 1
            if not self._readers and (making := self._making) is not None:
                self._making = None
                making.cancel()  # unless it is made
                # A thread can't be cancelled: one that has finished its file all the same gives it up here.
                making.add_done_callback(self._give_up)

    async def _make(self, write: Callable[[IO[bytes]], None]) -> IO[bytes]:
        await self._turns.acquire()
        with _readable(self.source), contextlib.ExitStack() as failed:
            # The turn is held as long as the file exists, not only while it is written: turns bound the disk space.
            failed.callback(self._turns.release)
            file = failed.enter_context(tempfile.TemporaryFile())
            await asyncio.to_thread(write, file)
            file.flush()
            failed.pop_all()
            return file

    def _give_up(self, made: asyncio.Task[IO[bytes]]) -> None:
        if not made.cancelled() and made.exception() is None:
            made.result().close()
            self._turns.release()

    async def _bytes_of(self, file: IO[bytes], owners: Path | None = None) -> AsyncIterator[bytes]:
        # A descriptor of its own, and pread: readers share the file, and each has its own offset.
        fd = os.dup(file.fileno())
        digest, at = hashlib.sha256(), 0

        def read() -> bytes:
            chunk = os.pread(fd, CHUNK, at)
            if owners is not None:
                # Only an owner's file can change under its name; what was made here has no name.
                digest.update(chunk)
            return chunk

        try:
            while chunk := await asyncio.to_thread(read):
                at += len(chunk)
                yield chunk
        finally:
            os.close(fd)
        if owners is not None and f"sha256-{digest.hexdigest()}" != self.name.split(":")[1]:
            raise ConfigError(f"image: {owners} has changed since this pool read it; open another pool")

    def close(self) -> None:
        """Give up the file, where it was made for good."""
        if not callable(self._file) and not isinstance(self._file, Path):
            self._file.close()


def local_image(source: ImageSource, docker_host: str | None, turns: asyncio.Semaphore) -> LocalImage:
    """The image of a local source: `oci-archive:`, `docker-archive:`, `oci:`, `docker-daemon:`, or `dir:` with a root.

    Blocking. The file of a root file system is made at once and kept: a later one would have another digest.

    Raises:
        ConfigError: there is no such image here; names the source and what is wrong.
    """
    path = Path(source.name)
    with _readable(source):
        if source.transport in {"oci-archive", "docker-archive"}:
            # Both may have colons, so that only the disk says where the path ends.
            path, name = next(((at, name) for at, name in _splits(source.name) if at.is_file()), (path, ""))
            of_several = f":{name}" if name else ""
            return LocalImage(source, f"{source.transport}:sha256-{_digest(path)}{of_several}", path, turns)
        if source.transport == "dir":
            with contextlib.ExitStack() as failed:
                file = failed.enter_context(tempfile.TemporaryFile())
                _write_folder(path, file)
                file.seek(0)
                name = f"docker-archive:sha256-{hashlib.file_digest(file, 'sha256').hexdigest()}"
                file.flush()
                failed.pop_all()
                return LocalImage(source, name, file, turns)
        if source.transport == "oci":
            layout, index, manifests = _one_image(source.name)
            digest = hashlib.sha256(b"".join(map(Path.read_bytes, manifests))).hexdigest()
            name, write = f"oci-archive:sha256-{digest}", partial(_write_layout, layout, index, manifests)
        else:
            with _engines_image(source.name, docker_host) as image:
                # Named by its id: the archive's own digest differs with each `docker save` of the same image.
                image_id = str(image.id)
            name = f"docker-archive:{image_id.replace(':', '-')}"
            write = partial(_save, image_id, docker_host)  # the name may mean another one meanwhile
        return LocalImage(source, name, write, turns)


@contextlib.contextmanager
def _readable(source: ImageSource) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"image: {source} can't be read: {error.strerror or error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _splits(text: str) -> Iterator[tuple[Path, str]]:
    """How `PATH` or `PATH:NAME` can be meant, the longest path first: both may have colons in them."""
    parts = text.split(":")
    return ((Path(":".join(parts[:at])), ":".join(parts[at:])) for at in range(len(parts), 0, -1))


def _write_layout(layout: Path, index: bytes, manifests: list[Path], file: IO[bytes]) -> None:
    """Write an OCI layout with an index of one image, and that image's blobs alone."""
    blobs = dict.fromkeys(blob for each in manifests for blob in _blobs(each))
    # Blobs may be links into another layout's folder; an archive with the links would lack their content.
    with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
        for each in blobs:
            tar.add(each, str(each.relative_to(layout)), recursive=False)
        info = tarfile.TarInfo("index.json")
        info.size = len(index)
        tar.addfile(info, io.BytesIO(index))


def _blobs(manifest: Path) -> Iterator[Path]:
    """A manifest, or an index of manifests, with the blobs that it names; those for other machines may not be here."""
    yield manifest
    try:
        content = json.loads(manifest.read_bytes())
        parts = [check_digest(each["digest"]) for each in (content.get("config"), *content.get("layers", ())) if each]
        below = [check_digest(each["digest"]) for each in content.get("manifests", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"image: {manifest} is no manifest of an OCI layout: {error!r:.200}") from None
    yield from (blob for each in parts if (blob := manifest.parent / each).is_file())
    for each in below:
        if (blob := manifest.parent / each).is_file():
            yield from _blobs(blob)


def _one_image(text: str) -> tuple[Path, bytes, list[Path]]:
    """The folder of `FOLDER` or `FOLDER:NAME`, its index with that image alone, and the image's manifests.

    Folder and name may have colons in them.
    """
    folder, name = next(((at, name) for at, name in _splits(text) if (at / "index.json").is_file()), (None, ""))
    if folder is None:
        raise ConfigError(f"image: oci:{text} is no OCI layout: it has no index.json")
    file = folder / "index.json"
    try:
        index = parse(file.read_bytes(), str(file))
        entries = named(index, name)
        manifests = [folder / "blobs" / "sha256" / check_digest(each.get("digest")) for each in entries]
    except ValueError as error:
        raise ConfigError(f"image: oci:{text}: oci:FOLDER:NAME names an image of the layout: {error}") from None
    here = [each for each in manifests if each.is_file()] or manifests  # those for other machines may not be here
    return folder, json.dumps(index | {"manifests": entries}).encode(), here


def _write_folder(path: Path, file: IO[bytes]) -> None:
    """Write a root file system as an image of one layer (Docker image specification 1.2, combined archive)."""
    if not path.is_dir():
        raise ConfigError(f"image: dir:{path} is not a folder")
    with tempfile.TemporaryFile() as layer:
        with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            # Sorted: the same folder shall have the same digest each time, whatever order readdir gives.
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


def _save(image_id: str, docker_host: str | None, file: IO[bytes]) -> None:
    """Write an engine's image. An engine's archives of one image differ."""
    with _engines_image(image_id, docker_host) as image:
        for chunk in image.save(named=True):
            file.write(chunk)


@contextlib.contextmanager
def _engines_image(name: str, docker_host: str | None) -> Generator[Any]:
    """An engine's image, by name or id."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise ConfigError("image: docker-daemon: needs the extra `docker`: pip install 'atropos[docker]'") from error
    try:
        with contextlib.closing(docker.DockerClient(docker_host) if docker_host else docker.from_env()) as client:
            yield client.images.get(name)
    except DockerException as error:
        raise ConfigError(f"image: docker-daemon:{name}: {error}") from error
