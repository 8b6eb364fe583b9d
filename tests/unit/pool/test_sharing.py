"""Containers that other processes work in, or whose servers are slow to answer, are taken from nobody."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from atropos import wire
from atropos.errors import BackendUnavailable
from atropos.resources import NOTHING
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.container import Container
from atropos.slots.backends.docker import backend
from atropos.slots.backends.docker.engine import Ending, ListedContainer
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.spec import ContainerSpec
from tests.unit.pool.model import SLOT
from tests.unit.server.fakes import TOKEN, serving
from tests.waiting import until


class FakeEngine:
    """A Docker engine in which servers of this process run."""

    def __init__(self, urls: list[str], spec: str) -> None:
        self.containers = [
            ListedContainer(f"c{n}", f"c{n}", n, spec, "somebody", "running", 99.0, url) for n, url in enumerate(urls)
        ]

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def watch(self, on_event, on_open) -> None: ...

    def image_id(self, image: str) -> str:
        return image

    def found(self) -> list[ListedContainer]:
        return list(self.containers)

    def token(self, container_id: str) -> str:
        return TOKEN

    def end(self, container_id: str, *, within_s: float) -> None:
        self.containers = [each for each in self.containers if each.id != container_id]


async def test_shared_stays_open(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    async with serving(slots=1, heartbeat_s=5) as one, serving(slots=1, heartbeat_s=5) as two:
        config = SlotPoolConfig(backend="docker", slots_per_container=1, max_containers=2, idle_container_s=0.2)

        spec = ContainerSpec.from_pool(config).fingerprint(config.image)
        monkeypatch.setattr(backend, "DockerEngine", lambda *_: FakeEngine([one.url, two.url], spec))

        def pool(**changes: object) -> SlotPool:
            return SlotPool(config.model_copy(update=changes))

        async with pool(idle_container_s=600.0, purge_job_on_shutdown=False) as other, pool() as mine:
            await until(lambda: other.stats().ready == mine.stats().ready == 2, "both pools on both containers")
            await until(lambda: "1 containers are requested" in caplog.text, "a wish for one container")
            await asyncio.sleep(0.3)
            assert mine.stats().ready == 2
            async with mine.lease("a"), mine.lease("b"):
                pass


async def test_ending_is_not_reused(monkeypatch):
    async with serving(slots=1, heartbeat_s=5) as server:
        config = SlotPoolConfig(backend="docker", slots_per_container=1, max_containers=1)
        engine = FakeEngine([server.url], ContainerSpec.from_pool(config).fingerprint(config.image))
        tries: list[object] = []

        def refuse(*arguments: object, **_: object) -> None:
            tries.extend(arguments[:1])
            raise BackendUnavailable("the engine is busy")

        engine.create = refuse
        monkeypatch.setattr(backend, "DockerEngine", lambda *_: engine)
        docker = backend.DockerBackend(config)
        await docker.start()
        try:
            (container,) = docker.containers()
            with monkeypatch.context() as busy:
                busy.setattr(engine, "end", refuse)
                await docker.retire(container)
                await until(lambda: tries.count(container.id) > 2, "further tries to remove it")
                assert not any(each.id == container.id and each.state == "running" for each in docker.containers())
            await until(lambda: not engine.containers, "its removal")
        finally:
            await docker.aclose(purge=True)


async def test_start_ends_old_trouble(monkeypatch):
    monkeypatch.setattr("atropos.aio.backoff_s", lambda *_, **__: 0.01)
    async with serving(slots=1, heartbeat_s=5) as server:
        engine, works = FakeEngine([], ""), False

        def create(_: ContainerSpec, wanted: Container, **__: object) -> None:
            state, name = "running" if works else "exited", wanted.id
            engine.containers.append(ListedContainer(name, name, wanted.index, "", "me", state, 0.0, server.url))

        engine.create, engine.ending = create, lambda _: Ending(1, "no memory")
        monkeypatch.setattr(backend, "DockerEngine", lambda *_: engine)
        docker = backend.DockerBackend(SlotPoolConfig(backend="docker", slots_per_container=1))
        await docker.start()
        try:
            await docker.scale(1)
            await until(lambda: docker.failure() is not None, "three that ended")
            works = True
            await until(lambda: [each.state for each in docker.containers()] == ["running"], "one that runs")
            assert docker.failure() is None
        finally:
            await docker.aclose(purge=False)


def status(leased: int) -> web.Response:
    found = wire.Status(
        boot_id="b", slots=1, free=1 - leased, room=SLOT * (1 - leased), leased=leased, warming=0, retired=0, retired_room=NOTHING,
        draining=True, clients=1, uptime_s=1,
        live=("other",), connected=("other",),
    )  # fmt: skip
    return web.json_response(text=found.model_dump_json())


async def test_a_busy_server_is_not_idle(monkeypatch):
    monkeypatch.setattr("atropos.slots.backends.server_http.ANSWER_S", 0.1)
    leases: list[int | None] = []  # None: it does not answer; the last one holds, however often it is asked for

    async def answer(_: web.Request) -> web.Response:
        leased = leases.pop(0) if len(leases) > 1 else leases[0]
        if leased is None:
            await asyncio.sleep(0.5)
        return status(leased or 0)

    app = web.Application()
    app.router.add_get("/v1/status", answer)
    app.router.add_post("/v1/drain", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url, http = f"http://127.0.0.1:{runner.addresses[0][1]}", ServerHttp()
    try:
        leases[:] = [None, None, 1]
        assert await http.used_by_others(url, "t", "me")
        leases[:] = [None, 1]
        assert await http.drain(url, "t", 3600)
        leases[:] = [None, 1, None, 0]
        await http.until_idle(url, "t")
        assert leases == [0], "it was asked until it had answered that no lease is left"
    finally:
        await http.close()
        await runner.cleanup()
    assert not await http.used_by_others("http://127.0.0.1:9", "t", "me")
    await http.close()
