"""Races and faults of the pool, against modelled servers."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import time

import pytest

from atropos.errors import (
    AcquireTimeout,
    BackendUnavailable,
    ConfigError,
    IsolationUnavailable,
    LeaseExpired,
    NotSupported,
    SandboxError,
    SlotLost,
)
from atropos.resources import NOTHING
from atropos.slots import SlotFileError
from atropos.slots.client.call_stream import ClientRefused
from atropos.slots.slot.uploads import PIECE_BYTES
from atropos.wire import Done, FileResult, ImageInfo, OpError, ReleaseResult
from tests.settings import shows
from tests.unit.pool.model import SLOT, ModelBackend, ModelClient, ModelServer, model_pool, pool_tasks, settled
from tests.waiting import until

pytestmark = pytest.mark.waits


async def test_lease_use_and_release():
    pool, backend = model_pool()
    async with pool:
        async with pool.lease("t") as slot:
            assert (await slot.exec("true")).output == slot.name
            assert (backend.held, pool.stats().leased) == (1, 1)
        assert (backend.held, pool.stats().leased, pool.stats().free) == (0, 0, 2)
        with pytest.raises(LeaseExpired):
            await slot.exec("true")
    assert backend.closed is True
    assert not pool_tasks()


async def test_long_input_waits_for_none(monkeypatch):
    commands = []
    call = ModelClient.call

    async def recorded(client, lease, operation, **options):
        if operation.op == "exec":
            commands.append(operation)
        return await call(client, lease, operation, **options)

    monkeypatch.setattr(ModelClient, "call", recorded)
    pool, _ = model_pool()
    async with pool, pool.lease("t") as slot:
        await slot.exec("wc -c", stdin=bytes(PIECE_BYTES + 1), user="1:1", concurrent=True)
    reads, removes = commands
    assert (reads.command.endswith("; wc -c"), reads.concurrent) == (True, True)
    assert (removes.command[0], removes.concurrent) == ("rm", True)


async def test_stream_that_breaks_at_end(monkeypatch):
    data = bytes(300_000)

    async def call(self, lease, operation, *, call_id=None):
        return FileResult(data=data[: operation.max_bytes], size=len(data), mode=0o644)

    async def breaks_off_at_the_end(client, lease, wanted, write):
        write(data[wanted().offset :])
        assert wanted().offset == len(data)
        return Done()

    monkeypatch.setattr(ModelClient, "call", call)
    monkeypatch.setattr("atropos.slots.client.file_streams.receive_all", breaks_off_at_the_end)
    pool, _ = model_pool()
    async with pool, pool.lease("t") as slot:
        assert await slot.read_file("f", max_bytes=len(data)) == data


async def test_unlisted_processes_are_explained(monkeypatch):
    async def call(self, lease, operation, *, call_id=None):
        return OpError(error="limit", message="out of memory", limit="memory")

    monkeypatch.setattr(ModelClient, "call", call)
    pool, _ = model_pool()
    async with pool, pool.lease("t") as slot:
        with pytest.raises(SlotFileError, match="out of memory"):
            await slot.processes()


async def test_second_release_is_inert():
    pool, _ = model_pool()
    async with pool:
        slot = await pool.acquire("t")
        await asyncio.gather(slot.release(), slot.release())
        await slot.release()
        assert pool.stats().releases == 1
        assert pool.stats().free == 2


async def in_line(pool, count):
    """Start leases one after the other. Returns the order in which they are served, and their tasks."""
    order = []

    async def one(n):
        async with pool.lease(f"t{n}"):
            order.append(n)
            await asyncio.sleep(0)

    tasks = []
    for n in range(count):
        tasks.append(asyncio.create_task(one(n)))
        await asyncio.sleep(0)
    return order, tasks


async def test_first_come_first_served():
    pool, _ = model_pool(slots=1, containers=1)
    async with pool:
        order, tasks = await in_line(pool, 20)
        await asyncio.gather(*tasks)
    assert order == list(range(20))


async def test_overtaking_keeps_order(monkeypatch):
    monkeypatch.setattr("atropos.slots.pool.grants.IN_TURN_S", 60)
    pool, backend = model_pool(slots=4, containers=1)
    backend.delay_s, backend.jitter = 0.003, random.Random(7)
    async with pool:
        order, tasks = await in_line(pool, 40)
        await asyncio.gather(*tasks)
        assert order == list(range(40))
    gc.collect()
    assert not [
        each for each in gc.get_objects() if isinstance(each, asyncio.Task) and each.get_name() == "pool: grant"
    ]


async def test_refused_keeps_its_place():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        server.foreign = 1  # another client took the slot without our knowing
        order, tasks = await in_line(pool, 5)
        await until(lambda: pool.stats().waiting == 5, "five in line")
        server.foreign = 0
        await asyncio.gather(*tasks)
        assert order == list(range(5))


async def test_full_server_hears_waiters():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        server.foreign = 1
        (link,) = pool.links.values()
        link.recount()
        await until(lambda: not link.seat.free, "known to be full")
        refused, grant = 0, server.grant

        def asked(request):
            nonlocal refused
            refused += server.free <= 0
            return grant(request)

        server.grant = asked
        waiting = asyncio.create_task(pool.acquire("t"))
        await until(lambda: refused, "asked")
        server.foreign = 0
        await (await waiting).release()


async def test_an_idle_pool_polls_none():
    """Where another client has a slot, whose end this pool isn't told, it is asked for again when one is wanted."""
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (server,), (link,) = backend.servers.values(), pool.links.values()
        server.foreign = 1
        link.recount()
        await settled()
        waiting = asyncio.create_task(pool.acquire("t"))
        await until(lambda: pool.stats().waiting, "in line")
        server.foreign = 0
        await (await waiting).release()


