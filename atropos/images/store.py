"""The images of one host: stacks of layers, which are kept once whatever images have them (`layer_store`).

    names/HASH        what a source last meant: one line, the image's id; none for a built image, whose source has it
    images/ID         an image (`StoredImage`); it is here as long as all of its layers are
    configs/ID        its configuration, unless it was built

An image is written by a rename, once its layers are there, so that a kill or a power cut at any moment leaves a whole
image or none. Who has removed layers also removes what is kept of their images, as does a server that begins to use
the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from atropos.aio import task_group
from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images import extract, sharing
from atropos.images.layer_store import LayerStore
from atropos.images.layout import PulledImage, image_info, read_folder
from atropos.images.programs import run, run_module, within, write_whole
from atropos.images.pulling import Puller, Pullers
from atropos.images.reference import ImageSource, check_digest
from atropos.images.sharing import Arrival
from atropos.images.stacking import Stacking
from atropos.wire import ImageInfo

PARTS = "parts"
"""Folder of a work folder: what `read_folder` reads."""
BASE, BUILD = "atropos-base:", "atropos-build:"
PARALLEL = 3
"""Images that one server pulls at once: enough to fill a network, few enough that each gets on."""
Phase = Literal["waiting", "pulling", "unpacking"]
Progress = Callable[[Phase, float | None], None]
"""Called with the phase and how much of it is done, from 0 to 1, where that is known."""


class StoredImage(BaseModel):
    """What is kept of an image.

    Attributes:
        layers: its layers' ids, topmost first.
        base: the server's base that they lie on (`atropos-base:NAME`); None: on nothing.
    """

    model_config = ConfigDict(frozen=True)

    info: ImageInfo
    layers: tuple[str, ...]
    base: str | None = None


class Stack(NamedTuple):
    """What overlay is to stack: folders, topmost first, on a base of the server or on nothing."""

    folders: list[str]
    base: str | None


class ImageStore:
    """The folder of images, as one sandbox server uses it.

    Args:
        settings: where it is and how much it may hold.
        ids: how many ids a slot has; 1: every file belongs to root.
    """

    def __init__(self, settings: ImageStoreSettings, folder: str, ids: int) -> None:
        self._settings = settings
        self._root = Path(folder)
        self._ids = ids
        self._layers = LayerStore(settings, self._root)
        self._pullers = Pullers(settings, self._root, ids)
        self._turns = asyncio.Semaphore(PARALLEL)
        self._known: dict[str, StoredImage] = {}
        self._swept = -1
        """How many layers had been dropped when gone images were last looked for."""
        for name in ("names", "images", "configs"):
            self._root.joinpath(name).mkdir(exist_ok=True)

    def __repr__(self) -> str:
        return f"<ImageStore {self._root}: {self._layers!r}>"

    # ---------------------------------------------------------------------------------------------------------- asking

    def known(self, source: str) -> ImageInfo | None:
        """The image that a source last meant, if it is here; who asks is about to use it."""
        try:
            if source.startswith(BUILD):
                image_id = source.removeprefix(BUILD)
            else:
                image_id = (self._root / "names" / _hash(source)).read_text(encoding="ascii")
            # Checked, as it becomes a path.
            return self._asked(check_digest(f"sha256:{image_id}"))
        except (OSError, ValueError):
            return None

    def _asked(self, image_id: str) -> ImageInfo | None:
        """An image by its id, if it is here; it stays until who asks has begun to use it."""
        image = self._read(image_id)
        if image is None:
            return None
        self._layers.touch(image.layers)
        return image.info

    def find(self, image_id: str) -> ImageInfo | None:
        """An image by its id, if it is here."""
        image = self._read(image_id)
        return None if image is None else image.info

    def hold(self, image: ImageInfo) -> Stack:
        """Use an image until `release`, so that nobody removes a layer of it.

        Raises:
            ImageUnavailable: it has just been removed.
        """
        stored = self._read(image.id)
        with contextlib.ExitStack() as held:
            for layer in () if stored is None else stored.layers:
                if not self._layers.hold(layer):
                    stored = None
                    break
                held.callback(self._layers.release, layer)
            if stored is None:
                raise ImageUnavailable(f"image {image.source}: it is no longer in the store")
            # All layers or none: until here, a failure releases those that it holds.
            held.pop_all()
        return Stack([self._layers.files(layer) for layer in stored.layers], stored.base)

    def release(self, image_id: str) -> None:
        """Undo one `hold`."""
        # Of what was read before: the record may be removed while its layers are held.
        for layer in self._known[image_id].layers:
            self._layers.release(layer)

    async def aclose(self) -> None:
        """End the programs that wait for another image, and wait for the disk no more."""
        await self._pullers.aclose()
        await self._layers.aclose()

    def make_room(self, wanted: int) -> int:
        """As `LayerStore.make_room`."""
        return self._layers.make_room(wanted)

    # ------------------------------------------------------------------------------------------------------- preparing

    async def prepare(self, source: ImageSource, progress: Progress, archive: str | None = None) -> ImageInfo:
        """The image of a source, pulled and unpacked if it is not here yet.

        Args:
            source: where it comes from.
            progress: called with each phase.
            archive: a file with the image, where the source is one that only the client can read.

        Raises:
            ImageUnavailable: no such image, no access, a broken or hostile one, no room; the message names the phase.
        """

        async def make(work: Path) -> ImageInfo:
            if archive is None:
                return await self._from_registry(source, work, progress)
            return await self._from_archive(source, archive, work, progress)

        return await self._prepared(source, progress, make)

    async def take(
        self, source: ImageSource, progress: Progress, image_id: str, chunks: AsyncIterator[bytes]
    ) -> ImageInfo:
        """The image of a source, which another host gives; as `prepare`.

        Args:
            source: what it is the image of.
            progress: called with each phase.
            image_id: its id, by which it is known to be that image.
            chunks: what `give` yields there.

        Raises:
            ImageUnavailable: something else came, or not all of it; no room.
        """
        return await self._prepared(source, progress, lambda work: self._from_host(source, work, image_id, chunks))

    async def _prepared(
        self, source: ImageSource, progress: Progress, make: Callable[[Path], Awaitable[ImageInfo]]
    ) -> ImageInfo:
        name = str(source)
        # For all servers of the host: one pulls, and the others find it here.
        async with self._layers.locked(f"source-{_hash(name)}", lambda: progress("waiting", None)):
            known = self.known(name)
            if known is not None:
                return known
            # After the lock: who waits for another server's pull takes no turn.
            async with self._turns:
                progress("pulling", None)
                async with self._layers.work() as work:
                    work.joinpath(PARTS).mkdir()
                    image = await make(work)
            async with self._layers.locked("records"):
                write_whole(self._root / "names" / _hash(name), image.id.encode())
            return image

    async def _from_archive(self, source: ImageSource, archive: str, work: Path, progress: Progress) -> ImageInfo:
        what, parts = f"image {source}: pulling", work / PARTS
        # a part of the content's name, or that and the image's name in it
        name, deadline_s = source.name.partition(":")[2], self._settings.unpack_timeout_s
        # The parts are on the disk beside what the store holds, before anything is claimed: first what is above the
        # quota goes.
        await asyncio.to_thread(self.make_room, 0)
        # In a process of its own with bounded memory: the file may be anybody's.
        arguments = (source.transport, archive, name, parts, self._layers.quota)
        await run_module(extract, what, *arguments, folder=self._root, deadline_s=deadline_s)
        pulled = await self._read_parts(parts, what)
        progress("unpacking", None)
        async with within(deadline_s, f"image {source}: unpacking"), self._pullers.one(f"image {source}") as puller:
            return await self._stacked(pulled, source, work, puller)

    async def _from_registry(self, source: ImageSource, work: Path, progress: Progress) -> ImageInfo:
        """Layers are unpacked as they come."""
        what, parts = f"image {source}: pulling", work / PARTS
        async with within(self._settings.pull_timeout_s, what), self._pullers.one(f"image {source}") as puller:
            await puller.describe(source.name, parts)
            pulled = await self._read_parts(parts, what)
            size = sum(layer.size for layer in pulled.layers)
            if size > self._layers.quota:
                most = f"more than the store may hold ({self._settings.quota_mib} MiB)"
                raise ImageUnavailable(f"{what}: {size >> 20} MiB, {most}")
            # An estimate for the progress alone: a layer may be here under another id, or come from another server
            # meanwhile.
            expected = sum(layer.size for layer in pulled.layers if not self._layers.has([layer.diff_id]))

            def report(came: int) -> None:
                if came < expected:
                    progress("pulling", came / expected)
                else:
                    progress("unpacking", None)

            async with task_group() as tasks:
                watching = tasks.create_task(puller.watch(report))
                image = await self._stacked(pulled, source, work, puller)
                # It never ends by itself, and the group waits for it.
                watching.cancel()
            return image

    async def _from_host(
        self, source: ImageSource, work: Path, image_id: str, chunks: AsyncIterator[bytes]
    ) -> ImageInfo:
        what = f"image {source}: from another container"
        async with within(self._settings.pull_timeout_s, what), self._pullers.one(f"image {source}") as puller:
            arrival = Arrival(chunks, what)
            await arrival.describe(image_id, work / PARTS)
            puller.bring = arrival.bring
            # Read from the same files as a registry's, so that the same checks apply.
            pulled = dataclasses.replace(await self._read_parts(work / PARTS, what), in_order=True)
            return await self._stacked(pulled, source, work, puller)

    async def _read_parts(self, parts: Path, what: str) -> PulledImage:
        try:
            return await asyncio.to_thread(read_folder, parts)
        except ValueError as error:
            raise ImageUnavailable(f"{what}: not an image: {error}") from error

    async def _stacked(self, pulled: PulledImage, source: ImageSource, work: Path, puller: Puller) -> ImageInfo:
        info = image_info(pulled, str(source))
        # The same image under another name.
        if (here := self._asked(info.id)) is not None:
            return here
        with self._stacking(f"image {source}: unpacking", work) as stacking:
            layers = await stacking.pulled(pulled, info.workdir or "/", puller)
            size = sum(self._layers.size(layer) or 0 for layer in layers)
            # Before the record: an image that is here can be given to other hosts.
            write_whole(self._root / "configs" / pulled.id, (work / PARTS / pulled.id).read_bytes())
            return await self._write(StoredImage(info=info.model_copy(update={"bytes": size}), layers=layers))

    async def keep(self, image: ImageInfo, fill: Callable[[str], Awaitable[None]]) -> ImageInfo:
        """Keep a layer as a built image; under an id that is here already, the one that is here.

        Args:
            image: its id, its parent, and how many bytes the layer has.
            fill: makes the folder with the layer, as overlay keeps it.

        Raises:
            ImageUnavailable: there is no room, or its parent is gone.
        """
        async with self._layers.locked(f"layer-{image.id}"), self._layers.work() as work:
            there = self._asked(image.id)
            if there is not None:
                return there
            below, base = self._below(image)
            with self._stacking(f"image {image.source}", work) as stacking:
                # Held before the copy: the parent may have gone since it was looked up.
                if not all(map(stacking.hold, below)):
                    raise ImageUnavailable(f"image {image.source}: its parent is no longer in the store")
                top = await stacking.built(image.id, image.bytes, fill)
                layers = await stacking.fitted((top, *below))
                return await self._write(StoredImage(info=image, layers=layers, base=base))

    def _below(self, image: ImageInfo) -> tuple[tuple[str, ...], str | None]:
        """The layers and the base that a built image lies on."""
        if image.parent is None or image.parent.startswith(BASE):
            return (), image.parent
        parent = self._read(image.parent)
        if parent is None:
            raise ImageUnavailable(f"image {image.source}: its parent is not on this server's host")
        return parent.layers, parent.base

    def _stacking(self, what: str, work: Path) -> Stacking:
        return Stacking(self._layers, self._settings, self._ids, what, work)

    async def _write(self, image: StoredImage) -> ImageInfo:
        """Keep an image whose layers are held."""
        async with self._layers.locked("records"):
            # While its layers are held: a record that others read must be of an image that is there.
            write_whole(self._root / "images" / image.info.id, image.model_dump_json().encode())
            self._known[image.info.id] = image
            # Images are gone only where this server has dropped layers; others look after what they dropped.
            if self._swept != self._layers.dropped:
                self._swept = self._layers.dropped
                await asyncio.to_thread(self._remove_gone)
        return image.info

    def _remove_gone(self) -> None:
        """Remove what is kept of images whose layers aren't all here, and the names that meant them. Blocking."""
        # Under the lock of all records: a name that is written meanwhile would seem to mean no image.
        here: set[str] = set()
        for path in self._root.joinpath("images").iterdir():
            if self._read(path.name) is not None:
                here.add(path.name)
                continue
            path.unlink(missing_ok=True)
            self._root.joinpath("configs", path.name).unlink(missing_ok=True)
            self._known.pop(path.name, None)
        for path in self._root.joinpath("names").iterdir():
            if path.read_text(encoding="utf-8", errors="replace") not in here:
                path.unlink()

    def _read(self, image_id: str) -> StoredImage | None:
        """What is kept of an image; it never changes while the image is here."""
        image = self._known.get(image_id)
        if image is None:
            try:
                text = (self._root / "images" / image_id).read_text(encoding="utf-8")
                image = self._known[image_id] = StoredImage.model_validate_json(text)
            except (OSError, ValueError):
                return None
        # Asked each time, for a remembered one too: other servers make room.
        return image if self._layers.has(image.layers) else None

    async def copy_layer(self, layer: str, target: str) -> None:
        """Copy a layer that nothing changes, whiteouts and attributes included.

        Raises:
            ImageUnavailable: the disk is full, or it takes too long.
        """
        # A program, as Python's shutil copies neither device numbers (whiteouts) nor hard links as such.
        copy = ["cp", "-a", "--preserve=all", "--sparse=auto", "--", layer, target]
        await run(copy, "keeping a built layer", folder=self._root, deadline_s=self._settings.unpack_timeout_s)

    # ---------------------------------------------------------------------------------------------------------- sharing

    def lacking(self, diff_ids: Sequence[str]) -> tuple[int, ...]:
        """As `sharing.lacking`."""
        return sharing.lacking(self._layers, diff_ids)

    @contextlib.asynccontextmanager
    async def give(self, image_id: str, wanted: Sequence[int]) -> AsyncGenerator[AsyncIterator[bytes]]:
        """An image for another host, with the layers at these positions, for `take` there.

        Raises:
            ImageUnavailable: it is not here, or can't be given.
        """
        image, what = self.find(image_id), f"image {image_id:.12}"
        # `wanted` is the other host's, and unchecked.
        if image is None or not all(0 <= index < len(image.layers) for index in wanted):
            raise ImageUnavailable(f"{what}: it is not on this server's host")
        try:
            config = self._root.joinpath("configs", image_id).read_bytes()
        except OSError as error:  # earlier versions kept none
            raise ImageUnavailable(f"{what}: its configuration: {error.strerror}") from None
        async with sharing.given(self._layers, config, image.layers, wanted, what) as chunks:
            yield chunks

    @contextlib.asynccontextmanager
    async def receiving(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[str]:
        """A file with what comes in, for `prepare`; removed afterwards.

        Raises:
            ImageUnavailable: it is larger than the store may be, or the disk is full.
        """
        size = 0
        async with self._layers.work() as work:
            path = work / "archive.tar"
            try:
                with path.open("wb") as file:
                    async for chunk in chunks:
                        size += len(chunk)
                        if size > self._layers.quota:
                            raise ImageUnavailable(f"the archive is larger than {self._settings.quota_mib} MiB")
                        # In a thread: on a disk that is behind, a write blocks.
                        await asyncio.to_thread(file.write, chunk)
            except OSError as error:
                raise ImageUnavailable(f"the archive could not be kept: {error.strerror}") from error
            yield str(path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
