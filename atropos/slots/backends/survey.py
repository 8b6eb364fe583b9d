"""An operator's view of a pool's containers: their status, draining, removal. Nothing here creates or adopts one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from atropos.errors import ConfigError
from atropos.slots.backends.base import Container
from atropos.slots.backends.server_http import ServerHttp
from atropos.wire import Status


@dataclass(frozen=True)
class SurveyedContainer:
    """A container and its server's status; None when it doesn't answer."""

    container: Container
    status: Status | None


class Survey:
    """The containers of one job or pool. Use it as `async with open_survey(...) as survey`."""

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
        """Wait until so many containers answer and take leases, or no client is connected.

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


async def open_survey(backend: str, job_id: str, *, address: str | None) -> Survey:
    """Connect to an engine.

    Args:
        backend: docker or nomad.
        job_id: the pool's `sandbox_job_id`.
        address: of the engine; None: DOCKER_HOST or NOMAD_ADDR, else the usual place.

    Raises:
        ConfigError: no such backend.
        BackendUnavailable: the engine does not answer.
    """
    if backend == "docker":
        return await _docker(job_id, address)
    if backend == "nomad":
        return await _nomad(job_id, address)
    raise ConfigError(f"--backend {backend!r}: docker or nomad (local containers live and end with their own process)")


async def _docker(pool: str, address: str | None) -> Survey:
    from atropos.slots.backends.docker.engine import DockerEngine

    engine = DockerEngine(pool, address)
    await asyncio.to_thread(engine.connect)

    async def containers() -> tuple[list[Container], str]:
        found: list[Container] = []
        ended: list[str] = []
        for item in sorted(await asyncio.to_thread(engine.found), key=lambda item: item.index):
            if item.state in {"exited", "dead", "removing"}:
                reason = (await asyncio.to_thread(engine.ending, item.id)).reason
                ended.append(f"container {item.name} is {item.state}: {reason}")
                continue
            token = await asyncio.to_thread(engine.token, item.id)
            state = "starting" if item.state == "created" else "running"
            found.append(Container(item.name, item.index, item.url, token or "", state, item.owner))
        return found, "; ".join(ended)

    async def end(container: Container) -> None:
        await asyncio.to_thread(engine.end, container.id, within_s=10)

    async def purge() -> None:
        for item in await asyncio.to_thread(engine.found):
            await asyncio.to_thread(engine.end, item.id, within_s=1)

    return Survey(containers, end, purge, lambda: asyncio.to_thread(engine.close))


async def _nomad(job_id: str, address: str | None) -> Survey:
    from atropos.slots.backends.nomad.api import NomadApi
    from atropos.slots.backends.nomad.job import count, group_of
    from atropos.slots.backends.nomad.job_view import JobView
    from atropos.slots.backends.nomad.settings import NomadSettings
    from atropos.slots.backends.nomad.view import Allocation, placement_failures

    api = NomadApi(NomadSettings.from_environment(address), job_id)
    try:
        await api.find_namespace()  # in a missing namespace no job is listed, and a purge would seem to succeed
    except BaseException:
        await api.close()
        raise

    async def containers() -> tuple[list[Container], str]:
        if (job := await api.job()) is None:
            return [], ""
        secret = await api.secret(make=False)
        tls = secret.certificate is not None
        rows = [Allocation.read(row, tls=tls) for row in await api.allocations()]
        answering = {row.run for row in rows if row.state != "starting"}
        view = JobView(placement_s=0, secret=secret, target=count(job), ready=answering)
        view.apply(rows, view.merge(rows, ()))
        if view.lacking:
            view.placement = placement_failures(await api.evaluations())
        if (item := view.latest_failing()) is not None:
            view.judge_crash(item, await api.last_line(item.id))
        return view.containers(), view.trouble()

    async def end(container: Container) -> None:
        await api.stop_allocation(container.id.partition(".")[0])

    async def purge() -> None:
        if (job := await api.job()) is not None:
            group_of(job)
            await api.deregister(purge=False)
            await api.deregister(purge=True)
        await api.drop_secret()

    return Survey(containers, end, purge, api.close)
