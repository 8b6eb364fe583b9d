"""Background tasks with an owner: none is lost, none fails in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

from atropos.aio import cancel_and_wait

log = logging.getLogger("atropos.slots")
T = TypeVar("T")


class Tasks:
    """The tasks that one object started; it ends them before it ends itself."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[object, object, T], name: str, *, awaited: bool = False) -> asyncio.Task[T]:
        """Start a task. Unless its caller awaits it (`awaited`), a failure is logged with its traceback."""
        task = asyncio.create_task(work, name=f"{self._owner}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not awaited:
            task.add_done_callback(_log_failure)
        return task

    async def settle(self, timeout_s: float) -> None:
        """Wait until all have ended, at most so long; then cancel what is left and await it."""
        me = asyncio.current_task()
        if others := [task for task in self._tasks if task is not me]:
            await asyncio.wait(others, timeout=timeout_s)
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel all and wait until they have ended; their failures were logged."""
        await cancel_and_wait(self._tasks)


def _log_failure(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
