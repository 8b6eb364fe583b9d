"""The images of a sandbox server's host, over its HTTP interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType

import aiohttp

from atropos.errors import BackendUnavailable, ImageUnavailable, NotSupported
from atropos.slots.client.server_requests import ServerRequests
from atropos.wire import ImageInfo, ImageRequest, ImageState, KeepRequest, LackingLayers, LackingRequest

Archive = Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens an archive: its bytes, which are there as long as the context is open."""
NO_ARCHIVES: Mapping[str, Archive] = MappingProxyType({})


class ServerImages:
    """See the module; a part of `SandboxClient`."""

    def __init__(self, requests: ServerRequests, archives: Mapping[str, Archive] = NO_ARCHIVES) -> None:
        self._requests = requests
        self._archives = archives

    async def find(self, source: str) -> ImageInfo | None:
        """What a source means on the server's host, where that is known without preparing anything."""
        request = ImageRequest(source=source, pull=False)
        try:
            return (await self._requests.ask("POST", "/v1/images", ImageState, request)).image
        except (NotSupported, ImageUnavailable):
            return None

    async def keep(self, snapshot_id: str, wanted: KeepRequest) -> ImageInfo:
        """Keep a snapshot as an image of the server's host, named `atropos-build:KEY`.

        Raises:
            ImageUnavailable: there is no room.
            NotSupported: it has several layers.
        """
        path = f"/v1/snapshots/{snapshot_id}/image"
        return await self._requests.ask("POST", path, ImageInfo, wanted, patient=True)

    async def copy(self, image: ImageInfo, to: ServerImages) -> ImageInfo:
        """Bring a built image, whose parent is there already, to another server.

        Raises:
            SandboxError: it is not here, doesn't fit there, or the transfer broke; nothing is left there then.
        """
        query = {
            "parent": image.parent or "",
            "parent_source": image.parent_source or "",
            "bytes": str(image.bytes),
            "settings": image.model_dump_json(include={"env", "workdir", "user"}),
        }
        path = f"/v1/images/{image.id}/layer"
        try:
            raw = await self._requests.pipe(path, to._requests, query, "application/x-tar")
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"the image could not be copied to {to._requests.url}: {error!r}") from error
        return to._requests.parsed(ImageInfo, raw, path)

    async def give(self, image: ImageInfo, source: str, to: ServerImages) -> ImageInfo:
        """Bring an image of a registry to another server: its configuration, and the layers that are not there.

        Args:
            image: what the source is here.
            source: where it comes from.
            to: the other server's.

        Raises:
            ImageUnavailable: it can't be given, or not be kept there.
            SandboxError: the transfer broke.
        """
        request = LackingRequest(layers=image.layers)
        lacking = (await to._requests.ask("POST", "/v1/images/lacking", LackingLayers, request)).lacking
        path = f"/v1/images/{image.id}/layers?wanted={','.join(map(str, lacking))}"
        try:
            raw = await self._requests.pipe(path, to._requests, {"source": source}, "application/octet-stream")
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"the image could not be given to {to._requests.url}: {error!r}") from error
        return _ready(to._requests.parsed(ImageState, raw, path))

    async def prepare(self, source: str, *, progress: Callable[[ImageState], None] | None = None) -> ImageInfo:
        """Have the server pull and unpack an image, unless its host has it.

        Args:
            source: where it comes from; see `atropos.images.reference`.
            progress: called with each state that the server reports.

        Raises:
            ImageUnavailable: it can't be prepared; the message names the phase and the cause.
        """
        try:
            state = await self._requests.ask("POST", "/v1/images", ImageState, ImageRequest(source=source))
        except NotSupported:
            # The server can't read it, and no file of it is known here: the refusal stands.
            if source not in self._archives:
                raise
            path = "/v1/images/archive"
            async with self._archives[source]() as chunks:
                raw = await self._requests.put(path, {"source": source}, chunks)
            state = self._requests.parsed(ImageState, raw, path)
        while state.phase not in {"ready", "failed"}:
            if progress is not None:
                progress(state)
            # Shorter than a request may take; a second where somebody watches.
            request = ImageRequest(source=source, wait_s=1 if progress else 20)
            state = await self._requests.ask("POST", "/v1/images", ImageState, request, patient=True)
        if progress is not None:
            progress(state)
        return _ready(state)


def _ready(state: ImageState) -> ImageInfo:
    if state.image is None:
        raise ImageUnavailable(state.error)
    return state.image
