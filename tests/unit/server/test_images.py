"""What a server knows of images, over a store without images."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

from atropos.sandbox.server.metrics import Meters
from atropos.sandbox.server.snapshots.images import Images
from atropos.wire import ImageInfo


class Store:
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    def known(self, _: str) -> None:
        return None

    async def prepare(self, source, _progress, _archive) -> ImageInfo:
        await self.go_on.wait()
        return ImageInfo(id="0" * 64, source=str(source), bytes=1)


async def test_each_of_more_images_than_are_remembered_becomes_ready(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.snapshots.images.MAX_STATES", 4)
    store = Store()
    state = SimpleNamespace(
        host=SimpleNamespace(store=store), spawn=asyncio.create_task, counters=Counter(), meters=Meters()
    )
    images = Images(state, SimpleNamespace())
    asking = [asyncio.create_task(images.prepare(f"busybox:{n}", 20)) for n in range(8)]
    while len(images._states) < 8:  # noqa: ASYNC110
        await asyncio.sleep(0)
    store.go_on.set()
    assert [each.phase for each in await asyncio.gather(*asking)] == ["ready"] * 8
    assert len(images._states) <= 4
