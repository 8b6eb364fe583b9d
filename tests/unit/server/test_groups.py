"""Leases that join another one: in the room that it keeps, on one network, and with one end."""

from __future__ import annotations

import asyncio

import pytest

from atropos.errors import LeaseExpired, NotSupported, PoolFull, SlotLost
from atropos.wire import Exec, Joining, LeaseLimits, MountRequest
from tests.unit.client.test_client import client_of, request
from tests.unit.server.fakes import FakeHost, serving
from tests.waiting import until

TWO = LeaseLimits(members=(LeaseLimits(), LeaseLimits()))


def joining(lease, *names):
    return Joining(lease_id=lease.lease_id, names=names, its_names=("main",))


async def group_of(client, *names):
    first = await client.acquire(request(limits=TWO))
    return [first, *[await client.acquire(request(joins=joining(first, name))) for name in names]]


async def test_members_take_the_room_that_is_kept():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first = await client.acquire(request(limits=TWO))
        assert running.core.state.table.free == 1, "a slot's own room, and that of two others"
        members = [await client.acquire(request(joins=joining(first, name))) for name in ("db", "web")]
        assert running.core.state.table.free == 1
        with pytest.raises(NotSupported, match=r"the lease keeps nothing; name it in limits\.members"):
            await client.acquire(request(joins=joining(first, "more")))
        [network] = running.host.networks
        assert sorted(network.names.values()) == [("db",), ("main",), ("web",)]
        assert len({lease.slot for lease in (first, *members)}) == 3
        await client.release(first)
        assert (running.core.state.table.free, running.core.state.runs, network.closed) == (4, {}, True)


async def test_disk_files_fit_before_a_start():
    large = LeaseLimits(memory_mib=64, disk_mib=300)
    host = FakeHost()
    host.disk_mib = 500
    async with serving(host, slots=4, largest_disk_mib=300) as running, client_of(running) as client:
        with pytest.raises(PoolFull, match="600"):
            await client.acquire(request(limits=large.model_copy(update={"members": (large,)})))
        assert not running.core.state.runs


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_group_is_released_together(which):
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        leases = await group_of(client, "db", "web")
        assert (await client.release(leases[which])).clean
        await until(lambda: running.core.state.table.free == 4)
        for lease in leases:
            assert (await client.release(lease)).released
            with pytest.raises(LeaseExpired):
                await client.call(lease, Exec(command="echo on"))


async def test_a_lost_slot_ends_its_group():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first, db, web = await group_of(client, "db", "web")
        running.core.state.runs[db.lease_id].sandbox.die("its PID 1 was killed")
        for lease, why in (
            (db, "the sandbox ended: its PID 1"),
            (first, "of its group ended: "),
            (web, "of its group"),
        ):
            with pytest.raises(SlotLost, match=why):
                await client.call(lease, Exec(command="echo on"))
        await until(lambda: running.core.state.table.free == 4)


async def test_programs_end_before_resets():
    host = FakeHost()
    async with serving(host, slots=4) as running, client_of(running) as client:
        leases = await group_of(client, "db", "web")
        sandboxes = [running.core.state.runs[lease.lease_id].sandbox for lease in leases]
        seen = []
        for sandbox in sandboxes:
            stop = sandbox.stop
            sandbox.stop = lambda stop=stop: seen.append([each.order for each in sandboxes]) or stop()
        await client.release(leases[1])
        await until(lambda: running.core.state.table.free == 4)
        assert seen == [[["programs ended"]] * 3] * 3


async def test_doubtful_member_retires_alone():
    host = FakeHost()
    async with serving(host, slots=4) as running, client_of(running) as client:
        first, db = await group_of(client, "db")
        host.dirty.add(running.core.state.runs[db.lease_id].sandbox.name)
        assert (await client.release(first)).clean
        assert running.core.state.table.free == 3
        host.dirty.clear()
        await until(lambda: running.core.state.table.free == 4)


