"""Brings the layers of one image into a store: those that it lacks are unpacked, several at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

from atropos.aio import task_group
from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images import flatten, stack
from atropos.images.layer_store import LayerStore
from atropos.images.layout import PackedLayer, PulledImage
from atropos.images.programs import run_module
from atropos.images.pulling import Puller

MAX_LAYERS = 128
"""Most layers of an image. Overlay takes 500, named in one page of options, where a lease's snapshots come on top."""
UNPACKED_RATIO = 3
"""Bytes of an unpacked layer for one of its compressed bytes: Debian's and Python's images have 2.5 to 3."""


class Stacking:
    """Within it, the image's layers are held, so that they are there until the image is.

    Args:
        store: the layers that are here.
        settings: how long unpacking may take.
        ids: how many ids a slot has.
        what: what is done, for errors.
        work: the folder for what is being made.
    """

    def __init__(self, store: LayerStore, settings: ImageStoreSettings, ids: int, what: str, work: Path) -> None:
        self._store = store
        self._deadline_s = settings.unpack_timeout_s
        self._ids = ids
        self._what = what
        self._work = work
        self._held = contextlib.ExitStack()
        self._room = 0
        """Bytes that may still be added."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def hold(self, layer: str) -> bool:
        """Use a layer within; False: it is not here."""
        if not self._store.hold(layer):
            return False
        self._held.callback(self._store.release, layer)
        return True

    async def pulled(self, image: PulledImage, workdir: str, puller: Puller) -> tuple[str, ...]:
        """The layers of an image, topmost first.

        Args:
            image: what it is.
            workdir: a folder that is there afterwards, as Docker makes a container's WORKDIR.
            puller: makes layers.

        Raises:
            ImageUnavailable: what an image must not hold, or not what its configuration says; no room.
        """
        lacking = [layer for layer in image.layers if not self._store.has([layer.diff_id])]
        # For all layers at once: images that got their room layer by layer could wait for each other's.
        await self.claim((1 if image.in_order else UNPACKED_RATIO) * sum(layer.size for layer in lacking))
        keys: list[asyncio.Task[str]] = []
        diff_ids = [layer.diff_id for layer in image.layers]
        async with task_group() as tasks:
            for layer in image.layers:
                # The tasks of the layers below, which it awaits where it has to be settled on them.
                work = self._layer(layer, diff_ids[: len(keys) + 1], keys[:], puller)
                keys.append(tasks.create_task(work))
                if image.in_order:
                    # Their tars follow each other in one stream, so that no later one could be read before.
                    await keys[-1]
        # one that stands alone may come again, which overlay refuses; the upper one shows all that the lower one has
        ids = tuple(dict.fromkeys(key.result() for key in reversed(keys)))
        if not ids or await asyncio.to_thread(self._lacks, [self._store.files(key) for key in ids], workdir):
            layer = _folder_layer(self._work / "workdir.tar", workdir)
            ids = (await self._layer(layer, [*diff_ids, layer.diff_id], keys, puller), *ids)
        return await self.fitted(ids)

    async def _layer(
        self, layer: PackedLayer, diff_ids: Sequence[str], below: Sequence[asyncio.Task[str]], puller: Puller
    ) -> str:
        """Have a layer here, and held; its id: of its names the first where it stands alone."""
        alone_id, chain = names(diff_ids)
        # The whole chain in the name: the same layer on another base may become another one. Who holds it waits for
        # lower layers alone, so that no two wait for each other.
        async with self._store.locked(f"layer-{chain}"):
            # The chain's first: it is this very image's, while one that stands alone must also suit those below.
            for key in (chain, alone_id):
                if self.hold(key) and (key == chain or await self._lies_well(key, below)):
                    return key
            place = self._work / f"layer-{len(below)}"
            place.mkdir()
            done = await puller.unpack(layer, place, self._room)
            self._take(done["bytes"])
            # Awaited only now, so that layers are unpacked at once and only their settling waits; no program is held
            # meanwhile.
            lower = [self._store.files(await key) for key in reversed(below)]
            # Overlay shows the root of the topmost layer; without an entry of its own, it must be what is below.
            alone = done["stands_alone"] and (done["has_root"] or not lower or _has_plain_root(lower[0]))
            if not alone:
                added = await puller.settle(place, self._room, lower)
                self._take(added["bytes"])
                done["bytes"] += added["bytes"]
            return await self._put(place, alone_id if alone else chain, done["bytes"])

    async def _lies_well(self, alone: str, below: Sequence[asyncio.Task[str]]) -> bool:
        """Whether a layer that stands alone is the same on these: it may say nothing of the root's attributes."""
        if not below or not _has_plain_root(self._store.files(alone)):
            return True
        return _has_plain_root(self._store.files(await below[-1]))

    async def built(self, layer: str, size: int, fill: Callable[[str], Awaitable[None]]) -> str:
        """A layer that `fill` makes in a folder, as overlay keeps it.

        Raises:
            ImageUnavailable: there is no room.
        """
        if self.hold(layer):
            return layer
        await self.claim(size)
        self._take(size)
        place = self._work / "layer"
        place.mkdir()
        # After `claim` and `_take`: what is copied counts before it is there.
        await fill(f"{place}/files")
        # A built layer can't be pulled again, so its name must not be there before its content is on the disk.
        return await self._put(place, layer, size, lasting=True)

    async def fitted(self, layers: tuple[str, ...]) -> tuple[str, ...]:
        """A stack of at most `MAX_LAYERS`: the lowest layers of a higher one are merged, to leave room for builds."""
        if len(layers) <= MAX_LAYERS:
            return layers
        # The lowest: images built on one parent share them, and so what they are merged into.
        upper, lowest = layers[: MAX_LAYERS // 2], layers[MAX_LAYERS // 2 :]
        key = _digest("flat", *lowest)
        async with self._store.locked(f"layer-{key}"):
            # Another image with these layers may have merged them while this one waited for the lock.
            if not self.hold(key):
                size = sum(self._store.size(layer) or 0 for layer in lowest)  # what the files take if the others go
                await self.claim(size)
                place = self._work / "flat"
                place.mkdir()
                files = map(self._store.files, lowest)
                await run_module(
                    flatten, self._what, place, *files, folder=self._store.root, deadline_s=self._deadline_s
                )
                await self._put(place, key, size)
        return (*upper, key)

    def _lacks(self, layers: Sequence[str], folder: str) -> bool:
        """Whether layers have nothing at a folder's path, nor a link on it."""
        at = ""
        for name in filter(None, folder.split("/")):
            with contextlib.ExitStack() as opened:
                entry = stack.look(stack.find(layers, at, opened).parts, name)
            at = f"{at}/{name}"
            if entry is None or stat.S_ISLNK(entry[1].st_mode):
                return entry is None
            if not stat.S_ISDIR(entry[1].st_mode):  # no command could start there
                raise ImageUnavailable(f"{self._what}: its WORKDIR {folder} leads through a file, {at[1:]}")
        return False

    async def claim(self, size: int) -> None:
        """Make room for what is about to be made.

        Raises:
            ImageUnavailable: there is none.
        """
        try:
            self._room = await self._store.claim(size, self._work)
        except ImageUnavailable as error:
            raise ImageUnavailable(f"{self._what}: {error}") from None

    def _take(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ImageUnavailable(
                f"{self._what}: {-(self._room >> 20)} MiB more than the store has room for (image_store.quota_mib)"
            )

    async def _put(self, place: Path, layer: str, size: int, *, lasting: bool = False) -> str:
        await self._store.put(place, layer, size, self._what, lasting=lasting)
        self._held.callback(self._store.release, layer)
        return layer


def names(diff_ids: Sequence[str]) -> tuple[str, str]:
    """The ids that the last of these layers may have: its own digest, and one of all layers up to it."""
    return diff_ids[-1], _digest("on", *diff_ids)


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _has_plain_root(files: str) -> bool:
    """Whether the root of what is below has the attributes of a layer that says nothing of its own."""
    status = os.stat(files)
    return (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o755, 0, 0)


def _folder_layer(file: Path, folder: str) -> PackedLayer:
    """Write a layer of one folder."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        # Always the same bytes (time 0, root's), so that all images with this WORKDIR share one layer.
        info = tarfile.TarInfo(f"./{folder.strip('/')}")
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return PackedLayer(digest, len(data), digest, str(file))
