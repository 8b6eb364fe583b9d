"""The images of one host: stacks of layers, which are kept once whatever images have them (`layer_store`).

    names/HASH        what a source last meant: one line, the image's id; none for a built image, whose source has it
    images/ID         an image (`StoredImage`); it is here as long as all of its layers are

An image is written by a rename, once its layers are there, so that a kill or a power cut at any moment leaves a whole
image or none. Who has removed layers also removes what is kept of their images, as does a server that begins to use
the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images import extract
from atropos.images.layer_store import LayerStore
from atropos.images.layout import SCHEMA_1, PulledImage, image_info, read_folder
from atropos.images.manifests import MAX_DEPTH, chosen, is_index, is_plain, objects, parse
from atropos.images.programs import Skopeo, run, run_module, write_whole
from atropos.images.reference import ImageSource, check_digest
from atropos.images.stacking import Stacking
from atropos.wire import ImageInfo

BASE, BUILD = "atropos-base:", "atropos-build:"
PARALLEL = 3
"""Images that one server pulls at once: enough to fill a network, few enough that each gets on."""
_UNTAGGED = re.compile(r"(:[^:/@]+|@.*)$")
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
        self._skopeo = Skopeo(settings, self._root)
        self._turns = asyncio.Semaphore(PARALLEL)
        self._known: dict[str, StoredImage] = {}
        self._swept = -1
        """How many layers had been dropped when gone images were last looked for."""
        for name in ("names", "images"):
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
            image = self._read(check_digest(f"sha256:{image_id}"))
        except (OSError, ValueError):
            return None
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
            held.pop_all()
        return Stack([self._layers.files(layer) for layer in stored.layers], stored.base)

    def release(self, image_id: str) -> None:
        """Undo one `hold`."""
        for layer in self._known[image_id].layers:
            self._layers.release(layer)

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
        name = str(source)
        async with self._layers.locked(f"source-{_hash(name)}", lambda: progress("waiting", None)):
            known = self.known(name)
            if known is not None:
                return known
            async with self._turns:
                progress("pulling", None)
                async with self._layers.work() as work:
                    pulled = await self._pull(source, work, progress, archive)
                    image = self.find(pulled.id) or await self._unpack(pulled, name, work, progress)
            async with self._layers.locked("records"):
                write_whole(self._root / "names" / _hash(name), image.id.encode())
            return image

    async def _pull(self, source: ImageSource, work: Path, progress: Progress, archive: str | None) -> PulledImage:
        what, pulled = f"image {source}: pulling", work / "pulled"
        pulled.mkdir()
        if archive is None:
            await self._fetch(source, work, pulled, progress)
        else:
            # a part of the content's name, or that and the image's name in it
            name = source.name.partition(":")[2]
            await asyncio.to_thread(self.make_room, 0)
            arguments = (source.transport, archive, name, pulled, self._layers.quota)
            await run_module(extract, what, *arguments, folder=self._root, deadline_s=self._settings.unpack_timeout_s)
        try:
            return await asyncio.to_thread(read_folder, pulled)
        except ValueError as error:
            raise ImageUnavailable(f"{what}: not an image: {error}") from error

    async def _fetch(self, source: ImageSource, work: Path, pulled: Path, progress: Progress) -> None:
        """Pull an image's parts from its registry and from nowhere else: a manifest's `urls` are ignored."""
        what = f"image {source}: pulling"
        try:
            origin, text = await self._located(str(source), work)
            expected = sum(int(layer["size"]) for layer in json.loads(text)["layers"])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ImageUnavailable(f"{what}: not an image: {error}") from error
        if expected > self._layers.quota:
            most = f"more than the store may hold ({self._settings.quota_mib} MiB)"
            raise ImageUnavailable(f"{what}: {expected >> 20} MiB, {most}")
        await asyncio.to_thread(self.make_room, expected)

        def report() -> None:
            done = sum(_size_of(path) for path in work.glob("*/*"))
            progress("pulling", min(1.0, done / expected) if expected else None)
            if done > self._layers.quota:
                raise ImageUnavailable(f"{what}: more than {self._settings.quota_mib} MiB")

        if is_plain(text):
            # its own retries are for what fails in the middle: what can't be reached at all is told at once, by
            # `inspect` before it
            arguments = ["copy", "--retry-times", "2", "--dest-compress", origin, f"dir:{pulled}"]
        else:  # by their digests alone, one after the other, into a folder that it names
            arguments = ["layers", "--retry-times", "2", origin]
        await self._skopeo.run(arguments, str(source), work, report, self._layers.quota)
        for folder in work.glob("layers-*"):
            pulled.rmdir()
            folder.rename(pulled)

    async def _located(self, name: str, work: Path) -> tuple[str, str]:
        """Where a registry has this machine's image, by digest, and its manifest.

        Raises:
            ValueError: there is none.
        """
        origin = name
        for _ in range(MAX_DEPTH):
            text = await self._skopeo.run(["inspect", "--raw", origin], name, work)
            manifest = parse(text.encode(), "its manifest")
            if not is_index(manifest):
                if manifest.get("schemaVersion") == 1:
                    raise ValueError(SCHEMA_1)
                return f"{_UNTAGGED.sub('', name)}@sha256:{hashlib.sha256(text.encode()).hexdigest()}", text
            origin = f"{_UNTAGGED.sub('', name)}@sha256:{chosen(objects(manifest, 'manifests'))}"
        raise ValueError(f"more than {MAX_DEPTH} indices, each in another")

    async def _unpack(self, pulled: PulledImage, source: str, work: Path, progress: Progress) -> ImageInfo:
        progress("unpacking", None)
        info = image_info(pulled, source)
        with self._stacking(f"image {source}: unpacking", work) as stacking:
            layers = await stacking.pulled(pulled.layers, info.workdir or "/")
            size = sum(self._layers.size(layer) or 0 for layer in layers)
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
            there = self.find(image.id)
            if there is not None:
                return there
            below, base = self._below(image)
            with self._stacking(f"image {image.source}", work) as stacking:
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
            write_whole(self._root / "images" / image.info.id, image.model_dump_json().encode())
            self._known[image.info.id] = image
            if self._swept != self._layers.dropped:
                self._swept = self._layers.dropped
                await asyncio.to_thread(self._remove_gone)
        return image.info

    def _remove_gone(self) -> None:
        """Remove what is kept of images whose layers aren't all here, and the names that meant them. Blocking."""
        here: set[str] = set()
        for path in self._root.joinpath("images").iterdir():
            if self._read(path.name) is not None:
                here.add(path.name)
                continue
            path.unlink(missing_ok=True)
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
        return image if self._layers.has(image.layers) else None

    async def copy_layer(self, layer: str, target: str) -> None:
        """Copy a layer that nothing changes, whiteouts and attributes included.

        Raises:
            ImageUnavailable: the disk is full, or it takes too long.
        """
        copy = ["cp", "-a", "--preserve=all", "--sparse=auto", "--", layer, target]
        await run(copy, "keeping a built layer", folder=self._root, deadline_s=self._settings.unpack_timeout_s)

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
                        await asyncio.to_thread(file.write, chunk)
            except OSError as error:
                raise ImageUnavailable(f"the archive could not be kept: {error.strerror}") from error
            yield str(path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