async def test_a_group_has_no_snapshots():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first, db = await group_of(client, "db")
        for lease in (first, db):
            with pytest.raises(NotSupported, match="neither snapshots nor views"):
                await client.snapshot(lease)
        assert (await client.call(db, Exec(command="echo on"))).output == b"on"


async def test_mounts_are_of_one_group():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first, db = await group_of(client, "db")
        alone = await client.acquire(request())
        wanted = MountRequest(path="/there", of=db.lease_id, source="/data", read_only=True)
        for _ in range(2):  # a repeated request
            await client.mount(first, wanted)
        assert [(path.split(":")[1], read_only) for _, path, read_only in running.host.shared] == [("/there", True)]
        nothing = MountRequest(path="/more", of=db.lease_id, source="/nothing")
        for _ in range(2):
            refused = (await client.mount(first, nothing)).refused
            assert (refused.error, refused.message) == ("not_found", "there is no /nothing")
        with pytest.raises(NotSupported, match="are not of one group"):
            await client.mount(alone, wanted)


async def test_only_its_client_joins_a_lease():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first = await client.acquire(request(limits=TWO))
        async with client_of(running, client_id="another") as other:
            with pytest.raises(LeaseExpired, match="which this one is to join, is over"):
                await other.acquire(request(joins=joining(first, "db")))


async def test_release_before_joining():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first, db = await group_of(client, "db")
        [network] = running.host.networks
        running.host.may_join.clear()
        late = request(joins=joining(first, "late"))
        asking = asyncio.create_task(client.acquire(late))
        await until(lambda: late.lease_id in running.core.state.runs)
        releasing = asyncio.create_task(running.core.leasing.release(late.lease_id, None))
        await until(lambda: running.core.state.runs[late.lease_id].ending is not None)
        running.host.may_join.set()
        await releasing
        with pytest.raises(LeaseExpired):
            await asking
        for lease in (first, db):
            assert (await client.call(lease, Exec(command="echo on"))).output == b"on"
        assert sorted(network.names.values()) == [("db",), ("main",)]
        web = await client.acquire(request(joins=joining(first, "web")))
        await client.release(web)
        await until(lambda: running.core.state.table.free == 4)


async def test_failed_join_is_tried_again():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first, _ = await group_of(client, "db")
        [network] = running.host.networks
        network.join_fails = True
        with pytest.raises(NotSupported, match="hold the names"):
            await client.acquire(request(joins=joining(first, "web")))
        network.join_fails = False
        assert running.core.state.table.free == 1, "the room stays kept"
        await client.acquire(request(joins=joining(first, "web")))
        await client.release(first)
        assert running.core.state.table.free == 4


async def test_joined_slot_takes_no_snapshot():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first = await client.acquire(request(limits=TWO))
        running.host.may_join.clear()
        asking = asyncio.create_task(client.acquire(request(joins=joining(first, "db"))))
        await until(lambda: running.host.networks)
        with pytest.raises(NotSupported, match="neither snapshots nor views"):
            await client.snapshot(first)
        running.host.may_join.set()
        await asking


async def test_end_waits_for_its_mounts():
    async with serving(FakeHost(), slots=4) as running, client_of(running) as client:
        first, db = await group_of(client, "db")
        runs = [running.core.state.runs[lease.lease_id] for lease in (first, db)]
        sandboxes = [run.sandbox for run in runs]
        running.host.may_share.clear()
        wanted = MountRequest(path="/there", of=db.lease_id, source="/data", read_only=True)
        mounting = asyncio.create_task(client.mount(first, wanted))
        await until(lambda: runs[0].mounting)
        releasing = asyncio.create_task(client.release(db))
        await until(lambda: runs[0].ending is not None)
        for _ in range(50):
            await asyncio.sleep(0)
        running.host.may_share.set()
        await asyncio.wait([mounting, releasing])
        await until(lambda: running.core.state.table.free == 4)
        assert [each.order for each in sandboxes] == [["mounted", "programs ended"], ["programs ended"]]
