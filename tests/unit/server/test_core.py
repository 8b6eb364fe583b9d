"""The server's leases at work on a host that fails on demand."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace

import aiohttp
import pytest

from atropos.errors import BackendUnavailable, LeaseExpired, NotSupported, PoolFull, SandboxError, SlotLost
from atropos.sandbox.server.calls.journal import Journal, JournalEntry
from atropos.sandbox.server.calls.lanes import MAX_QUEUED, Lanes
from atropos.sandbox.server.calls.start_queue import StartQueue
from atropos.sandbox.server.metrics import Meters
from atropos.sandbox.server.snapshots.layer_tar import packed_layers
from atropos.sandbox.server.snapshots.snapshot_transfer import PARALLEL, IncomingSnapshot
from atropos.sandbox.server.upkeep import forget
from atropos.slots.client import SandboxClient
from atropos.wire import Call, Exec, Fault, Health, OpError, ProcRead, Reply, ViewFolders, WriteFile, client_name
from tests.settings import shows
from tests.unit.client.test_client import client_of, request
from tests.unit.server.fakes import TOKEN, FakeHost, FakeSandbox, serving
from tests.waiting import SLOWNESS, until


async def test_many_retired_end_it():
    host = FakeHost()
    async with serving(host, slots=4, max_retired=2) as running, client_of(running) as client:
        leases = [await client.acquire(request()) for _ in range(3)]
        for lease in leases[:2]:
            host.dirty.add(running.core.state.runs[lease.lease_id].sandbox.name)
            assert not (await client.release(lease)).clean
        async with aiohttp.ClientSession() as session, session.get(f"{running.url}/v1/health") as answer:
            assert (answer.status, Health.model_validate_json(await answer.read()).status) == (503, "broken")
        with pytest.raises(BackendUnavailable, match="2 of 4 slots are retired"):
            await client.acquire(request())
        assert (await client.call(leases[2], Exec(command="echo on"))).output == b"on"
        host.dirty.clear()
        await client.release(leases[2])
        assert await asyncio.wait_for(running.task, 10) == 1


async def test_a_retired_slot_comes_back():
    host = FakeHost()
    async with serving(host, slots=4) as running, client_of(running) as client:
        lease = await client.acquire(request())
        host.dirty.add(running.core.state.runs[lease.lease_id].sandbox.name)
        assert not (await client.release(lease)).clean
        assert (await client.status()).retired == 1
        host.dirty.clear()
        await until(lambda: running.core.state.table.free == 4)


async def test_parallel_count_once(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.warm_pool.BACKOFF_S", (0.5,) * 5)
    host = FakeHost()
    async with serving(host, slots=16) as running, client_of(running) as client:
        warm_pool = running.core.leasing.warm_pool
        await until(lambda: warm_pool.ready == 20)
        host.start_fails = True
        for sandbox in list(host.live):
            sandbox.die("killed for want of memory")
        await until(lambda: host.failed_starts == 20)
        assert not running.core.leasing.broken
        host.start_fails = False
        await until(lambda: warm_pool.ready == 20)
        await client.release(await client.acquire(request()))


async def test_doubtful_view_retires():
    host = FakeHost()
    async with serving(host, slots=4) as running, client_of(running) as client:
        lease = await client.acquire(request())
        await client.view(lease, ViewFolders())
        host.dirty.add(running.core.state.runs[lease.lease_id].sandbox.name)
        with pytest.raises(SlotLost, match="the view could not be confirmed gone"):
            await client.snapshot(lease)
        await until(lambda: lease.lease_id not in running.core.state.runs)
        assert (await client.status()).retired == 1
        host.dirty.clear()
        await until(lambda: running.core.state.table.free == 4)


async def test_log_names_no_secret_ids(caplog, monkeypatch):
    caplog.set_level("INFO", "atropos.sandbox")
    host = FakeHost()
    async with serving(host) as running, client_of(running) as client:
        lease = await client.acquire(request())
        host.start_fails = True
        with pytest.raises(SandboxError, match="no more namespaces"):
            await client.view(lease, ViewFolders())
        monkeypatch.setattr(running.core.leasing, "renew", lambda *_: 1 / 0)
        url = f"{running.url}/v1/leases/{lease.lease_id}/renew"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            assert (await session.post(url)).status == 500
        for stream in running.core.state.streams:
            stream.abort("cut")
    said = "\n".join(each.getMessage() for each in caplog.records if each.name.startswith("atropos.sandbox"))
    assert f"{lease.slot}: no view" in said
    assert "renew failed" in said
    assert f"stream of {client_name('tester')} closed: cut" in said
    assert lease.lease_id not in said
    assert "tester" not in said


async def test_failed_starts_end_server(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.warm_pool.BACKOFF_S", (0.01,) * 5)
    host = FakeHost()
    async with serving(host, slots=2, warm=0) as running, client_of(running) as client:
        await until(lambda: running.core.leasing.warm_pool.ready == 2)
        lease = await client.acquire(request())
        taken = await running.core.leasing.warm_pool.take(5)  # so that the other slot's has to be started
        host.start_fails = True
        with pytest.raises(BackendUnavailable, match="no more namespaces"):
            await asyncio.wait_for(client.acquire(request()), 30)
        assert "no more namespaces" in running.core.leasing.broken
        await taken.stop()
        await client.release(lease)
        assert await asyncio.wait_for(running.task, 20) == 1


@pytest.mark.parametrize("network", [False, True])
async def test_broken_host_ends_server(monkeypatch, network):
    monkeypatch.setattr("atropos.sandbox.server.warm_pool.BACKOFF_S", (3600.0,) * 5)
    host = FakeHost()
    async with serving(host, slots=2, allow_network=network) as running, client_of(running) as client:
        lease = await client.acquire(request(network=network))
        host.broken = True
        for sandbox in list(host.live):
            sandbox.die("it went with what started it")
        await client.release(lease)
        assert await asyncio.wait_for(running.task, 20) == 1


@shows("warm")
async def test_shelf_fills_unasked(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.warm_pool.BACKOFF_S", (0.01,) * 50)
    host = FakeHost()
    async with serving(host, slots=2, warm=1) as running, client_of(running) as client:
        warm_pool = running.core.leasing.warm_pool
        await until(lambda: warm_pool.ready == 3)
        host.start_fails = True
        next(iter(host.live)).die("killed from outside")
        await until(lambda: host.failed_starts >= 3)
        host.start_fails = False
        await until(lambda: warm_pool.ready == 3)
        lease = await client.acquire(request())
        await until(lambda: warm_pool.ready == 2)
        await client.snapshot(lease)  # takes one to go on in
        await until(lambda: warm_pool.ready == 2)
        # a start that ends for somebody who waits, in the very moment in which it is counted what is missing
        for _ in range(2):
            await warm_pool.take(5)
        host.live.clear()
        await warm_pool.take(5)
        await until(lambda: warm_pool.ready == 2)
        host.live.clear()


async def test_dead_spare_is_never_leased():
    host = FakeHost()
    async with serving(host, slots=2) as running, client_of(running) as client:
        await until(lambda: running.core.leasing.warm_pool.ready >= 2)
        dead = list(host.live)
        for sandbox in dead:
            sandbox.die("killed from outside")
        lease = await client.acquire(request())
        assert running.core.state.runs[lease.lease_id].sandbox not in dead
        assert (await client.call(lease, Exec(command="echo ok"))).output == b"ok"
        await until(lambda: not host.live & set(dead))


async def test_doubtful_spare_is_logged(caplog):
    host = FakeHost()
    async with serving(host) as running:
        await until(lambda: running.core.leasing.warm_pool.ready == 5)
        host.dirty.add(host.started[0].name)
        host.started[0].die("killed from outside")
        await until(lambda: f"{host.started[0].name} could not be confirmed gone" in caplog.text)


async def test_recent_are_started_ahead():
    host = FakeHost()
    async with serving(host, slots=2, warm=2, allow_network=True) as running, client_of(running) as client:
        for network in (True, False):
            for _ in range(20):
                lease = await client.acquire(request(network=network))
                assert running.core.state.runs[lease.lease_id].sandbox.network is network
                await client.release(lease)
            await until(
                lambda: running.core.leasing.warm_pool.ready >= 4 and not running.core.leasing.warm_pool.warming
            )
            kinds = [each.network for each in host.live]
            assert kinds.count(network) >= 4
            assert len(kinds) <= 8
            before = len(host.started)
            lease = await client.acquire(request(network=network))
            assert running.core.state.runs[lease.lease_id].sandbox in host.started[:before], "it was there already"
            await client.release(lease)


async def test_release_during_start():
    host = FakeHost()
    async with serving(host, slots=1, warm=0) as running, client_of(running) as client:
        await until(lambda: running.core.leasing.warm_pool.ready == 1)
        first = await client.acquire(request())
        info = await client.snapshot(first)
        await client.release(first)
        host.start_s = 0.1
        wanted = request(snapshot=info.snapshot_id)
        starting = asyncio.create_task(running.core.leasing.acquire(wanted))
        await asyncio.sleep(0.03)
        assert (await running.core.leasing.release(wanted.lease_id, None)).released
        with pytest.raises(LeaseExpired):
            await starting
        assert running.core.state.table.free == 1
        await client.drop_snapshot(info.snapshot_id)
        await until(lambda: not host.layers)


async def test_a_snapshot_waits_for_earlier_calls():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        watching = asyncio.create_task(client.call(lease, ProcRead(id="p", wait_s=3600)))
        running_call = asyncio.create_task(client.call(lease, Exec(command="sleep 0.1")))
        await until(lambda: running.host.ran["sleep 0.1"])
        info = await client.snapshot(lease)
        assert running_call.done()
        assert info.layers == 1
        outcome = await asyncio.wait_for(watching, 5)
        assert not isinstance(outcome, OpError) or outcome.error == "unknown_process"
        assert (await client.call(lease, Exec(command="echo on"))).output == b"on"


async def test_concurrent_pass_others(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.calls.lanes.MAX_CONCURRENT", 2)
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())

        def start(command: str, *, concurrent: bool = False) -> asyncio.Task:
            return asyncio.create_task(client.call(lease, Exec(command=command, concurrent=concurrent)))

        first = start("hang")
        ordinary = [start(f"echo {n}") for n in range(5)]
        beside = [start(f"hang {n}", concurrent=True) for n in range(3)]
        await until(lambda: running.host.ran["hang 1"])
        await asyncio.sleep(0.02)
        assert running.host.ran["hang 2"] == 0, "it is one too many"
        beside[0].cancel()
        await until(lambda: running.host.ran["hang 2"])
        assert not any(call.done() for call in (first, *ordinary, *beside[1:]))
        first.cancel()
        await asyncio.gather(*ordinary)
        sandbox = running.core.state.runs[lease.lease_id].sandbox
        assert [each for each in sandbox.order if "echo" in each] == [f"echo {n}" for n in range(5)]
        for call in beside:
            call.cancel()


async def test_snapshot_waits_for_all():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        agent = asyncio.create_task(client.call(lease, Exec(command="hang", concurrent=True)))
        await until(lambda: running.host.ran["hang"])
        freezing = asyncio.create_task(client.snapshot(lease))
        lanes = running.core.state.runs[lease.lease_id].lanes
        await until(lambda: lanes.queued == 2)
        behind = asyncio.create_task(client.call(lease, Exec(command="echo behind")))
        # what the first one waits for must go on
        assert (await client.call(lease, Exec(command="echo poll", concurrent=True))).output == b"poll"
        assert not freezing.done()
        assert running.host.ran["echo behind"] == 0
        running.host.start_s = 0.1
        agent.cancel()
        await until(lambda: running.host.layers)
        late = await client.call(lease, Exec(command="echo late", concurrent=True))
        assert freezing.done()
        assert late.output == b"late"
        await asyncio.gather(freezing, behind)


async def test_copy_runs_beside_commands():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        lanes = running.core.state.runs[lease.lease_id].lanes
        agent = asyncio.create_task(client.call(lease, Exec(command="hang", concurrent=True)))
        await until(lambda: running.host.ran["hang"])
        copied = asyncio.Event()
        copying = asyncio.create_task(copy_beside(lanes, copied))
        late = asyncio.create_task(client.call(lease, Exec(command="echo late", concurrent=True)))
        await until(lambda: lanes.queued == 2)
        assert running.host.ran["echo late"] == 0
        copied.set()
        await copying
        assert (await late).output == b"late"
        assert not agent.done()
        agent.cancel()


async def test_failed_snapshot_ends():
    host = FakeHost()
    async with serving(host) as running, client_of(running) as client:
        lease, other = await client.acquire(request()), await client.acquire(request())
        host.freeze_fails = True
        with pytest.raises(SandboxError, match="a writer was left"):
            await client.snapshot(lease)
        with pytest.raises((SlotLost, LeaseExpired)):
            await client.call(lease, Exec(command="echo"))
        assert (await client.call(other, Exec(command="echo on"))).output == b"on"
        await until(lambda: running.core.state.table.free == 3)
        assert not running.core.state.snapshots.by_id
        assert not running.core.state.snapshots.pending


async def test_release_leaves_no_layer():
    host = FakeHost()
    async with serving(host) as running, client_of(running) as client:
        for pause in (0, 0.001, 0.003, 0.01):
            lease = await client.acquire(request())
            host.start_s = 0.005
            freezing = asyncio.create_task(client.snapshot(lease))
            await asyncio.sleep(pause)
            await client.release(lease)
            outcome = (await asyncio.gather(freezing, return_exceptions=True))[0]
            if not isinstance(outcome, Exception):
                await client.drop_snapshot(outcome.snapshot_id)
            else:
                assert isinstance(outcome, SandboxError)
        await until(lambda: not host.layers and running.core.state.table.free == 4)


async def test_asked_twice_freezes_once():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        twice = [running.core.workspaces.snapshot(lease.lease_id, "snap-mine-1", None) for _ in range(2)]
        first, second = await asyncio.gather(*twice)
        assert first == second
        assert len(running.host.layers) == 1
        assert (
            await running.core.workspaces.snapshot(lease.lease_id, "snap-mine-1", None)
        ).snapshot_id == "snap-mine-1"
        assert len(running.host.layers) == 1


async def test_one_snapshot_id_serves_one_lease():
    async with serving() as running, client_of(running) as client:
        leases = [await client.acquire(request()) for _ in range(2)]
        both = [running.core.workspaces.snapshot(lease.lease_id, "snap-mine-1", None) for lease in leases]
        taken, refused = await asyncio.gather(*both, return_exceptions=True)
        assert taken.snapshot_id == "snap-mine-1"
        assert isinstance(refused, NotSupported), refused
        for lease in leases:
            assert (await client.release(lease)).released
        await client.drop_snapshot("snap-mine-1")
        await until(lambda: not running.host.layers)


async def test_repeated_snapshot_is_one():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        running.host.may_start.clear()
        first = asyncio.create_task(running.core.workspaces.snapshot(lease.lease_id, "snap-mine-1", None))
        await until(lambda: running.host.layers)
        releasing = asyncio.create_task(client.release(lease))
        await until(lambda: running.core.state.runs[lease.lease_id].held.state == "ending")
        running.core.state.snapshots.by_id.clear()  # as if it had not got so far
        again = asyncio.create_task(running.core.workspaces.snapshot(lease.lease_id, "snap-mine-1", None))
        await asyncio.sleep(0)
        running.host.may_start.set()
        assert await again == await first
        await releasing


async def test_snapshots_are_bounded():
    async with serving(max_snapshots=20, max_snapshot_mib=1) as running, client_of(running) as client:
        lease = await client.acquire(request())
        for depth in range(16):
            assert (await client.snapshot(lease)).layers == depth + 1
        with pytest.raises(NotSupported, match="16 layers"):
            await client.snapshot(lease)
        other = await client.acquire(request())
        await client.call(other, WriteFile(path="big", data=bytes(2 << 20)))
        await client.snapshot(other)
        with pytest.raises(PoolFull, match="max_snapshot_mib"):
            await client.snapshot(other)
        for snapshot_id in list(running.core.state.snapshots.by_id):
            await client.drop_snapshot(snapshot_id)
        await client.release(other)
        await until(lambda: running.core.state.snapshots.bytes < 1 << 20)
        third = await client.acquire(request())
        for _ in range(4):
            await client.snapshot(third)
        assert (await client.call(lease, Exec(command="echo on"))).output == b"on"


async def test_snapshots_share_the_bound():
    async with serving(max_snapshots=20) as running, client_of(running) as client:
        lease = await client.acquire(request())
        outcomes = await asyncio.gather(*(client.snapshot(lease) for _ in range(20)), return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, BaseException)]
        assert [str(each) for each in refused] == ["a snapshot may have at most 16 layers"] * 4
        assert all(isinstance(each, NotSupported) for each in refused)
        assert len(running.core.state.snapshots.by_id) == 16
        assert not running.core.state.snapshots.pending
        assert (await client.call(lease, Exec(command="echo on"))).output == b"on"


async def test_one_snapshot_too_many_is_refused():
    async with serving(max_snapshots=1) as running, client_of(running) as client:
        lease = await client.acquire(request())
        info = await client.snapshot(lease)
        with pytest.raises(PoolFull, match="max_snapshots"):
            await client.snapshot(lease)
        assert (await client.call(lease, Exec(command="echo on"))).output == b"on"
        await client.drop_snapshot(info.snapshot_id)
        await client.snapshot(lease)
        assert len(running.core.state.snapshots.by_id) == 1


async def test_unknown_snapshot_is_free():
    async with serving() as running, client_of(running) as client:
        with pytest.raises(SandboxError, match="'never'"):
            await client.acquire(request(snapshot="never"))
        await until(lambda: running.core.state.table.free == 4)


async def test_gone_clients_are_dropped():
    async with serving() as running:
        client = client_of(running)
        await client.connect()
        lease = await client.acquire(request())
        await client.snapshot(lease)
        await client.release(lease)
        await client.close()
        await until(lambda: not running.core.state.streams)
        core = running.core
        core.state.forgive(-1000)  # the clock steps on
        forget(core)
        assert not core.state.snapshots.by_id
        await until(lambda: not running.host.layers)
        assert len(core.state.clients) == 0


async def test_orphaned_is_dropped():
    async with serving() as running, client_of(running) as client:
        core = running.core
        async with client_of(running, client_id="owner") as owner:
            lease = await owner.acquire(request())
            snapshot = await owner.snapshot(lease)
            fork = await client.acquire(request(snapshot=snapshot.snapshot_id, ttl_s=80_000))
            await owner.release(lease)
        await until(lambda: len(core.state.streams) == 1)
        core.state.forgive(-1000)  # the clock steps on
        forget(core)
        assert "owner" not in core.state.clients
        assert core.state.snapshots.by_id
        await client.release(fork)
        core.state.forgive(-1000)
        forget(core)
        assert not core.state.snapshots.by_id


async def test_an_import_keeps_its_image(tmp_path, monkeypatch):
    base, bases = "image:" + "a" * 64, {}
    monkeypatch.setattr(FakeHost, "store", SimpleNamespace(find=lambda key: key), raising=False)
    monkeypatch.setattr(FakeHost, "add_base", lambda _, name, image: bases.update({name: image}), raising=False)
    monkeypatch.setattr(FakeHost, "drop_base", lambda _, name: bases.pop(name), raising=False)
    (tmp_path / "file").write_text("x")
    async with packed_layers([str(tmp_path)], "a test") as chunks:
        archive = b"".join([chunk async for chunk in chunks])

    async with serving() as running:
        core = running.core

        async def arriving():
            yield archive[:100]
            forget(core)
            yield archive[100:]

        incoming = IncomingSnapshot("snap-12345678", layers=1, base=base, owner="tester", compressed=False)
        await core.transfer.receive(incoming, arriving())
        assert base in bases
        core.layers.drop_snapshot("snap-12345678")
        forget(core)
        assert not bases


async def test_slow_import_is_passed(tmp_path):
    begun: list[str] = []
    silent = asyncio.Event()

    async def arriving(name: str):
        begun.append(name)
        await silent.wait()
        yield b""

    async with serving() as running:
        core = running.core
        names = [f"snap-{number:08}" for number in range(PARALLEL)]
        incoming = [IncomingSnapshot(name, layers=1, base=None, owner="tester", compressed=False) for name in names]
        imports = [asyncio.create_task(core.transfer.receive(each, arriving(each.snapshot_id))) for each in incoming]
        await until(lambda: len(begun) == PARALLEL)
        (tmp_path / "file").write_text("written")
        sandbox = await running.host.start("copied")
        sandbox.upper = str(tmp_path)
        layer = await asyncio.wait_for(core.transfer.copy(sandbox), 10 * SLOWNESS)
        assert running.host.layers[layer] == {"file": b"written"}
        await sandbox.stop()
        silent.set()
        await asyncio.gather(*imports, return_exceptions=True)


async def test_the_dead_make_room():
    async with serving(max_snapshots=2) as running, client_of(running) as client:
        dead = client_of(running, client_id="dead")
        await dead.connect()
        lease, mine = await dead.acquire(request()), await client.acquire(request())
        left = [(await dead.snapshot(lease)).snapshot_id for _ in range(2)]
        with pytest.raises(PoolFull):
            await client.snapshot(mine)
        await dead.release(lease)
        await dead.close()
        await until(lambda: len(running.core.state.streams) == 1)
        core = running.core
        core.state.forgive(-100)  # the clock steps on
        core.state.table.seen("tester", core.state.now())
        taken = await client.snapshot(mine)
        assert set(core.state.snapshots.by_id) == {taken.snapshot_id, left[1]}


async def test_a_flood_is_refused():
    async with serving() as running, client_of(running) as client, client_of(running, client_id="other") as other:
        lease, theirs = await client.acquire(request()), await other.acquire(request())
        hanging = asyncio.create_task(client.call(lease, Exec(command="hang")))
        flood = [asyncio.create_task(client.call(lease, Exec(command=f"echo {n}"))) for n in range(1500)]
        for n in range(50):
            await other.call(theirs, Exec(command=f"echo {n}"))
        hanging.cancel()
        outcomes = await asyncio.gather(*flood, return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, SandboxError)]
        assert refused
        assert all("it was not run" in str(each) for each in refused)
        assert sum(running.host.ran[f"echo {n}"] for n in range(50, 1500)) == len(outcomes) - len(refused) - 50


async def test_namesake_ends_old_leases():
    async with serving() as running:
        old = client_of(running)
        await old.connect()
        await old.acquire(request())
        await old.close()
        async with SandboxClient(running.url, TOKEN, client_id="tester"):
            await until(lambda: running.core.state.table.free == 4)


def lanes_of(sandbox: FakeSandbox, journal: Journal | None = None, starts: StartQueue | None = None) -> Lanes:
    async def room() -> None:
        pass

    return Lanes(sandbox, journal or Journal(), lambda _: None, room, starts or StartQueue(), Meters())


async def copy_beside(lanes: Lanes, copied: asyncio.Event) -> None:
    async with lanes.barrier(beside=True):
        await copied.wait()


@pytest.mark.parametrize("asked", ["before", "after"])
async def test_waiting_barrier_answers(asked):
    async def work(lanes: Lanes) -> None:
        async with lanes.barrier():
            raise AssertionError("it ran")

    journal = Journal()
    lanes = lanes_of(await FakeHost().start("slot"), journal)
    call = Call(call_id="call", lease_id="lease", epoch=1, operation=Exec(command="hang"))
    lanes.submit(journal.open(call), call.operation)
    done = asyncio.create_task(work(lanes))
    if asked == "before":
        await until(lambda: lanes.queued == 2)
    lanes.close("lease_expired", "the lease was released")
    with pytest.raises(LeaseExpired, match="the lease was released"):
        await asyncio.wait_for(done, 10)


async def test_death_in_a_copy_no_result():
    sandbox, journal, copied = await FakeHost().start("slot"), Journal(), asyncio.Event()
    lanes = lanes_of(sandbox, journal)
    call = Call(call_id="call", lease_id="lease", epoch=1, operation=ProcRead(id="p", wait_s=3600))
    watching = journal.open(call)
    lanes.submit(watching, call.operation)
    await until(lambda: sandbox.running)
    copying = asyncio.create_task(copy_beside(lanes, copied))
    await asyncio.sleep(0)
    sandbox.die("killed from outside")
    await until(lambda: watching.answer is not None)
    assert isinstance(watching.answer, Fault), watching.answer
    assert watching.answer.code == "outcome_unknown"
    copied.set()
    await copying


async def test_waiting_are_cancelled(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.calls.start_queue.STARTING_S", 3600)
    host, journal, starts = FakeHost(), Journal(), StartQueue(1)
    first, second, third = [lanes_of(await host.start(f"{number}"), journal, starts) for number in range(3)]

    def submit(lanes: Lanes, call_id: str) -> JournalEntry:
        call = Call(call_id=call_id, lease_id="lease", epoch=1, operation=Exec(command="hang"))
        entry = journal.open(call)
        lanes.submit(entry, call.operation)
        return entry

    assert submit(first, "runs").state == "running"
    cancelled, pending = submit(second, "cancelled"), submit(second, "pending")
    assert cancelled.state == pending.state == "queued"
    second.cancel(cancelled)
    assert isinstance(cancelled.answer, Reply), cancelled.answer
    second.close("lease_expired", "the lease was released")
    assert isinstance(pending.answer, Fault), pending.answer
    first.close("lease_expired", "the lease was released")
    assert submit(third, "next").state == "running"


async def test_cancelled_leaves_no_data():
    sandbox, journal = await FakeHost().start("slot"), Journal()
    lanes = lanes_of(sandbox, journal)

    def submit(call_id: str, operation: Exec | WriteFile) -> JournalEntry:
        entry = journal.open(Call(call_id=call_id, lease_id="lease", epoch=1, operation=operation))
        lanes.submit(entry, operation)
        return entry

    running = submit("runs", Exec(command="hang"))
    data = []
    for number in range(MAX_QUEUED):
        operation = WriteFile(path="f", data=b"x")
        data.append(weakref.ref(operation))
        lanes.cancel(submit(f"cancelled {number}", operation))
    del operation
    assert not any(each() for each in data)
    last = submit("last", WriteFile(path="g", data=b"y"))
    assert last.state == "queued"
    await until(lambda: sandbox.running)
    lanes.cancel(running)
    await until(lambda: last.state == "done")
    assert sandbox.files == {"g": b"y"}
