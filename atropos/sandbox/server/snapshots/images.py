"""Preparing images on this server, and their use as bases of leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from atropos.errors import ConfigError, ImageUnavailable, NotSupported, SandboxError
from atropos.images.reference import POOL_BASE, ImageSource, base_name
from atropos.sandbox.server.snapshots.layer_tar import packed_layers, unpack_layers
from atropos.sandbox.server.snapshots.layers import Layers
from atropos.sandbox.server.state.state import ServerState
from atropos.wire import (
    ImageInfo,
    ImageSettings,
    ImageState,
    KeepRequest,
    LackingLayers,
    LackingRequest,
    LayerOffer,
    LeaseRequest,
)

if TYPE_CHECKING:
    from atropos.images.store import Phase, Progress

log = logging.getLogger(__name__)
_PREFIX = "image:"


class Images:
    """What this server knows of images."""

    def __init__(self, state: ServerState, layers: Layers) -> None:
        self._state = state
        self._layers = layers
        self._preparing: dict[str, asyncio.Task[ImageState]] = {}
        self._states: dict[str, ImageState] = {}
        """How far those are."""
        self._bases: dict[str, ImageInfo] = {}

    async def prepare(
        self, source: str, wait_s: float | None, archive: str | None = None, *, pull: bool = True
    ) -> ImageState:
        """Begin to prepare an image unless that was done; its state after at most `wait_s` (None: once it has ended).

        Raises:
            NotSupported: it is no name of an image, or only its owner's machine can read it.
            ImageUnavailable: it is not here, and a built one, or not to be pulled.
        """
        parsed, store = _parse(source), self._state.host.store
        name = str(parsed)
        if parsed.transport == "atropos-base":
            return ImageState(source=name, phase="ready", image=self._state.host.base_image(name))
        if (known := store.known(name)) is not None:
            return ImageState(source=name, phase="ready", done=1.0, image=known)
        if parsed.transport == "atropos-build" or not pull:
            raise ImageUnavailable(f"image {source}: it is not on this server's host")
        # Its file is on the client's machine: the server can't read it.
        if parsed.transport != "docker" and archive is None and name not in self._preparing:
            raise NotSupported(f"image {source}: send it as an archive (PUT /v1/images/archive?source=…)")
        preparing = self._begun(parsed, lambda progress: store.prepare(parsed, progress, archive))
        # `wait` cancels nothing: the preparation goes on for whoever asks next.
        await asyncio.wait([preparing], timeout=wait_s)
        return preparing.result() if preparing.done() else self._states[name]

    def lacking(self, wanted: LackingRequest) -> LackingLayers:
        """Which layers of an image are not on this server's host."""
        return LackingLayers(lacking=self._state.host.store.lacking(wanted.layers))

    async def take(self, source: str, image_id: str, chunks: AsyncIterator[bytes]) -> ImageState:
        """Prepare an image of a registry by what another server gives.

        Raises:
            NotSupported: it is no name of such an image.
        """
        parsed, store = _parse(source), self._state.host.store
        if parsed.transport != "docker":
            raise NotSupported(f"source={source!r:.200}: the name of a registry's image is needed")
        return await self._begun(parsed, lambda progress: store.take(parsed, progress, image_id, chunks))

    def _begun(self, source: ImageSource, work: Callable[[Progress], Awaitable[ImageInfo]]) -> asyncio.Task[ImageState]:
        """The preparation of an image: the one that goes on, else this one."""
        name = str(source)
        if name not in self._preparing:
            self._states[name] = ImageState(source=name, phase="queued")
            self._preparing[name] = self._state.tasks.spawn(self._prepare(name, work), f"prepare {name}")
        return self._preparing[name]

    async def receive(self, source: str, chunks: AsyncIterator[bytes]) -> ImageState:
        """Prepare an image from the archive that a client sends.

        Raises:
            NotSupported: the source is no archive's name.
            ImageUnavailable: it doesn't fit.
        """
        if not source.startswith(("oci-archive:", "docker-archive:")):
            raise NotSupported(f"source={source!r:.200}: oci-archive:NAME or docker-archive:NAME is needed")
        async with self._state.host.store.receiving(chunks) as archive:
            return await self.prepare(source, None, archive)

    async def keep(self, snapshot_id: str, wanted: KeepRequest) -> ImageInfo:
        """Keep a snapshot of one layer as an image, over its lease's base.

        Raises:
            NotSupported: it has several layers.
            ImageUnavailable: there is no room.
            SandboxError: there is no such snapshot.
        """
        snapshot = self._state.snapshots.get(snapshot_id)
        # An image's own layer is one folder: several would have to be merged first.
        if len(snapshot.layers) != 1:
            raise NotSupported(f"snapshot {snapshot_id!r} has {len(snapshot.layers)} layers: only one can be an image")
        base = snapshot.base
        below = self.image(base)
        parent = below.source if below is not None else POOL_BASE if base is None else f"atropos-base:{base}"
        layer = snapshot.layers[0]
        image = _built(wanted.key, layer.bytes, parent if below is None else below.id, parent, wanted)
        store = self._state.host.store
        # While it is copied, its owner may drop the snapshot.
        self._layers.hold(snapshot.layers)
        try:
            return await store.keep(image, lambda target: store.copy_layer(layer.path, target))
        finally:
            self._layers.release(snapshot.layers)

    async def receive_layer(self, key: str, offer: LayerOffer, chunks: AsyncIterator[bytes]) -> ImageInfo:
        """Keep a built image whose layer another server sends.

        Raises:
            ImageUnavailable: its parent is not here, or there is no room.
            InvalidSnapshot: it is no layer.
        """
        store = self._state.host.store

        async def fill(target: str) -> None:
            os.mkdir(target, 0o755)
            await unpack_layers([target], f"image atropos-build:{key}", chunks)

        return await store.keep(_built(key, offer.bytes, offer.parent, offer.parent_source, offer.settings), fill)

    @contextlib.asynccontextmanager
    async def layer(self, key: str) -> AsyncGenerator[AsyncIterator[bytes]]:
        """A built image's own layer as a tar, for another server.

        Raises:
            ImageUnavailable: it is not here.
        """
        store = self._state.host.store
        image = store.known(f"atropos-build:{key}")
        if image is None:
            raise ImageUnavailable(f"image atropos-build:{key}: it is not on this server's host")
        folders = store.hold(image).folders
        try:
            async with packed_layers(folders[:1], f"image {image.source}") as chunks:
                yield chunks
        finally:
            store.release(image.id)

    async def _prepare(self, name: str, work: Callable[[Progress], Awaitable[ImageInfo]]) -> ImageState:
        began, result = time.monotonic(), ImageUnavailable.code

        def progress(phase: Phase, done: float | None) -> None:
            self._states[name] = ImageState(source=name, phase=phase, done=done)

        try:
            image = await work(progress)
            state, result = ImageState(source=name, phase="ready", done=1.0, image=image), "ok"
            self._state.counters["images_prepared"] += 1
        except SandboxError as error:
            state = ImageState(source=name, phase="failed", error=str(error))
            self._state.counters["images_failed"] += 1
        except OSError as error:
            log.exception("image %s could not be prepared", name)
            state = ImageState(source=name, phase="failed", error=f"image {name}: {error}")
        finally:
            self._state.meters.prepare.observe(time.monotonic() - began, result)
            # In the same turn in which the task ends: whoever asks next starts anew, or finds the image in the store.
            del self._preparing[name], self._states[name]
        return state

    # ------------------------------------------------------------------------------------------------------------ bases

    def base_of(self, request: LeaseRequest) -> str | None:
        """The name of the base that a lease asks for, ready to be used; None: the server's default.

        Raises:
            NotSupported: there is no such base.
            ImageUnavailable: the image is not prepared on this server.
        """
        base = request.base
        if request.image is not None:
            if base is not None:
                raise NotSupported("base and image exclude each other: set one of them")
            source = _parse(request.image)
            if source.transport == "atropos-base":
                base = base_name(str(source))
            elif (image := self._state.host.store.known(str(source))) is not None:
                base = f"{_PREFIX}{image.id}"
            else:
                raise ImageUnavailable(f"image {request.image}: it is not prepared on this server")
        self.ensure_base(base)
        return base

    def image(self, base: str | None) -> ImageInfo | None:
        """The image that a base is."""
        return None if base is None else self._bases.get(base)

    def ensure_base(self, base: str | None) -> None:
        """Have the host know a base, which a lease or snapshot is to stand on.

        Raises:
            NotSupported: there is no such base.
            ImageUnavailable: the image is not prepared on this server (any more).
        """
        if base is None or base in self._state.config.bases or base in self._bases:
            return
        if not base.startswith(_PREFIX):
            known = ", ".join(sorted(self._state.config.bases)) or "none"
            raise NotSupported(f"base {base!r} is not known to this server; known: {known}")
        image = self._state.host.store.find(base.removeprefix(_PREFIX))
        if image is None:
            raise ImageUnavailable(f"image {base.removeprefix(_PREFIX)[:12]} is not prepared on this server")
        self._state.host.add_base(base, image)
        self._bases[base] = image

    def forget_unused(self, arriving: AbstractSet[str | None]) -> None:
        """Let the store remove images on which no lease and no snapshot stands, nor one that is being imported."""
        runs, snapshots = self._state.runs.values(), self._state.snapshots.by_id.values()
        # Also those of snapshots that are on their way: their base was checked when they began.
        used = arriving | {run.base for run in runs} | {snapshot.base for snapshot in snapshots}
        for base in [each for each in self._bases if each not in used]:
            del self._bases[base]
            self._state.host.drop_base(base)


def _built(key: str, size: int, parent: str, parent_source: str, settings: ImageSettings) -> ImageInfo:
    return ImageInfo(
        id=key,
        source=f"atropos-build:{key}",
        bytes=size,
        parent=parent,
        parent_source=parent_source,
        env=settings.env,
        workdir=settings.workdir,
        user=settings.user,
    )


def _parse(source: str) -> ImageSource:
    try:
        return ImageSource.parse(source)
    except ConfigError as error:
        raise NotSupported(str(error)) from None
