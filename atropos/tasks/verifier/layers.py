"""Verifier layers: programs and caches that tests would download, mounted where they run; no agent sees them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from atropos.archives import WholeTar
from atropos.errors import ImageUnavailable
from atropos.slots import Slot
from atropos.tasks.builder.transfer import pack_files, unpack_archive
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages


class VerifierLayers:
    """Files of images, laid over the machine in which a task's tests run, in order.

    Args:
        sources: images (`python:3.13-slim`, `oci-archive:FILE`, `dir:FOLDER`), or Dockerfiles, which are built.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = tuple(sources)
        self._stack = contextlib.ExitStack()
        self._archives: tuple[Path, ...] = ()

    async def prepare(self, images: TaskImages) -> None:
        """Pull or build them, once.

        Raises:
            TaskBroken: a step of a Dockerfile failed.
            ImageUnavailable, ConfigError: an image is unavailable.
            AcquireTimeout: no container came up.
        """
        # Once for all tasks of an env; what was made is kept until `close`.
        if self._sources and not self._archives:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="atropos-layers-")))
            taking = [self._taken(images, source, folder / str(number)) for number, source in enumerate(self._sources)]
            self._archives = tuple(await asyncio.gather(*taking))

    async def _taken(self, images: TaskImages, source: str, to: Path) -> Path:
        if Path(source).is_file():
            source = (await images.build(load_task(source, architecture=images.pool.architecture))).source
        else:
            await images.prepare_when_up(source)
        async with images.pool.lease("verifier-layer", image=source) as slot:
            [packed] = await pack_files(slot, ("/",))
        with packed.archive:
            try:
                await asyncio.to_thread(_write_layer, packed.archive, to)
            except tarfile.TarError as error:
                raise ImageUnavailable(f"image {source}: its files could not be read: {error}") from error
        return to

    async def put(self, slot: Slot) -> None:
        """Lay them over a machine.

        Raises:
            OSError: the slot can't take it.
        """
        for path in self._archives:
            with path.open("rb") as archive:
                await unpack_archive(slot, "/", archive)

    def digest(self) -> str:
        """Of what `put` lays over a machine. Blocking."""
        digest = hashlib.sha256()
        for path in self._archives:
            with path.open("rb") as archive:
                hashlib.file_digest(archive, lambda: digest)
        return digest.hexdigest()

    def close(self) -> None:
        """Remove what was made for them."""
        self._stack.close()
        self._archives = ()


def _write_layer(archive: IO[bytes], to: Path) -> None:
    """Write the files and links of an archive, and no empty folders, which would change existing ones."""
    with tarfile.open(fileobj=archive, mode="r:", tarinfo=WholeTar) as source:
        # Folders that hold something: an empty one would give its mode and owner to the machine's own.
        full = {parent for member in source if not member.isdir() for parent in _parents(member.name)}
        with tarfile.open(to, "w", format=tarfile.PAX_FORMAT) as target:
            for member in source.getmembers():
                if not member.isdir() or member.name in full:
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]
