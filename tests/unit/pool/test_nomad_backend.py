"""The Nomad backend against an agent that does what real ones do rarely; the rest is in tests/e2e, on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from unittest import mock

import pytest
from aiohttp import web

from atropos.aio import cancel_and_wait
from atropos.errors import AcquireTimeout, BackendUnavailable, ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.loading import open_survey
from atropos.slots.backends.nomad.access import NomadAccess
from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.backend import NomadBackend
from atropos.slots.backends.nomad.refusals import NomadRefused
from tests.unit.pool.fake_nomad import FakeNomad
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.waits


def nonsense() -> web.Response:
    return web.json_response([])


async def test_unplaced_containers_are_taken_back():
    async with FakeNomad() as nomad, nomad.pool(max_containers=5) as pool:
        nomad.room = 2
        slots = [await pool.acquire(f"t{n}") for n in range(2)]
        waiting = [asyncio.create_task(pool.acquire("no place", timeout_s=60)) for _ in range(3)]
        await until(lambda: "can't place 3 of" in pool.trouble(), "why they wait")
        with pytest.raises(AcquireTimeout, match="Nomad can't place 3 of its containers: memory exhausted"):
            await pool.acquire("no place", timeout_s=0.3)
        assert nomad.count == 5
        await cancel_and_wait(waiting)
        low, high = sorted(slots, key=lambda slot: pool.links[slot.container].container.index)
        await high.release()
        await until(lambda: nomad.count == 1, "one container asked for")
        assert (await low.exec("echo still here")).output == "still here"
        await until(lambda: not pool.trouble(), "no trouble")
        assert len(nomad.allocations) == 2, "nothing was started in place of what was closed"
        await low.release()


async def test_unplaced_adopted_shrinks():
    async with FakeNomad() as nomad:
        nomad.room = 3
        await nomad.register(5)
        async with nomad.pool(max_containers=5) as pool:
            await until(lambda: pool.stats().ready == 3, "three containers")
            await until(lambda: len(pool.links) == 1 and nomad.count == 1, "one container")
            assert len(nomad.allocations) == 3


async def test_containers_close_singly():
    async with FakeNomad() as nomad:
        nomad.streams = "silent"
        await nomad.register(3)
        async with nomad.pool(max_containers=3):
            await until(lambda: nomad.count == 1, "one container")
            assert nomad.asked["stop"] == 0
            assert len(nomad.allocations) == 3, "nothing was started in place of what was closed"


async def test_others_count_is_lowered():
    async with FakeNomad() as nomad, nomad.pool(max_containers=2) as pool, pool.lease("t"):
        nomad.room = 3
        await nomad.register(5)
        await until(lambda: pool.stats().ready == 3, "three containers")
        await until(lambda: len(pool.links) == 1 and nomad.count == 1, "one container")
        assert len(nomad.allocations) == 3


async def test_failed_growth_explained():
    async with FakeNomad() as nomad, nomad.pool(max_containers=2) as pool, pool.lease("t"):
        nomad.broken_images = True
        waiting = asyncio.create_task(pool.acquire("u", timeout_s=60))
        await until(lambda: "docker load" in pool.trouble(), "why it waits")
        with pytest.raises(AcquireTimeout, match=r"container 1 on .*Failed to pull `nowhere:1`.*docker load"):
            await pool.acquire("v", timeout_s=0.1)
        await cancel_and_wait([waiting])
        nomad.broken_images = False
        nomad.allocations.pop()
        await nomad.register(2)
        async with pool.lease("u"):
            await until(lambda: not pool.trouble(), "no trouble")


@pytest.mark.parametrize("streams", ["refused", "silent"])
async def test_placement_failures_need_no_events(monkeypatch, streams):
    monkeypatch.setattr("atropos.slots.backends.nomad.api.SILENCE_S", 0.3)
    async with FakeNomad() as nomad:
        nomad.room, nomad.streams, nomad.blocks = 0, streams, True
        with pytest.raises(BackendUnavailable, match="Nomad can't place 1 of its containers: memory exhausted"):
            async with asyncio.timeout(30 * SLOWNESS):  # half of what a query that blocks takes
                await nomad.pool(placement_s=0.3).start()
        assert nomad.asked["stream"] == 1


@pytest.mark.parametrize("streams", ["cut", "refused"])
async def test_failing_streams_back_off(streams):
    async with FakeNomad() as nomad, nomad.pool() as pool:
        nomad.streams = streams
        await nomad.register(1)  # ends the stream that was open
        await asyncio.sleep(1.5)
        assert 2 <= nomad.asked["stream"] + nomad.asked["allocations"] < 18, nomad.asked
        assert pool.stats().ready == 1


async def test_half_a_line_is_a_change():
    pieces: asyncio.Queue[bytes] = asyncio.Queue()

    class SlowStream(FakeNomad):
        async def _stream(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(await pieces.get())

    async with SlowStream() as nomad, contextlib.AsyncExitStack() as stack:
        api = NomadApi(NomadAccess(nomad.url), "job")
        stack.push_async_callback(api.close)
        async with contextlib.aclosing(api.events()) as events:
            await anext(events)
            told = asyncio.ensure_future(anext(events))
            for piece in (b"{}\n", b"{", b"}\n", b"{}\n{}\n"):
                pieces.put_nowait(piece)
                await asyncio.sleep(0.05)
            assert not told.done()
            pieces.put_nowait(b'{"Index":5,"Events":[{"Topic":"Allocation"},')
            await asyncio.wait_for(told, 20 * SLOWNESS)


async def test_a_late_log_is_read():
    async with FakeNomad() as nomad, contextlib.AsyncExitStack() as stack:
        api = NomadApi(NomadAccess(nomad.url), "job")
        stack.push_async_callback(api.close)
        nomad.answers["/logs/alloc-1"] = [web.Response(text=""), web.Response(text="first\nlast\n")]
        assert await api.last_line("alloc-1") == "last"


async def test_refusal_in_any_encoding():
    async with FakeNomad() as nomad, contextlib.AsyncExitStack() as stack:
        api = NomadApi(NomadAccess(nomad.url), "job")
        stack.push_async_callback(api.close)
        nomad.answers["/event/stream"] = [web.Response(status=503, body="überlastet".encode("latin-1"))]
        with pytest.raises(NomadRefused, match="berlastet"):
            await anext(api.events())


async def test_nonsense_costs_nothing(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.REFUSED_S", (0.01, 0.05))
    async with FakeNomad() as nomad, nomad.pool(max_containers=2) as pool, pool.lease("t") as slot:
        for end in ("/atropos-sandbox-agent-env", "/allocations", "/evaluations"):
            nomad.answers[end] = [nonsense()]
        async with pool.lease("u"):
            assert (await slot.exec("echo still here")).output == "still here"
        assert not any(nomad.answers.values())


@pytest.mark.parametrize(("status", "kind"), [(500, BackendUnavailable), (400, ConfigError)])
async def test_absent_parser_is_outage(status, kind):
    async with FakeNomad() as nomad:
        # twice: on a slow machine the backend looks whether the job is there before the start has registered it
        nomad.answers["/parse"] = [web.Response(status=status, text="rpc error: EOF") for _ in range(2)]
        with pytest.raises(kind, match="Nomad refused to parse the job: rpc error: EOF"):
            await nomad.pool().start()


PAGES = [
    pytest.param({"text": "<html>\n<head><title>404 Not Found</title></head>\n</html>\n"}, "404 Not Found", id="nginx"),
    pytest.param({"text": "404 page not found\n"}, "status 404", id="Traefik"),
    pytest.param({}, "status 404", id="Envoy"),
    pytest.param({"status": 403, "text": "<HTML><TITLE>Forbidden</TITLE>"}, "Forbidden", id="a firewall"),
]


@pytest.mark.parametrize(("page", "says"), PAGES)
async def test_proxy_is_not_nomad(page, says):
    def answer() -> web.Response:
        return web.Response(**({"status": 404} | page))

    async with FakeNomad() as nomad, nomad.pool(max_containers=1) as pool:
        (link,) = pool.links.values()
        nomad.answers["/stop"] = [answer()]
        with pytest.raises(BackendUnavailable, match=r"a proxy answers in place of Nomad .* an allocation: ") as caught:
            await pool.backend.retire(link.container)
        assert str(caught.value).endswith(says)
        assert [each.state for each in pool.backend.containers()] == ["running"], "it is still there"
        nomad.answers["/namespace/default"] = [answer()]
        with pytest.raises(BackendUnavailable, match=r"a proxy answers in place of Nomad .* the namespace: "):
            await nomad.pool().start()


async def test_unknown_is_stopped():
    async with FakeNomad() as nomad, nomad.pool(max_containers=1) as pool:
        (link,) = pool.links.values()
        nomad.answers["/stop"] = [web.Response(status=404, text="allocation not found")]
        await pool.backend.retire(link.container)
        assert [each.state for each in pool.backend.containers()] == ["ending"]


async def test_closed_tls_is_an_outage():
    async def closed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(closed, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BackendUnavailable, match=rf"Nomad does not answer at https://127.0.0.1:{port} ") as caught:
            await SlotPool(SlotPoolConfig(backend="nomad", nomad_address=f"https://127.0.0.1:{port}")).start()
    assert caught.value.retryable
    assert "Caused by" not in str(caught.value)


async def test_bad_job_name_is_refused():
    async with FakeNomad() as nomad:
        with pytest.raises(ConfigError, match=r"sandbox_job_id 'my\.env' must be letters, digits"):
            nomad.pool(job_id="my.env")
        assert not nomad.asked


async def test_missing_namespace_named(monkeypatch):
    monkeypatch.setenv("NOMAD_NAMESPACE", "nowhere")
    async with FakeNomad() as nomad:
        nomad.answers["/nowhere"] = [web.Response(status=404, text="Namespace not found")]
        with pytest.raises(BackendUnavailable, match=r"NOMAD_NAMESPACE: .*no namespace 'nowhere'"):
            await open_survey("nomad", "any", address=nomad.url)


async def test_failed_start_is_explained():
    async with FakeNomad() as nomad:
        nomad.broken_images = True
        await nomad.register(1)
        async with await open_survey("nomad", "atropos-sandbox-agent-env", address=nomad.url) as survey:
            (seen,), trouble = await survey.look()
            assert (seen.container.state, seen.status) == ("starting", None)
            assert "Failed to pull `nowhere:1`" in trouble
            assert "docker load" in trouble
            nomad.broken_images = False
            nomad.allocations.pop()
            await nomad.register(1)
            (seen,), trouble = await survey.look()
            assert (seen.container.state, trouble) == ("running", "")


async def test_the_end_waits_for_changes():
    begun, let = asyncio.Event(), asyncio.Event()

    class SlowScale(FakeNomad):
        async def _handle(self, request: web.Request) -> web.StreamResponse:
            if request.path.endswith("/scale"):
                begun.set()
                await let.wait()
            return await super()._handle(request)

    async with SlowScale() as nomad, contextlib.AsyncExitStack() as stack:
        api = NomadApi(NomadAccess(nomad.url), "job")
        stack.push_async_callback(api.close)
        scaling = asyncio.create_task(api.scale(0))
        await begun.wait()
        await cancel_and_wait([scaling])
        assert nomad.job is None
        let.set()
        await api.settled(10)
        assert nomad.job is not None


async def test_end_waits_for_leader():
    settled = mock.patch.object(NomadApi, "settled", autospec=True, side_effect=NomadApi.settled)
    with settled as ending:
        async with FakeNomad() as nomad, nomad.pool():
            pass
    held_s = 5 * (1 + 1 / 16)  # Nomad's RPCHoldTimeout and its stagger
    assert ending.call_args.args[1] > held_s


async def test_lists_are_rate_limited():
    async with FakeNomad() as nomad, nomad.pool(min_containers=1, max_containers=1) as pool:
        await until(lambda: pool.stats().ready == 1, "a container")
        before, began = nomad.asked["allocations"], time.monotonic()
        for _ in range(100):
            await nomad.register(1)
            await asyncio.sleep(0.02)
        assert nomad.asked["allocations"] - before < 18 + time.monotonic() - began


async def test_silent_stop_at_a_pace():
    async with FakeNomad() as nomad:
        nomad.room = 0
        await nomad.register(40)
        task = {"State": "running", "Restarts": 0, "Events": []}
        nomad.allocations += [
            {"ID": f"a{n}", "Name": f"x.sandbox[{n}]", "DesiredStatus": "run", "ModifyIndex": n}
            | {"ClientStatus": "running", "TaskStates": {"server": task}}
            for n in range(40)
        ]
        backend = NomadBackend(SlotPoolConfig(backend="nomad", nomad_address=nomad.url))
        await backend.start()
        retiring = asyncio.gather(*(backend.retire(container) for container in backend.containers()))
        await until(lambda: nomad.asked["stop"] >= 20, "a burst of stops")
        for each in nomad.allocations:
            each["ClientStatus"] = "lost"
        await nomad.register(40)
        await retiring
        assert nomad.asked["stop"] < 40
        await backend.aclose(purge=False)
