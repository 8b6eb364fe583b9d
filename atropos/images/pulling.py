"""The programs at work while an image is prepared: one that gets it from its registry, and some that make its layers.

They are kept for a while after an image, for the next one, since small ones take less time than a program's start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from atropos.aio import Tasks, task_group
from atropos.config import ImageStoreSettings
from atropos.images import fetch, layers
from atropos.images.layout import PackedLayer
from atropos.images.programs import Worker

PARALLEL = 3
"""Layers of one image that are made at once."""
# Each takes an inode, of which a file system may have a fixed number.
MAX_MEMBERS = 2_000_000
"""Files and folders of one layer."""
# The default of fs.pipe-max-size, up to which nobody needs a capability (pipe(7)); with 64 KiB both ends switch sixteen
# times as often.
PIPE_BYTES = 1 << 20
PAUSES_S = (1.0, 3.0, 9.0)
"""Pauses before a registry that answered with 5xx, or broke off, is asked again."""
IDLE_S = 5.0
"""How long programs wait for another image."""


Bring = Callable[[PackedLayer, int], Coroutine[None, None, None]]


class _LayerMaker:
    """A program that makes layers, once it was started, and the pipe that it reads.

    Attributes:
        orders: the pipe's end for orders, and for what follows them.
        stdin: its other end.
        worker: the program.
    """

    def __init__(self, opened: contextlib.AsyncExitStack) -> None:
        # Made before both programs, since the one that asks registries must inherit all write ends when it starts.
        self.stdin, self.orders = os.pipe()
        self.worker: Worker | None = None
        for end in (self.stdin, self.orders):
            opened.callback(os.close, end)
        with contextlib.suppress(OSError):  # the user has many pipes
            fcntl.fcntl(self.orders, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class Puller:
    """The programs of one image at a time, started as they are needed.

    Args:
        settings: how registries are asked.
        folder: the store's.
        ids: how many ids a slot has.

    Attributes:
        image: the image's name, for errors.
        bring: has a layer that is no file written to a descriptor; the registry's, once it has described the image.
    """

    def __init__(self, settings: ImageStoreSettings, folder: Path, ids: int) -> None:
        self.image = ""
        self.bring: Bring = self._from_registry
        self._settings = settings
        self._folder = folder
        self._ids = ids
        self._running = contextlib.AsyncExitStack()
        self._workers: list[Worker] = []
        self._fetcher: Worker | None = None
        makers = [_LayerMaker(self._running) for _ in range(PARALLEL)]
        self._orders = tuple(maker.orders for maker in makers)
        # Last in, first out: a maker whose program runs comes before one that would have to start it.
        self._free: asyncio.LifoQueue[_LayerMaker] = asyncio.LifoQueue()
        for maker in makers:
            self._free.put_nowait(maker)

    @property
    def is_whole(self) -> bool:
        """Whether all of its programs run."""
        return all(worker.runs for worker in self._workers)

    async def aclose(self) -> None:
        """Kill its programs."""
        await self._running.aclose()

    async def describe(self, name: str, parts: Path) -> None:
        """Get what an image of a registry is.

        Args:
            name: with its registry's host.
            parts: the folder for it; as `layout.read_folder` reads it.

        Raises:
            ImageUnavailable: no such image, no access, no registry.
        """
        registry = {
            "name": name,
            "mirrors": self._settings.mirrors,
            "insecure": self._settings.insecure_registries,
            "auth_file": self._settings.auth_file and os.path.abspath(self._settings.auth_file),
            "pauses_s": PAUSES_S,
        }
        # The image before may have come from another host.
        self.bring = self._from_registry
        if self._fetcher is None:
            self._fetcher = await self._start(Worker.started(fetch, folder=self._folder, passed=self._orders))
        self._fetcher.order({"registry": registry, "folder": str(parts)})
        # Its reports may still be in the pipe; what follows them is the answer to this order.
        while "bytes" in await self._fetcher.answer(f"{self.image}: pulling"):  # of the image before
            pass

    async def watch(self, report: Callable[[int], None]) -> None:
        """Report how many bytes of layers have come from the registry, until this is cancelled.

        Raises:
            ImageUnavailable: a layer can't be had.
        """
        assert self._fetcher is not None
        while True:
            report((await self._fetcher.answer(f"{self.image}: pulling"))["bytes"])

    async def unpack(self, layer: PackedLayer, place: Path, max_bytes: int) -> dict[str, Any]:
        """Unpack a layer into a folder, from its file or as it is brought; as `unpack.unpack`.

        Raises:
            ImageUnavailable: it holds what an image must not, or is not the one that the image names.
        """
        order = layers.Unpack(str(place), max_bytes, layer.diff_id, layer.size, layer.file)
        return await self._made(order, layer)

    async def settle(self, place: Path, max_bytes: int, lower: Sequence[str]) -> dict[str, Any]:
        """Settle a layer on those below it; as `settle.settle`.

        Raises:
            ImageUnavailable: there it is what an image must not be.
        """
        return await self._made(layers.Settle.on(lower, str(place), max_bytes))

    async def _made(self, order: layers.Unpack | layers.Settle, layer: PackedLayer | None = None) -> dict[str, Any]:
        maker = await self._free.get()  # one that fails never comes back
        if maker.worker is None:
            started = Worker.started(layers, MAX_MEMBERS, self._ids, folder=self._folder, stdin=maker.stdin)
            maker.worker = await self._start(started)
        # Blocking, and whole: the pipe is empty, as the maker answered its last order, and an order is shorter than
        # PIPE_BUF.
        os.write(maker.orders, layers.line(order))
        # Bytes are brought while the answer is awaited: the program reads them before it answers, and its failure ends
        # both.
        async with task_group() as tasks:
            if layer is not None and layer.file is None:
                tasks.create_task(self.bring(layer, maker.orders))
            done = await maker.worker.answer(f"{self.image}: unpacking")
        self._free.put_nowait(maker)
        return done

    async def _from_registry(self, layer: PackedLayer, to: int) -> None:
        assert self._fetcher is not None
        self._fetcher.order({"digest": layer.digest, "size": layer.size, "to": to})

    async def _start(self, started: contextlib.AbstractAsyncContextManager[Worker]) -> Worker:
        worker = await self._running.enter_async_context(started)
        self._workers.append(worker)
        return worker


class Pullers:
    """The pullers of a store. Args: as for `Puller`."""

    def __init__(self, settings: ImageStoreSettings, folder: Path, ids: int) -> None:
        self._settings = settings
        self._folder = folder
        self._ids = ids
        self._idle: dict[Puller, asyncio.Task[None]] = {}
        """With the task that ends each."""
        self._tasks = Tasks(f"pullers of {folder}")

    @contextlib.asynccontextmanager
    async def one(self, image: str) -> AsyncGenerator[Puller]:
        """One for an image; what served one that failed serves no other."""
        puller = self._idle_one() or Puller(self._settings, self._folder, self._ids)
        puller.image = image
        try:
            yield puller
        # Within a failed one a layer may be half read; its programs would take the rest for orders.
        except BaseException:
            await puller.aclose()
            raise
        self._idle[puller] = self._tasks.spawn(self._end(puller), "end of an idle one")
        await asyncio.sleep(0)  # one that has not begun would end nothing when it is cancelled

    def _idle_one(self) -> Puller | None:
        # The one used last: the others reach the end of IDLE_S sooner.
        for puller in reversed(self._idle):
            if puller.is_whole:
                self._idle.pop(puller).cancel()
                return puller
        return None

    async def _end(self, puller: Puller) -> None:
        """End a puller that nobody uses for a while."""
        try:
            await asyncio.sleep(IDLE_S)
        finally:
            if self._idle.pop(puller, None) is not None:
                await puller.aclose()

    async def aclose(self) -> None:
        """End those that nobody uses."""
        await self._tasks.cancel()