@shows("idle_container_s")
async def test_demand_opens_idle_closes():
    pool, backend = model_pool(slots=2, containers=3, idle_container_s=0.2)
    async with pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(6)))
        assert max(backend.asked) == 3
        assert len({slot.container for slot in slots}) == 3
        await asyncio.gather(*(slot.release() for slot in slots))
        await until(lambda: len(backend.listed) == 1, "the idle ones closed")
        assert pool.stats().containers == 1


async def test_unplaced_containers_are_given_up():
    pool, backend = model_pool(slots=1, containers=5, idle_container_s=0.2)
    async with pool:
        slots = [await pool.acquire(f"t{n}") for n in range(2)]
        backend.never = True
        with pytest.raises(AcquireTimeout):
            await asyncio.gather(*(pool.acquire("no place", timeout_s=0.1) for _ in range(3)))
        assert backend.asked[-1] == 5
        await slots[1].release()
        await until(lambda: len(backend.listed) == 1, "the idle one closed")
        assert backend.asked[-1] == 1
        assert (await slots[0].exec("true")).ok
        await slots[0].release()


async def test_low_containers_fill_first():
    pool, backend = model_pool(slots=2, containers=2, idle_container_s=0.1)
    async with pool:
        slots = [await pool.acquire(f"t{n}") for n in range(4)]
        high = next(slot for slot in slots if slot.container.startswith("c1"))
        for slot in slots:
            if slot is not high:
                await slot.release()
        await asyncio.sleep(0.3)
        assert len(backend.listed) == 2
        async with pool.lease("again") as low:
            assert low.container.startswith("c0")
        assert (await high.exec("true")).ok
        await high.release()
        await until(lambda: len(backend.listed) == 1, "the idle one closed")


async def test_late_lease_keeps_it():
    pool, backend = model_pool(slots=1, containers=3, idle_container_s=0.1)
    async with pool:
        slots = [await pool.acquire(f"t{n}") for n in range(3)]
        last = [link for link in pool.links.values() if link.seat.index][-1]
        asked, answer, status = asyncio.Event(), asyncio.Event(), last.client.status

        async def slowly():
            asked.set()
            await answer.wait()
            return await status()

        last.client.status = slowly
        await asyncio.gather(*(slot.release() for slot in slots[1:]))
        await asked.wait()
        async with pool.lease("late") as late:
            assert 0 < late.link.seat.index != last.seat.index
            answer.set()
            await asyncio.sleep(0.05)
            assert late.lost is None
            assert len(backend.listed) == 3


