"""The programs at work while an image is pulled: one that gets it from its registry, and some that unpack layers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Self

from atropos.config import ImageStoreSettings
from atropos.images import fetch, unpack
from atropos.images.layout import PackedLayer
from atropos.images.programs import Worker

PARALLEL = 3
"""Layers of one image that are unpacked at once."""
MAX_MEMBERS = 2_000_000
"""Files and folders of one layer."""
PIPE_BYTES = 1 << 20
PAUSES_S = (1.0, 3.0, 9.0)
"""Pauses before a registry that answered with 5xx, or broke off, is asked again."""


class Fetcher:
    """An image's registry, as the program that asks it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, settings: ImageStoreSettings, name: str, what: str, parts: Path, to: Unpackers
    ) -> AsyncGenerator[Self]:
        """One that has got what the image is, into the folder `parts`.

        Raises:
            ImageUnavailable: no such image, no access, no registry.
        """
        registry = {
            "name": name,
            "mirrors": settings.mirrors,
            "insecure": settings.insecure_registries,
            "auth_file": settings.auth_file and os.path.abspath(settings.auth_file),
            "pauses_s": PAUSES_S,
        }
        async with Worker.started(fetch, what, parts, folder=parts.parent, passed=tuple(to.ends)) as worker:
            worker.order(registry)
            await worker.answer()
            yield cls(worker)

    def send(self, layer: PackedLayer, to: int) -> None:
        """Have a layer written to a descriptor."""
        self._worker.order({"digest": layer.digest, "size": layer.size, "to": to})

    async def watch(self, report: Callable[[int], None]) -> None:
        """Report how many bytes of layers have come, until this is cancelled.

        Raises:
            ImageUnavailable: a layer can't be had.
        """
        while True:
            report((await self._worker.answer())["bytes"])


class Unpackers:
    """Programs that unpack layers of one image, one after the other each, started as they are needed.

    Args:
        what: what is done, for errors.
        folder: the store's.
        ids: how many ids a slot has.
    """

    def __init__(self, what: str, folder: Path, ids: int) -> None:
        self._what = what
        self._folder = folder
        self._ids = ids
        self._running = contextlib.AsyncExitStack()
        self._free: asyncio.LifoQueue[tuple[Worker | None, int, int]] = asyncio.LifoQueue()
        """Those that have nothing to do: the program, once it was started, and the ends of the pipe that it reads."""
        self.ends: list[int] = []
        """Where orders, and what follows them, can be written to."""

    async def __aenter__(self) -> Self:
        for _ in range(PARALLEL):
            reading, writing = os.pipe()
            for end in (reading, writing):
                self._running.callback(os.close, end)
            with contextlib.suppress(OSError):  # the user has many pipes
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._free.put_nowait((None, reading, writing))
            self.ends.append(writing)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def unpack(self, fetcher: Fetcher | None, layer: PackedLayer, place: Path, max_bytes: int) -> dict[str, Any]:
        """Unpack a layer into a folder; what `unpack` says of it.

        Args:
            fetcher: gets a layer that is no file.
            layer: what is unpacked.
            place: the folder.
            max_bytes: most that it may take.

        Raises:
            ImageUnavailable: it holds what an image must not, or is not the one that the image names.
        """
        worker, reading, writing = await self._free.get()  # one that fails never comes back
        if worker is None:
            started = Worker.started(unpack, self._what, MAX_MEMBERS, self._ids, folder=self._folder, stdin=reading)
            worker = await self._running.enter_async_context(started)
        order = unpack.Order(str(place), max_bytes, layer.diff_id, layer.size, layer.file)
        os.write(writing, order.line())
        if layer.file is None:
            assert fetcher is not None
            fetcher.send(layer, writing)
        done = await worker.answer()
        self._free.put_nowait((worker, reading, writing))
        return done
