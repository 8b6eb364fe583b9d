"""Images over the executor API: prepared in the pool's containers, with progress."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.aio import Tasks
from atropos.api.accounts.account import Account
from atropos.api.http import Refusal
from atropos.errors import ConfigError, QuotaReached, SandboxError
from atropos.images.reference import SERVERS_OWN, ImageSource
from atropos.wire import ImageInfo, ImageState

if TYPE_CHECKING:
    from atropos.slots import SlotPool

MAX_STATES = 1000
"""Images whose states are remembered; the oldest finished ones are forgotten."""


def checked_source(image: str) -> str:
    """Check that clients may name an image: one of a registry, or one that was built.

    Raises:
        Refusal: 422, it is no reference, or names files of this machine.
    """
    try:
        source = ImageSource.parse(image)
    except ConfigError as error:
        raise Refusal(422, "invalid", str(error)) from None
    if source.transport not in SERVERS_OWN:
        raise Refusal(422, "invalid", f"image: {source.transport}: names files of the server; name a registry's image")
    return image


@dataclass
class _Preparation:
    at: ImageState
    task: asyncio.Task[ImageInfo | None]

    @property
    def again(self) -> bool:
        """Whether it failed or no container was up, so that the next request tries again."""
        return self.task.done() and (self.task.exception() is not None or self.task.result() is None)

    def state(self) -> ImageState:
        """The progress."""
        if not self.task.done():
            return self.at
        error = None if self.task.cancelled() else self.task.exception()
        if isinstance(error, SandboxError | ConfigError):
            return ImageState(source=self.at.source, phase="failed", error=str(error))
        image = None if self.task.cancelled() else self.task.result()
        if image is None:
            return ImageState(source=self.at.source, phase="queued")
        return ImageState(source=self.at.source, phase="ready", done=1.0, image=image)


class PreparedImages:
    """The images that a key's holder asked for. `pool`: the executor's."""

    def __init__(self, pool: SlotPool, account: Account) -> None:
        self._pool = pool
        self._account = account
        self._tasks = Tasks("images of a key")
        self._all: dict[str, _Preparation] = {}

    async def prepare(self, image: str, wait_s: float) -> ImageState:
        """Prepare an image, unless that is done or under way, and return the progress after at most `wait_s`.

        A request after a failure tries again.

        Raises:
            Refusal: 422, no such image may be named; 429, too many are under way.
        """
        known = self._all.get(checked_source(image))
        if known is None or known.again:
            with self._account.noting_refusals("image", image):
                try:
                    self._account.share.use_image(image)
                except QuotaReached as error:
                    raise Refusal(429, error.code, str(error), retry_after_s=60) from None
                known = self._start(image)
            self._account.note("image.prepare", image)
        await asyncio.wait([known.task], timeout=wait_s)
        return known.state()

    def _start(self, image: str) -> _Preparation:
        done = [name for name, one in self._all.items() if one.task.done()]
        for name in done[: max(0, len(self._all) - MAX_STATES + 1)]:
            del self._all[name]
        if len(self._all) >= MAX_STATES:
            raise Refusal(429, "full", f"{MAX_STATES} images are being prepared", retry_after_s=5)

        def report(_: str, state: ImageState) -> None:
            if state.phase not in {"ready", "failed"}:  # ready and failed are of one container, not of the pool
                preparation.at = state.model_copy(update={"source": image})

        task = self._tasks.spawn(self._pool.prepare(image, progress=report), image, awaited=True)
        preparation = self._all[image] = _Preparation(ImageState(source=image, phase="queued"), task)
        return preparation

    async def aclose(self) -> None:
        """Cancel what is under way."""
        await self._tasks.cancel()
