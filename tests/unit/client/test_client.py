"""The client and the server together, over loopback, on a host without kernel."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import socket

import aiohttp
import pytest

from atropos import wire
from atropos.aio import cancel_and_wait
from atropos.errors import BackendUnavailable, LeaseExpired, NotSupported, OutcomeUnknown, PoolFull, SlotLost
from atropos.resources import NOTHING, Resources
from atropos.slots import SlotPoolConfig
from atropos.slots.client import SandboxClient, call_stream
from atropos.slots.client.server_images import ServerImages
from atropos.slots.client.server_requests import ServerRequests
from atropos.wire import CommandResult, Exec, ImageInfo, LeaseEnded, LeaseRequest, OpError, ProcRead, WriteFile
from tests.faults.proxy import Fault, proxied
from tests.unit.server.fakes import TOKEN, FakeHost, Running, serving
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.waits

ids = itertools.count()


def request(**fields: object) -> LeaseRequest:
    return LeaseRequest.model_validate({"lease_id": f"lease-{next(ids):05}", "client_id": "tester", **fields})


def client_of(running: Running, **settings) -> SandboxClient:
    return SandboxClient(running.url, TOKEN, **{"client_id": "tester", **settings})


async def test_call_and_its_result():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        result = await client.call(lease, Exec(command="echo hi"))
        assert isinstance(result, CommandResult)
        assert (result.exit_code, result.output) == (0, b"hi")
        released = await client.release(lease)
        assert (released.released, released.clean) == (True, True)


async def test_calls_of_a_lease_in_order():
    host = FakeHost()
    async with serving(host) as running, client_of(running) as client:
        lease = await client.acquire(request())
        commands = [f"sleep {0.01 * (5 - n)}" for n in range(5)] + [f"echo {n}" for n in range(50)]
        await asyncio.gather(*(client.call(lease, Exec(command=command)) for command in commands))
        sandbox = running.core.state.runs[lease.lease_id].sandbox
        assert sandbox.order == commands
        assert host.most_at_once == 1


async def test_leases_do_not_wait_for_each_other():
    async with serving() as running, client_of(running) as client:
        slow, fast = await client.acquire(request()), await client.acquire(request())
        hanging = asyncio.create_task(client.call(slow, Exec(command="hang")))
        for n in range(20):
            await client.call(fast, Exec(command=f"echo {n}"))
        assert not hanging.done()
        hanging.cancel()


async def test_watched_while_others_run():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        hanging = asyncio.create_task(client.call(lease, Exec(command="hang")))
        waiting = asyncio.create_task(client.call(lease, ProcRead(id="p", wait_s=3600)))
        await client.call(lease, ProcRead(id="p"))
        assert not hanging.done()
        assert not waiting.done()
        hanging.cancel()
        waiting.cancel()


async def test_full_server_says_when():
    told: list[Resources] = []
    async with serving(slots=1) as running, client_of(running, on_capacity=told.append) as client:
        lease = await client.acquire(request())
        with pytest.raises(PoolFull) as caught:
            await client.acquire(request())
        assert caught.value.room == NOTHING
        await client.release(lease)
        await until(lambda: told == [SlotPoolConfig().slot_room])
        await client.acquire(request())


async def test_cancelled_on_the_server():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        call = asyncio.create_task(client.call(lease, Exec(command="hang")))
        await until(lambda: running.host.ran["hang"])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # The lane is free again only because the first call ended.
        await client.call(lease, Exec(command="echo next"))
        await until(lambda: not running.core.state.clients.of("tester").journal.entries)


async def test_a_signal_cancels_its_call():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        call = client.call(lease, Exec(command="hang"))
        call.send(None)
        await until(lambda: running.host.ran["hang"])
        with pytest.raises(KeyboardInterrupt):
            call.throw(KeyboardInterrupt())
        await client.call(lease, Exec(command="echo next"))


async def test_cancels_leak_no_slot():
    host = FakeHost()
    async with serving(host, slots=1) as running, client_of(running) as client:
        host.start_s = 0.05
        for n in range(20):
            task = asyncio.create_task(client.acquire(request()))
            await asyncio.sleep(0.004 * (n % 5))
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                await client.release(task.result())
        await until(lambda: running.core.state.table.free == 1)


async def test_release_ends_calls():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        calls = [asyncio.create_task(client.call(lease, Exec(command="hang"))) for _ in range(3)]
        await until(lambda: running.host.ran["hang"])
        assert (await client.release(lease)).released
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, LeaseExpired)
        assert running.host.ran["hang"] == 1
        with pytest.raises(LeaseExpired):
            await client.call(lease, Exec(command="echo late"))
        assert (await client.release(lease)).released  # again, with the same answer


async def test_dying_sandbox_ends_lease():
    ended: list[LeaseEnded] = []
    async with serving() as running, client_of(running, on_lease_ended=ended.append) as client:
        lease, other = await client.acquire(request()), await client.acquire(request())
        with pytest.raises((OutcomeUnknown, SlotLost)):
            await client.call(lease, Exec(command="die"))
        await until(lambda: ended)
        assert (ended[0].lease_id, ended[0].code) == (lease.lease_id, "slot_lost")
        with pytest.raises(SlotLost):
            await client.call(lease, Exec(command="echo"))
        await client.call(other, Exec(command="echo"))
        await until(lambda: running.core.state.table.free == 3)


async def test_unknown_is_no_result():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        with pytest.raises(OutcomeUnknown):
            await client.call(lease, Exec(command="raise"))


async def test_same_call_id_runs_once():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        both = [client.call(lease, Exec(command="count a"), call_id="x") for _ in range(2)]
        first, second = await asyncio.gather(*both)
        assert first == second
        with pytest.raises(OutcomeUnknown):
            for _ in range(3):  # the first ones may find the answer that is not acknowledged yet
                await client.call(lease, Exec(command="count a"), call_id="x")
        assert running.host.ran["count a"] == 1


async def test_heartbeats_renew_a_lease():
    async with serving() as running:
        client, ttl_s = client_of(running), 2.2  # a server that was kept waiting for longer extends its leases
        await client.connect()
        await client.acquire(request(ttl_s=ttl_s))
        await asyncio.sleep(3)
        assert running.core.state.table.held, "heartbeats renew it"
        await client.close()
        began = running.core.state.now()
        await until(lambda: running.core.state.table.free == 4, "its end")
        assert running.core.state.now() - began < 3 * ttl_s


async def test_read_acks_are_forgotten(monkeypatch):
    """A new connection brings those again that the server may not have read."""
    async with serving(heartbeat_s=0.2) as running, client_of(running) as client:
        acked, calls = list[str](), running.core.calls
        ack = calls.ack

        def counted(of, call_ids):
            acked.extend(call_id.rpartition("/")[2] for call_id in call_ids)
            return ack(of, call_ids)

        monkeypatch.setattr(calls, "ack", counted)
        lease = await client.acquire(request())
        for number in range(4):  # each waits for a heartbeat of its own: the third one's echo comes before the fourth
            await client.call(lease, Exec(command="true"), call_id=f"call-{number}")
            await until(lambda number=number: f"call-{number}" in acked, "a heartbeat brings it")
        for stream in list(running.core.state.streams):
            stream.abort("cut")
        await client.call(lease, Exec(command="true"), call_id="last")
        await until(lambda: "last" in acked)
        assert [acked.count(f"call-{number}") for number in (0, 1, 3)] == [1, 1, 2]


async def test_restart_is_lost_for_good(port):
    ended: list[LeaseEnded] = []
    async with serving(port=port) as running:
        client = client_of(running, on_lease_ended=ended.append)
        await client.connect()
        lease = await client.acquire(request())
        call = asyncio.create_task(client.call(lease, Exec(command="hang")))
        await until(lambda: running.host.ran["hang"])
        running.server.stop(0)
        await running.task
    async with serving(port=port):
        await asyncio.wait_for(client.lost.wait(), 20 * SLOWNESS)
        with pytest.raises((OutcomeUnknown, SlotLost)):
            await call
        with pytest.raises(SlotLost):
            await client.call(lease, Exec(command="echo"))
        with pytest.raises(SlotLost):
            await client.acquire(request())
        assert [each.lease_id for each in ended] == [lease.lease_id]
        await client.close()


async def test_wrong_token_is_refused():
    async with serving() as running:
        client = SandboxClient(running.url, "wrong", client_id="x")
        with pytest.raises(BackendUnavailable, match="refuses the token") as caught:
            await client.connect()
        assert not caught.value.retryable
        await client.close()


async def test_other_version_is_refused(monkeypatch):
    monkeypatch.setattr(call_stream, "Hello", functools.partial(wire.Hello, version=wire.VERSION - 1))
    async with serving() as running:
        client = client_of(running)
        with pytest.raises(
            BackendUnavailable, match=f"version {wire.VERSION} of the wire, not {wire.VERSION - 1}"
        ) as caught:
            await client.connect()
        assert not caught.value.retryable
        await client.close()


async def test_nobody_listens():
    client = SandboxClient("http://127.0.0.1:9", TOKEN, client_id="x")
    with pytest.raises(BackendUnavailable, match="can't be reached"):
        await client.connect()
    await client.close()


async def test_unsupported_is_named():
    async with serving() as running, client_of(running) as client:
        with pytest.raises(NotSupported, match="network"):
            await client.acquire(request(network=True))
        with pytest.raises(NotSupported, match="base 'x'"):
            await client.acquire(request(base="x"))


@pytest.mark.slow("large input")
async def test_too_large_is_a_result():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        result = await client.call(lease, WriteFile(path="x", data=bytes(60 * 1024 * 1024)))
        assert isinstance(result, OpError)
        assert result.error == "too_large"
        large = await client.call(lease, WriteFile(path="x", data=bytes(32 * 1024 * 1024)))
        assert large.kind == "done"


async def test_original_outlives_a_fork():
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        await client.call(lease, WriteFile(path="a", data=b"1"))
        info = await client.snapshot(lease)
        assert (info.layers, info.bytes, info.users) == (1, 1, 1)
        await client.call(lease, WriteFile(path="a", data=b"22"))
        fork = await client.acquire(request(snapshot=info.snapshot_id))
        assert running.core.state.runs[fork.lease_id].sandbox.files == {"a": b"1"}
        assert running.core.state.runs[lease.lease_id].sandbox.files == {"a": b"22"}
        deeper = await client.snapshot(fork)
        assert deeper.layers == 2
        await client.drop_snapshot(info.snapshot_id)
        await client.drop_snapshot(deeper.snapshot_id)
        await client.drop_snapshot("never-there")
        assert running.host.layers, "leases stand on them"
        await client.release(lease)
        await client.release(fork)
        await until(lambda: not running.host.layers)


def open_sessions() -> set[int]:
    every = (one for one in gc.get_objects() if isinstance(one, aiohttp.ClientSession))
    return {id(one) for one in every if not one.closed}


async def test_cut_close_closes_all():
    async with serving() as running:
        before = open_sessions()
        client = client_of(running)
        await client.connect()
        snapshot = await client.snapshot(await client.acquire(request()))
        running.host.may_start.clear()
        fork = asyncio.create_task(client.acquire(request(snapshot=snapshot.snapshot_id)))
        await until(lambda: len(running.core.state.runs) == 2)
        await cancel_and_wait([fork])  # it is given back, which the close waits for
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        running.host.may_start.set()
        assert open_sessions() <= before


async def test_close_leaves_no_task_and_no_socket():
    async with serving() as running:
        before = asyncio.all_tasks()
        client = client_of(running)
        await client.connect()
        lease = await client.acquire(request())
        call = asyncio.create_task(client.call(lease, Exec(command="hang")))
        await until(lambda: running.host.ran["hang"])
        await client.close()
        with pytest.raises((OutcomeUnknown, SlotLost)):
            await call
        await until(lambda: not [t for t in asyncio.all_tasks() - before if "Stream" in repr(t) or "stream" in repr(t)])


async def test_cut_answer_is_asked_again():
    async with serving() as running, proxied(running.server.port, strikes=b"POST ") as proxy:
        proxy.next_fault = Fault(down=0, jitter_s=0.2)  # after longer than reconnecting may take
        async with SandboxClient(proxy.url, TOKEN, client_id="tester", reconnect_s=0.05) as client:
            lease = await client.acquire(request())
            assert (await client.call(lease, Exec(command="echo on"))).output == b"on"
            assert (proxy.struck, running.core.state.table.free) == (1, 3)


async def test_unreachable_host_is_named(monkeypatch):
    monkeypatch.setattr("atropos.slots.client.server_requests.CONNECT_S", 0.1)
    with socket.socket() as listener, contextlib.ExitStack() as others:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # more than wait for `accept`
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        requests = ServerRequests(
            f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, certificate=None, patience_s=10
        )
        requests.open()
        with pytest.raises(BackendUnavailable, match="can't be reached"):
            await requests.ask("DELETE", "/v1/snapshots/x", None)
        await requests.close_sessions()


async def test_full_stream_comes_back(monkeypatch):
    monkeypatch.setattr("atropos.slots.client.server_requests.MAX_REQUESTS", 3)
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        asked, answer = 0, asyncio.Event()

        async def slowly(_):
            nonlocal asked
            asked += 1
            await answer.wait()
            raise PoolFull("none")

        monkeypatch.setattr(running.core.leasing, "acquire", slowly)
        waiting = [asyncio.create_task(client.acquire(request())) for _ in range(3)]
        await until(lambda: asked == 3)
        for stream in list(running.core.state.streams):
            stream.abort("cut")
        result = await asyncio.wait_for(client.call(lease, Exec(command="echo on")), 20 * SLOWNESS)
        assert result.output == b"on"
        answer.set()
        await asyncio.wait(waiting)
        assert all(isinstance(task.exception(), PoolFull) for task in waiting)


@pytest.mark.parametrize("cuts", [1, 9])
async def test_broken_copy_begins_again(monkeypatch, cuts):
    """What was copied is there, only the answer is lost."""
    tries = 0

    async def once(self, path, to, query, kind):
        nonlocal tries
        tries += 1
        snapshot_id = path.split("/")[3]
        there = target.core.state.snapshots
        if snapshot_id not in there.by_id:
            there.reserve(snapshot_id, ())
            there.commit(snapshot_id, target.host.add_layer({"x": b"1"}), (), query["client_id"], None, 0)
        if tries <= cuts:
            raise aiohttp.ServerDisconnectedError
        return there.by_id[snapshot_id].info.model_dump_json().encode()

    monkeypatch.setattr(ServerRequests, "pipe", once)
    async with serving() as source, serving() as target, client_of(source) as here, client_of(target) as there:
        info = await here.snapshot(await here.acquire(request()))
        if cuts == 1:
            assert (await here.copy_snapshot(info.snapshot_id, there)).snapshot_id == info.snapshot_id
            assert tries == 2
        else:
            with pytest.raises(BackendUnavailable, match="could not be copied"):
                await here.copy_snapshot(info.snapshot_id, there)
            await until(lambda: not target.host.layers)


async def test_broken_image_is_a_fault():
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server, serving() as running:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        giver = ServerRequests(url, TOKEN, certificate=None, patience_s=1)
        giver.open()
        image = ImageInfo(id="0" * 64, source=f"atropos-build:{'0' * 64}", bytes=1_000_000)
        try:
            async with client_of(running) as taker:
                with pytest.raises(BackendUnavailable, match="the image could not be copied to"):
                    await ServerImages(giver).copy(image, taker.images)
        finally:
            await giver.close_sessions()


async def test_nonsense_in_copy_is_fault(monkeypatch):
    async def nonsense(self, path, to, query, kind):
        return b"<html>"

    monkeypatch.setattr(ServerRequests, "pipe", nonsense)
    image = ImageInfo(id="0" * 64, source=f"atropos-build:{'0' * 64}", bytes=1)
    async with serving() as running, client_of(running) as client:
        info = await client.snapshot(await client.acquire(request()))
        for copying in (client.copy_snapshot(info.snapshot_id, client), client.images.copy(image, client.images)):
            with pytest.raises(BackendUnavailable, match="sent an invalid answer"):
                await copying


async def test_snapshot_waits_for_calls(monkeypatch):
    monkeypatch.setattr("atropos.slots.client.server_requests.REQUEST_S", 1.0)  # in which a busy machine connects
    async with serving() as running, client_of(running) as client:
        lease = await client.acquire(request())
        before = asyncio.create_task(client.call(lease, Exec(command="sleep 1.5")))
        await until(lambda: running.host.ran["sleep 1.5"])
        info = await client.snapshot(lease)
        assert before.done()
        assert list(running.core.state.snapshots.by_id) == [info.snapshot_id]
