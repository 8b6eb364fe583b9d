"""Images of registries, which one container of a pool pulls, and gives to the others."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atropos.errors import SandboxError
from atropos.slots.containers.link import ContainerLink
from atropos.wire import ImageInfo, ImageState

log = logging.getLogger("atropos.slots")
STALLED_S = 10.0
"""How long a container's pull may stand still before another one asks the registry, too."""
GIVES = 4
"""Images that containers give to others at once: their bytes pass through the pool's process."""


@dataclass
class _Pull:
    """An image on its way from its registry.

    Attributes:
        link: the container that gets it.
        moved_at: when it got on last, in the pool's time.
        state: how far it is.
    """

    link: ContainerLink
    moved_at: float
    state: ImageState | None = None


class Pulls:
    """Who pulls an image, and who is given it.

    Args:
        tasks: an image's preparations, by its name.
        now: the pool's clock.
    """

    def __init__(
        self, tasks: Callable[[str], Mapping[ContainerLink, asyncio.Task[ImageInfo]]], now: Callable[[], float]
    ) -> None:
        self._tasks = tasks
        self._now = now
        # By architecture as well: an index has another image for each, and none of them can be given to another
        # machine.
        self._pulls: dict[tuple[str, str], _Pull] = {}
        """Those that others wait for, by the images' names and the containers' architectures."""
        self._gives = asyncio.Semaphore(GIVES)

    async def bring(self, link: ContainerLink, name: str, report: Callable[[ImageState], None]) -> ImageInfo:
        """Have an image in a container: from one that has it, else from its registry, which one at a time asks.

        Args:
            link: the container.
            name: the image's.
            report: called with each state.

        Raises:
            SandboxError: it can't be had.
        """
        if (here := await link.client.images.find(name)) is not None:
            return here
        key = name, link.architecture
        pull = self._pulls.get(key)
        # Looked for again after each wait: what was pulled meanwhile can be given.
        while (giver := self._giver(link, name)) is None:
            if pull is not None and self._now() - pull.moved_at > STALLED_S:
                # Another container may have begun to pull because of the same stall; then that one is waited for.
                pull, stalled = self._pulls.get(key), pull
                pull = None if pull is stalled else pull
            pulling = None if pull is None else self._tasks(name).get(pull.link)
            if pulling is None or pulling.done():
                # Nobody pulls it, or whoever did has failed: this container asks the registry itself.
                return await self._pull(link, name, report)
            report(ImageState(source=name, phase="waiting"))
            # One second: a stall shows only on the clock, since no event comes of it.
            await asyncio.wait([pulling], timeout=1.0)
        holder, image = giver
        try:
            async with self._gives:
                return await holder.client.images.give(image, name, link.client.images)
        except SandboxError as error:
            if link.gone is not None:
                raise
            log.warning("image %s: container %s could not give it: %s", name, holder.container.id, error)
            # What the giver has may be damaged or refused by its digest; the registry has the original.
            return await self._pull(link, name, report)

    def _giver(self, link: ContainerLink, name: str) -> tuple[ContainerLink, ImageInfo] | None:
        """Another container of its architecture that has the image; not all are given it by the same one."""
        here = [
            (each, task.result())
            for each, task in self._tasks(name).items()
            if each is not link and each.gone is None and each.architecture == link.architecture and _is_ready(task)
        ]
        return random.choice(here) if here else None

    async def _pull(self, link: ContainerLink, name: str, report: Callable[[ImageState], None]) -> ImageInfo:
        key = name, link.architecture
        pull = self._pulls[key] = _Pull(link, self._now())

        def move(state: ImageState) -> None:
            # Only a changed state is progress: a server repeats the same one while a registry sends nothing.
            if state != pull.state:
                pull.state, pull.moved_at = state, self._now()
            report(state)

        try:
            return await link.client.images.prepare(name, progress=move)
        finally:
            # A container that took over after a stall has put its own pull here.
            if self._pulls.get(key) is pull:
                del self._pulls[key]


def _is_ready(task: asyncio.Task[ImageInfo]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
