"""An operator's view of a pool's containers: their status, draining, removal. Nothing here creates or adopts one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from atropos.slots.backends.container import Container
from atropos.slots.backends.server_http import ServerHttp
from atropos.wire import Status


@dataclass(frozen=True)
class SurveyedContainer:
    """A container and its server's status; None when it doesn't answer."""

    container: Container
    status: Status | None


class Survey:
    """The containers of one job or pool. Use it as `async with survey`."""

    def __init__(
        self,
        containers: Callable[[], Awaitable[tuple[list[Container], str]]],
        end: Callable[[Container], Awaitable[None]],
        purge: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._containers = containers
        self._end = end
        self._purge = purge
        self._close = close
        self._http = ServerHttp()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self._close()

    async def look(self) -> tuple[list[SurveyedContainer], str]:
        """All containers by index with their servers' status, and the engine's trouble (empty: none).

        Raises:
            BackendUnavailable: the engine does not answer.
        """
        containers, trouble = await self._containers()
        for each in containers:  # of one job, which has one certificate
            self._http.trust(each.certificate)
        return await asyncio.gather(*map(self._seen, containers)), trouble

    async def _seen(self, container: Container) -> SurveyedContainer:
        url, token = container.url, container.token
        return SurveyedContainer(container, await self._http.status(url, token) if url else None)

    async def drain(self, seen: SurveyedContainer, *, deadline_s: float) -> None:
        """Drain a container, wait until it has no leases (or for `deadline_s` seconds), and end it.

        A live pool, or Nomad, then replaces it.
        """
        url, token = seen.container.url, seen.container.token
        if url is not None and await self._http.drain(url, token, deadline_s):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._http.until_idle(url, token)
        await self._end(seen.container)

    async def until_answering(self, count: int, *, within_s: float) -> bool:
        """Wait until this many containers answer and take leases, or no client is connected.

        Returns:
            False when `within_s` seconds went by first.
        """
        try:
            async with asyncio.timeout(within_s):
                while True:
                    seen, _ = await self.look()
                    answers = [each.status for each in seen if each.status is not None]
                    if sum(not each.draining for each in answers) >= count or not any(e.connected for e in answers):
                        return True
                    await asyncio.sleep(0.5)
        except TimeoutError:
            return False

    async def in_use(self, seen: Sequence[SurveyedContainer]) -> list[SurveyedContainer]:
        """Those of the containers that a live client uses."""
        return [
            each
            for each in seen
            if each.container.url and await self._http.used_by_others(each.container.url, each.container.token, "")
        ]

    async def purge(self) -> None:
        """Remove the containers, the job and its secret, even where they are in use."""
        await self._purge()