async def test_silence_stops_no_scaling(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.ANSWER_S", 0.1)
    pool, _ = model_pool(slots=1, containers=4, idle_container_s=0.1, acquire_timeout_s=3)
    async with pool:
        slots = [await pool.acquire(f"t{n}") for n in range(3)]
        asked = asyncio.Event()

        async def never():
            asked.set()
            await asyncio.Event().wait()

        slots[2].link.client.status = never
        await slots[2].release()
        await asked.wait()
        more = [await pool.acquire(f"u{n}") for n in range(2)]
        await asyncio.gather(*(slot.release() for slot in [*slots[:2], *more]))


async def test_others_leases_keep_it():
    pool, backend = model_pool(slots=2, containers=2, idle_container_s=0.05)
    async with pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        backend.servers[next(key for key in backend.servers if key.startswith("c1"))].foreign = 1
        await asyncio.gather(*(slot.release() for slot in slots))
        await asyncio.sleep(0.3)
        assert len(backend.listed) == 2


async def test_a_timeout_says_why():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        async with pool.lease("holder"):
            backend.sick = "no node has memory left"
            with pytest.raises(AcquireTimeout, match=r"1 of 1 containers.*1 leased.*waiting.*no node has memory left"):
                await pool.acquire("late", timeout_s=0.05)
        async with pool.lease("next"):
            pass
        assert pool.stats().timeouts == 1


async def test_a_blocked_loop_is_no_wait():
    pool, _ = model_pool(slots=1, containers=1)
    async with pool:
        held = await pool.acquire("holder")
        waiting = asyncio.create_task(pool.acquire("next", timeout_s=1.5))
        await until(lambda: pool.stats().waiting == 1, "it waits")
        release = asyncio.create_task(held.release())
        time.sleep(2.5)  # noqa: ASYNC251 - as an env's hook does
        await release
        await (await waiting).release()


@pytest.mark.parametrize("moment", [0, 0.001, 0.003, 0.005, 0.008, 0.012])
async def test_cancels_leak_no_slot(moment):
    pool, backend = model_pool(slots=2, containers=1)
    backend.delay_s = 0.004
    async with pool:
        for _ in range(6):
            task = asyncio.create_task(pool.acquire("t"))
            await asyncio.sleep(moment)
            task.cancel()
            try:
                await (await task).release()
            except asyncio.CancelledError:
                pass
        await settled()
        assert backend.held == 0
        assert (pool.stats().free, pool.stats().leased, pool.stats().waiting) == (2, 0, 0)


async def test_unanswered_is_taken_back():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        server.lose_answers = 1
        async with pool.lease("t"):
            assert len(server.holder) == 1
        await settled()
        assert server.holder == {}
        assert pool.stats().free == 1


async def test_cancelled_release_goes_on():
    pool, backend = model_pool(slots=1, containers=1)
    backend.delay_s = 0.01
    async with pool:
        slot = await pool.acquire("t")
        task = asyncio.create_task(slot.release())
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with pool.lease("next"):
            pass
    assert backend.held == 0


async def test_release_outlasts_a_gap():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        client, release = slot.link.client, slot.link.client.release

        async def unanswered(_) -> None:
            raise BackendUnavailable("it does not answer")

        client.release = unanswered
        asyncio.get_running_loop().call_later(0.2, setattr, client, "release", release)
        await slot.release()
        assert backend.retired == []


async def test_lost_container_ends_all():
    pool, backend = model_pool(slots=1, containers=2, min_containers=2)
    async with pool:
        a, b = [await pool.acquire(f"t{n}") for n in range(2)]
        backend.vanish(a.container)
        await until(lambda: a.lost is not None, "the loss")
        with pytest.raises(SlotLost):
            await a.exec("true")
        assert (await b.exec("true")).ok
        await a.release()  # which is nothing
        assert pool.stats().lost == 1


async def test_change_reads_one():
    pool, backend = model_pool(slots=1, containers=2000, min_containers=2000)
    changes = 300
    async with pool:
        await until(lambda: pool.stats().ready == 2000, "all containers")
        backend.reads = 0
        for n in range(changes):
            key = next(iter(backend.listed))
            backend.vanish(key)
            backend.open(n)
            await asyncio.sleep(0)  # the pause between reads goes by the clock: nothing else may take time here
        assert backend.reads < changes / 3
        await until(lambda: pool.stats().ready == 2000, "all containers")
        backend.reads = 0
        for server in list(backend.servers.values()):
            for client in server.clients:
                client.lost.set()
        await until(lambda: pool.stats().ready < 2000, "the losses")
        await until(lambda: pool.stats().ready == 2000, "all containers again")
        assert backend.reads < changes / 3


async def test_waiters_go_elsewhere():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("holder")
        tasks = [asyncio.create_task(pool.acquire(f"t{n}")) for n in range(1)]
        await asyncio.sleep(0.01)
        backend.vanish(slot.container)
        await backend.scale(1)
        (other,) = await asyncio.gather(*tasks)
        assert other.container != slot.container
        await other.release()


async def test_a_lost_server_is_replaced(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.RELINK_S", 0.1)
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        backend.servers[slot.container].kill()
        async with pool.lease("next") as other:
            assert other.container != slot.container
        assert backend.retired == [slot.container]


async def test_silent_server_is_replaced(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.RELINK_S", 0.05)
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        server = backend.servers[slot.container]
        server.hangs = True
        server.clients[0].lost.set()
        async with pool.lease("next") as other:
            assert other.container != slot.container
        assert isinstance(slot.lost, SlotLost)


async def test_a_young_server_is_waited_for(monkeypatch):
    pool, backend = model_pool(slots=1, containers=1)

    def silent_at_first(index: int) -> ModelServer:
        server = ModelBackend.open(backend, index)
        server.alive = False
        asyncio.get_running_loop().call_later(0.1, setattr, server, "alive", True)
        return server

    monkeypatch.setattr(backend, "open", silent_at_first)
    async with pool, pool.lease("t"):
        assert (backend.made, backend.retired) == (1, [])


async def test_refusing_server_is_replaced(monkeypatch):
    pool, backend = model_pool(slots=1, containers=1)
    connect = ModelClient.connect

    async def refused(client: ModelClient) -> None:
        await connect(client)
        if client.server is backend.history[0]:
            raise ClientRefused("it refuses the token")

    monkeypatch.setattr(ModelClient, "connect", refused)
    async with pool, pool.lease("t"):
        assert backend.retired == [backend.history[0].name]


async def test_restarted_is_used_again():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        server = backend.servers[slot.container]
        server.kill()
        server.alive, server.name, server.holder, server.leases = True, "reborn", {}, {}
        async with pool.lease("next") as other:
            assert other.container == slot.container
            assert other.lease.boot_id == "reborn"
        assert slot.lost is not None
        assert backend.retired == []


async def test_losses_are_counted():
    pool, backend = model_pool(slots=4, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        gone, *slots = [await pool.acquire(f"t{n}") for n in range(4)]

        async def released_before(lease):
            return ReleaseResult(released=False)  # as `SandboxClient.release` when the server has ended it

        real = gone.link.client.release
        gone.link.client.release = released_before
        await gone.release()
        gone.link.client.release = real
        assert pool.stats().reset.n == 0
        server.delay_s = 0.3
        for slot in slots:
            slot.start_release()
        await asyncio.sleep(0.01)
        backend.vanish(server.name)
        await settled()
        stats = pool.stats()
        assert (stats.leases, stats.releases, stats.lost) == (4, 1, 3)


async def test_unclean_is_not_reused():
    pool, backend = model_pool(slots=2, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        slot = await pool.acquire("t")
        server.unclean = True
        await slot.release()
        server.unclean = False
        for n in range(5):
            async with pool.lease(f"t{n}") as other:
                assert other.name != slot.name
        assert pool.stats().retired == 1


async def test_retired_are_replaced():
    pool, backend = model_pool(slots=3, containers=1, acquire_timeout_s=2)
    async with pool:
        (server,) = backend.servers.values()
        kept, *others = [await pool.acquire(f"t{n}") for n in range(3)]
        server.unclean = True
        for slot in others:
            await slot.release()
        server.unclean = False
        waiting = [asyncio.create_task(pool.acquire(f"w{n}")) for n in range(3)]
        await asyncio.sleep(0.05)
        assert (await kept.exec("true")).ok
        await kept.release()
        slots = await asyncio.gather(*waiting)
        assert backend.retired == [server.name]
        assert (pool.stats().retired, pool.stats().lost) == (0, 0)
        for slot in slots:
            await slot.release()


async def test_ended_lease_frees_slot():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        slot = await pool.acquire("t")
        server.tell(slot.lease.lease_id, "slot_lost")
        assert isinstance(slot.lost, SlotLost)
        async with pool.lease("next"):
            pass
        await slot.release()


async def test_ended_lease_wears_none():
    pool, backend = model_pool(slots=2, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        lost, held = [await pool.acquire(f"t{n}") for n in range(2)]
        server.delay_s = 0.1
        waiting = asyncio.create_task(pool.acquire("waiting"))
        await until(lambda: pool.stats().waiting == 1, "a waiting acquire")
        server.tell(lost.lease.lease_id, "lease_expired")
        # which has the number of containers planned again, before this one has counted its slots
        other = asyncio.create_task(pool.acquire("other"))
        async with asyncio.timeout(5), await waiting as slot:
            assert slot.container == held.container
        await other


async def test_draining_is_passed():
    pool, backend = model_pool(slots=2, containers=2, idle_container_s=60)
    async with pool:
        (server,) = backend.servers.values()
        slot = await pool.acquire("t")
        server.draining = True
        link = slot.link
        link.recount()
        await until(lambda: not link.seat.open, "closing")
        async with pool.lease("next") as other:
            assert other.container != slot.container
        assert (await slot.exec("true")).ok
        await slot.release()


async def test_a_failed_start_says_why():
    pool, backend = model_pool()
    backend.never = True
    backend.fatal = IsolationUnavailable("kernel.unprivileged_userns_clone is 0: set it to 1")
    with pytest.raises(IsolationUnavailable, match="unprivileged_userns_clone"):
        await pool.start()
    assert backend.closed is True
    assert not pool_tasks()
    with pytest.raises(BackendUnavailable, match="stopped"):
        await pool.acquire("t")


@shows("start_timeout_s")
async def test_a_late_start_says_why():
    pool, backend = model_pool(start_timeout_s=0.1)
    backend.never = True
    backend.sick = "image missing"
    with pytest.raises(BackendUnavailable, match=r"start_timeout_s.*image missing"):
        await pool.start()
    pool, backend = model_pool(start_timeout_s=0.1, start_s=60)
    with pytest.raises(BackendUnavailable, match=r"no server answers at http://c0-1: can that address be reached"):
        await pool.start()


@pytest.mark.parametrize("engine_s", [0, 0.1])
async def test_stop_ends_a_start(engine_s):
    pool, backend = model_pool(start_s=0.3)
    connect = backend.start

    async def connecting():
        await asyncio.sleep(engine_s)
        await connect()

    backend.start = connecting
    starting = asyncio.create_task(pool.start())
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await pool.stop()
        asked = list(backend.asked)
        with pytest.raises(BackendUnavailable, match="the pool was stopped"):
            await starting
    await asyncio.sleep(0.1)
    assert backend.asked == asked
    assert backend.closed is True
    assert not pool_tasks()


async def test_waiters_hear_of_failure():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        waiting = asyncio.create_task(pool.acquire("u"))
        await asyncio.sleep(0.01)
        backend.never = True
        backend.fatal = IsolationUnavailable("no more")
        backend.vanish(slot.container)
        with pytest.raises(IsolationUnavailable):
            await waiting


async def test_refusal_is_forgotten(monkeypatch):
    pool, backend = model_pool(slots=1, containers=2, require_sandbox=True)
    whole, isolated = ModelClient.capabilities, False

    async def capabilities(client):
        return (await whole(client)).model_copy(update={"isolated": isolated})

    async with pool, pool.lease("a"):
        monkeypatch.setattr(ModelClient, "capabilities", capabilities)
        waiting = asyncio.create_task(pool.acquire("b"))
        await until(lambda: "require_sandbox" in pool.trouble(), "the refusal")
        isolated = True
        await (await waiting).release()
        assert backend.retired
        assert pool.trouble() == ""


async def test_old_refusal_is_no_trouble(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.REFUSED_S", (0.01, 0.05))
    monkeypatch.setattr("atropos.slots.containers.keeper.ASK_AGAIN_S", 0.1)
    pool, backend = model_pool(slots=1, containers=2)
    async with pool:
        async with pool.lease("a"):
            backend.refuse = BackendUnavailable("quota")
            with pytest.raises(AcquireTimeout, match="quota"):
                await pool.acquire("b", timeout_s=0.2)
        await until(lambda: not pool.trouble(), "no trouble")
        backend.refuse_retire = BackendUnavailable("nomad is away")
        (link,) = pool.links.values()
        await link.condemn("broken")
        for _ in range(20):  # the keeper looks at once, and nothing is asked of the backend
            await asyncio.sleep(0)
        assert "nomad is away" in pool.trouble()
        await (await pool.acquire("c")).release()
        await until(lambda: not pool.trouble(), "no trouble")


async def test_refused_growth_is_retried(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.REFUSED_S", (0.01, 0.05))
    pool, backend = model_pool(slots=1, containers=2)
    async with pool, pool.lease("a"):
        backend.refuse = BackendUnavailable("quota")
        waiting = asyncio.create_task(pool.acquire("b"))
        await until(lambda: len(backend.asked) >= 3, "a second try")
        assert "quota" in pool.trouble()
        backend.refuse = None
        await (await waiting).release()


async def test_what_is_there_is_asked_for_once(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.ASK_AGAIN_S", 0.001)
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        for number in range(20):
            async with pool.lease(f"t{number}"):
                await settled()
        assert backend.asked == [1]


async def test_removed_are_replaced(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.ASK_AGAIN_S", 0.05)
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        backend.vanish(next(iter(backend.listed)))
        async with pool.lease("t"):
            pass


async def test_stop_ends_all():
    pool, backend = model_pool(slots=1, containers=1)
    await pool.start()
    slot = await pool.acquire("t")
    waiting = asyncio.create_task(pool.acquire("u"))
    await asyncio.sleep(0.01)
    await asyncio.gather(pool.stop(purge_job=False), pool.stop())
    with pytest.raises(BackendUnavailable, match="stopped"):
        await waiting
    assert slot.lost is not None
    assert backend.held == 0
    assert backend.closed is False
    await slot.release()


@pytest.mark.parametrize("moment", [0, 0.01, 0.03])
async def test_stop_ends_an_acquire(moment):
    pool, backend = model_pool(slots=2, containers=1)
    await pool.start()
    backend.servers[next(iter(backend.servers))].delay_s = 0.02
    tasks = [asyncio.create_task(pool.acquire(f"t{n}")) for n in range(4)]
    await asyncio.sleep(moment)
    await pool.stop()
    async with asyncio.timeout(5):
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, BackendUnavailable) or result.lost is not None
    assert backend.held == 0 or backend.closed


async def test_unsupported_requests_leak_nothing():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (server,) = backend.servers.values()
        server.refuse = NotSupported("no snapshots here")
        with pytest.raises(NotSupported):
            await pool.acquire("t")
        server.refuse = None
        async with pool.lease("u"):
            pass


@shows("bases")
async def test_unknown_bases_are_refused():
    pool, _ = model_pool(bases={"ml": "/srv/ml"})
    async with pool:
        with pytest.raises(ConfigError, match=r"base: 'x'.*ml"):
            await pool.acquire("t", base="x")
        with pytest.raises(ConfigError, match="allow_network"):
            await pool.acquire("t", network=True)


@shows("travel_mib")
async def test_bound_fork_waits():
    pool, backend = model_pool(slots=2, containers=2, min_containers=2, travel_mib=0)
    async with pool:
        slot = await pool.acquire("t")
        snapshot = await slot.snapshot()
        async with pool.lease("f1", snapshot=snapshot) as fork:
            assert fork.container == slot.container
            waiting = asyncio.create_task(pool.acquire("f2", snapshot=snapshot))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            async with pool.lease("other") as other:
                assert other.container != slot.container
        second = await waiting
        assert second.container == slot.container
        lost = asyncio.create_task(pool.acquire("f3", snapshot=snapshot))
        await asyncio.sleep(0.01)
        backend.vanish(slot.container)
        with pytest.raises(SlotLost, match="snapshot"):
            await lost
        with pytest.raises(SlotLost, match="snapshot"):
            await pool.acquire("f4", snapshot=snapshot)
        await snapshot.drop()


async def test_a_waiting_fork_moves_on():
    pool, backend = model_pool(slots=1, containers=3, min_containers=3)
    async with pool:
        origin = await pool.acquire("origin")
        snapshot = await origin.snapshot()
        fork = await pool.acquire("fork", snapshot=snapshot)
        for server in backend.servers.values():
            server.refuses_snapshots = BackendUnavailable("the archive broke off")
        with pytest.raises(SandboxError, match="no free slot"):
            await pool.acquire("third", snapshot=snapshot)
        waiting = asyncio.create_task(pool.acquire("waiting", snapshot=snapshot))
        await until(lambda: pool.stats().waiting == 1, "a waiting fork")
        ends, stays = (origin, fork) if snapshot.places[0] is origin.link else (fork, origin)
        ends.link.close()
        await stays.release()
        async with asyncio.timeout(5), await waiting as slot:
            assert slot.container == stays.container


async def test_a_bad_archive_is_one_line(caplog):
    pool, _ = model_pool(images=("oci-archive:/nowhere.tar",))
    async with pool:
        await until(lambda: caplog.records, "a word")
        (record,) = caplog.records
        assert (record.levelname, record.exc_info) == ("WARNING", None)
        assert "oci-archive:/nowhere.tar can't be read: No such file or directory" in record.getMessage()


async def test_a_built_image_is_brought_to_others():
    pool, backend = model_pool(containers=3, min_containers=3)
    async with pool:
        silent, has, lacks = backend.servers.values()
        built = ImageInfo(
            id="0" * 64, source=f"atropos-build:{'0' * 64}", bytes=1, parent_source="atropos-base:default"
        )
        silent.silent, has.built[built.source] = True, built
        assert await pool.find_built("0" * 64) == built
        assert await pool.prepare(built.source) == built
        assert lacks.built == has.built
        with pytest.raises(BackendUnavailable, match="did not answer"):
            await pool.find_built("1" * 64)


@pytest.mark.parametrize("there", [True, False])
async def test_locks_follow_no_link(monkeypatch, tmp_path, there):
    elsewhere = tmp_path / "elsewhere"
    if there:
        elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"atropos-builds-{os.geteuid()}").symlink_to(elsewhere)
    pool, _ = model_pool()
    async with pool:
        with pytest.raises(ConfigError, match="is not a folder of this user's own"):
            async with pool.building("0" * 64, lambda: None):
                pass
    assert not there or not os.listdir(elsewhere)


async def test_lost_preparation_moves_on():
    pool, backend = model_pool(containers=2)
    async with pool:
        (server,) = backend.servers.values()
        server.prepares = asyncio.Event()
        waiting = asyncio.create_task(pool.acquire("t", image="python:3.13-slim"))
        await until(lambda: server.preparing, "its preparation")
        (link,) = pool.links.values()
        link.close()
        async with asyncio.timeout(5), await waiting as slot:
            assert slot.container != server.name


async def test_many_images_are_free():
    """The cost is compared in the same run, generously: one that grew with the images was six times as high."""
    pool, _ = model_pool(containers=30, min_containers=30)
    async with pool:
        await until(lambda: pool.stats().ready == 30, "all containers")

        async def cost(images: int) -> float:
            for n in range(images):
                await pool.prepare(f"image{n}")
            best = 1.0
            for _ in range(5):
                began = time.process_time()
                for n in range(50):
                    async with pool.lease("t", image=f"image{n % images}"):
                        pass
                best = min(best, time.process_time() - began)
            return best

        few = await cost(1)
        assert await cost(300) < 3 * few


async def test_image_leases_are_fifo():
    pool, backend = model_pool(slots=4, containers=2, min_containers=2, acquire_timeout_s=60)
    async with pool:
        has, lacks = backend.servers.values()
        lacks.prepares = asyncio.Event()
        held = [await pool.acquire(f"t{n}") for n in range(8)]
        order, waiting = [], []
        for n in range(20):
            waiting.append(asyncio.create_task(pool.acquire(f"w{n}", image="python:3.13-slim")))
            waiting[-1].add_done_callback(lambda _, n=n: order.append(n))
            await asyncio.sleep(0.005)
        for count, slot in enumerate([slot for slot in held if slot.container == has.name], 1):
            await slot.release()
            await until(lambda count=count: len(order) == count, "the next lease")
        assert order == [0, 1, 2, 3]
        lacks.prepares.set()
        await until(lambda: pool.stats().waiting == 16, "the others in line")
        for slot in held:
            await slot.release()
        for each in waiting:
            await (await each).release()
        assert order == [*range(20)]


@pytest.mark.parametrize("gone", ["dropped", "lost"])
async def test_gone_snapshot_fails(gone):
    pool, backend = model_pool(slots=2, containers=2, min_containers=2)
    async with pool:
        slot = await pool.acquire("origin")
        snapshot = await slot.snapshot()
        if gone == "lost":
            backend.vanish(slot.container)
            await until(lambda: slot.lost is not None, "the loss")
        else:
            await snapshot.drop()
        with pytest.raises(SlotLost, match=f"snapshot {snapshot.id}.*{gone}"):
            await pool.acquire("fork", snapshot=snapshot, image="python:3.13-slim")


async def test_forks_take_snapshots():
    pool, backend = model_pool(slots=3, containers=2)
    async with pool:
        slot = await pool.acquire("t")
        home = backend.servers[slot.container]
        snapshot = await slot.snapshot()
        forks = await asyncio.gather(*(pool.acquire(f"f{n}", snapshot=snapshot) for n in range(5)))
        assert sorted(fork.container == slot.container for fork in forks) == [False] * 3 + [True] * 2
        (other,) = [server for server in backend.servers.values() if server is not home]
        assert (other.taken_in, home.taken_in) == (1, 0)
        backend.vanish(slot.container)
        await until(lambda: slot.lost is not None, "the loss")
        await asyncio.gather(*(fork.release() for fork in forks))
        async with pool.lease("later", snapshot=snapshot) as fork:
            assert backend.servers[fork.container] is other
        await snapshot.drop()
        await settled()
        assert other.snapshot_store == set()
        with pytest.raises(SlotLost, match="dropped"):
            await pool.acquire("f", snapshot=snapshot)


async def test_a_fork_says_why_it_stays():
    pool, backend = model_pool(slots=1, containers=2, min_containers=2)
    async with pool:
        slot = await pool.acquire("origin")
        snapshot = await slot.snapshot()
        for server in backend.servers.values():
            server.takes_none = True
        why = "the snapshot can't be copied to another container: too many snapshots"
        with pytest.raises(AcquireTimeout, match=why):
            await pool.acquire("fork", snapshot=snapshot, timeout_s=0.3)
        await slot.release()


async def gets_the_slot_of_its_origin(waiting, origin, pool):
    """A fork that waits until its snapshot's origin is released, and is then in the same container."""
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await origin.release()
    fork = await waiting
    assert fork.container == origin.container
    await fork.release()
    await settled()
    assert (pool.stats().free, pool.stats().leased) == (2, 0)


async def test_failed_copy_is_explained():
    pool, backend = model_pool(slots=1, containers=2, min_containers=2)
    async with pool:
        slot = await pool.acquire("origin")
        snapshot = await slot.snapshot()
        for server in backend.servers.values():
            server.refuses_snapshots = BackendUnavailable("the archive broke off")
        async with asyncio.timeout(5):
            with pytest.raises(SandboxError, match="no free slot: the archive broke off") as caught:
                await pool.acquire("fork", snapshot=snapshot, timeout_s=60)
        assert caught.value.retryable
        later = asyncio.create_task(pool.acquire("again", snapshot=snapshot))
        await gets_the_slot_of_its_origin(later, slot, pool)


async def test_copy_survives_its_target(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.RELINK_S", 0.05)
    pool, backend = model_pool(slots=1, containers=2, min_containers=2)
    async with pool:
        slot = await pool.acquire("origin")
        snapshot = await slot.snapshot()
        (target,) = (name for name in backend.servers if name != slot.container)
        backend.servers[target].delay_s = 0.05
        waiting = asyncio.create_task(pool.acquire("fork", snapshot=snapshot))
        await asyncio.sleep(0.02)
        backend.servers[target].kill()
        fork = await waiting
        assert fork.container not in (slot.container, target)
        assert not snapshot.stays_because


async def test_refused_one_is_waited_for():
    pool, backend = model_pool(slots=1, containers=2, min_containers=2)
    async with pool:
        slot = await pool.acquire("t")
        snapshot = await slot.snapshot()
        for server in backend.servers.values():
            server.takes_none = True
        waiting = asyncio.create_task(pool.acquire("f", snapshot=snapshot))
        await gets_the_slot_of_its_origin(waiting, slot, pool)


async def test_random_traffic_leaks_none():
    rng = random.Random(11)
    pool, backend = model_pool(slots=3, containers=4, acquire_timeout_s=30, idle_container_s=0.05)
    backend.delay_s, backend.jitter = 0.001, rng
    outcomes = {"ok": 0, "cancelled": 0, "lost": 0}

    async def trajectory(n):
        try:
            async with pool.lease(f"t{n}") as slot:
                for _ in range(rng.randrange(4)):
                    assert (await slot.exec("x")).output == slot.name
            outcomes["ok"] += 1
        except (SlotLost, LeaseExpired):
            outcomes["lost"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1

    async with pool:
        tasks = []
        for n in range(400):
            tasks.append(asyncio.create_task(trajectory(n)))
            if rng.random() < 0.3:
                asyncio.get_running_loop().call_later(rng.random() * 0.03, tasks[-1].cancel)
            if rng.random() < 0.02 and backend.listed:
                key = rng.choice(list(backend.listed))
                index = backend.listed[key].index
                backend.vanish(key)
                backend.open(index)
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        await settled()
        assert backend.held == 0
        assert (pool.stats().leased, pool.stats().waiting) == (0, 0)
        assert SLOT * pool.stats().free == sum((link.seat.free for link in pool.links.values()), NOTHING)
        assert outcomes["ok"] > 100
    assert not pool_tasks()


async def test_stale_are_dropped():
    pool, backend = model_pool(slots=2, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        server = backend.servers[slot.container]
        old = await slot.snapshot()
        server.clients[0].lost.set()
        await until(lambda: len(server.clients) == 2 and pool.stats().ready == 1, "it is connected to again")
        assert server.snapshot_store == set()
        with pytest.raises(SlotLost):
            await pool.acquire("f", snapshot=old)
        async with pool.lease("next") as other:
            await other.snapshot()
            server.clients[1].lost.set()
            await until(lambda: len(server.clients) == 3 and pool.stats().ready == 1, "and once more")
        assert server.snapshot_store == set()


async def test_a_failed_drop_is_repeated():
    pool, backend = model_pool(slots=2, containers=1)
    async with pool, pool.lease("t") as slot:
        server = backend.servers[slot.container]
        snapshot = await slot.snapshot()

        async def unreachable(snapshot_id):
            raise BackendUnavailable("the server can't be reached")

        server.clients[0].drop_snapshot = unreachable
        await snapshot.drop()
        await settled()
        assert server.snapshot_store == {snapshot.id}
        assert not slot.link.seat.pins
        server.clients[0].lost.set()
        await until(lambda: len(server.clients) == 2 and pool.stats().ready == 1, "it is connected to again")
        assert server.snapshot_store == set()


async def test_stop_waits_for_drops():
    pool, backend = model_pool(slots=2, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        server = backend.servers[slot.container]
        dropping, kept = await slot.snapshot(), await slot.snapshot()
        await slot.release()
        told = server.clients[0].drop_snapshot

        async def slowly(snapshot_id):
            await asyncio.sleep(0.02)
            assert not server.clients[0].closed
            await told(snapshot_id)

        server.clients[0].drop_snapshot = slowly
        await dropping.drop()
        assert server.snapshot_store == {dropping.id, kept.id}
    assert server.snapshot_store == set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limits": {"memory_mib": 64}}, r"limits: write a LeaseLimits \(got dict\)"),
        ({"share": 5}, r"share: .*Share \(got int\)"),
        ({"image": 5}, r"image: .*string \(got int\)"),
        ({"snapshot": "s"}, r"snapshot: .*Snapshot \(got str\)"),
        ({"timeout_s": "soon"}, r"timeout_s: .*number \(got str\)"),
        ({"timeout_s": -1}, r"timeout_s: write seconds, 0 or more \(got -1\)"),
        ({"timeout_s": math.nan}, r"timeout_s: write seconds, 0 or more \(got nan\)"),
        ({"secrets": ["a"]}, r"secrets: .*EgressSecret.* \(got list\)"),
        ({"secrets": "a"}, r"secrets: .* \(got str\)"),
    ],
    ids=str,
)
async def test_wrong_types_are_named(given, said):
    pool, _ = model_pool()
    async with pool:
        with pytest.raises(ConfigError, match=said):
            await pool.acquire("trajectory", **given)
        with pytest.raises(ConfigError, match=r"trajectory_id: .*string \(got int\)"):
            await pool.acquire(5)
        with pytest.raises(TypeError, match="unexpected keyword"):
            await pool.acquire("trajectory", limit=5)
        async with pool.lease("trajectory"):
            pass
