"""What holds a client's calls up, as its peers on the wire see it: it ends, and the dead are not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from atropos.wire import Exec, Heartbeat, Hello, Lease, LeaseRequest, Operation, Problem, WriteFile
from tests.unit.server.fakes import TOKEN, Running, serving
from tests.waiting import SLOWNESS, until

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LARGE = "echo " + "x" * 5000
ids = itertools.count()


class Peer:
    """A client by hand: it acknowledges nothing by itself."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, came: list[dict]) -> None:
        self.socket, self.came = socket, came

    async def send(self, *messages: dict) -> None:
        await self.socket.send_str(json.dumps(messages))

    async def call(self, lease: Lease, call_id: str, operation: Operation, **more) -> None:
        named = {"call_id": call_id, "lease_id": lease.lease_id, "epoch": lease.epoch, **more}
        await self.send({"kind": "call", **named, "operation": operation.model_dump(mode="json")})

    async def answer(self, call_id: str) -> dict:
        async with asyncio.timeout(20 * SLOWNESS):
            while True:
                for message in self.came:
                    if message.get("call_id") == call_id:
                        return message
                self.came = json.loads((await self.socket.receive()).data)

    def die(self) -> None:
        self.socket.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


@contextlib.asynccontextmanager
async def peer(running: Running, holds: tuple[Lease, ...] | None = None) -> AsyncIterator[Peer]:
    held = None if holds is None else [lease.lease_id for lease in holds]
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.ws_connect(running.url + "/v1/stream", max_msg_size=0) as socket,
    ):
        hello = Hello(client_id="peer", connection=next(ids), holds=held)
        await socket.send_str(f"[{hello.model_dump_json()}]")
        welcome, *came = json.loads((await socket.receive()).data)
        assert welcome["kind"] == "welcome"
        yield Peer(socket, came)


async def leased(running: Running, **fields) -> Lease:
    return await running.core.leasing.acquire(
        LeaseRequest(lease_id=f"lease-{next(ids):05}", client_id="peer", **fields)
    )


@pytest.fixture
async def running(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.calls.journal.GATE_BYTES", 4000)
    async with serving() as running:
        yield running


async def test_given_up_makes_room(running):
    """Given up while the connection was away: the cancel is all that ever comes of it."""
    lease, other = await leased(running), await leased(running)
    async with peer(running) as first:
        await first.call(lease, "large", Exec(command=LARGE))
        await first.answer("large")
        await first.call(other, "waits", Exec(command="echo on"))
        await until(lambda: running.core.state.runs[other.lease_id].lanes.queued)
        assert running.core.state.clients.of("peer").journal.congested
    async with peer(running) as second:
        await second.send({"kind": "cancel", "call_id": "large"})
        await second.call(other, "waits", Exec(command="echo on"), resent=True)
        assert (await second.answer("waits"))["kind"] == "reply"


async def test_old_answers_are_passed(running):
    """A pool that lost its connection for good and comes back knows nothing of the old one's calls."""
    lease = await leased(running)
    async with peer(running) as old:
        await old.call(lease, "large", Exec(command=LARGE))
        await old.answer("large")
    async with peer(running, holds=()) as new:
        lease = await leased(running)
        await new.call(lease, "first", Exec(command="echo on"))
        assert (await new.answer("first"))["kind"] == "reply"
        assert running.core.state.clients.of("peer").journal.bytes < 1000


async def test_calls_of_lost_leases_are_answered(running):
    lease = await leased(running)
    async with peer(running) as old:
        await old.call(lease, "ran", Exec(command="count a"))
        await until(lambda: running.host.ran["count a"])
    async with peer(running, holds=()) as new:
        assert (await new.answer("ran"))["code"] == "outcome_unknown"


class Curl:
    def __init__(self, running: Running, session: aiohttp.ClientSession) -> None:
        self.url, self.session = running.url, session

    async def __call__(self, lease: Lease, call_id: str | None, command: str) -> tuple[int, dict]:
        body = {"call_id": call_id, "operation": {"op": "exec", "command": command}}
        async with (
            asyncio.timeout(20 * SLOWNESS),
            self.session.post(f"{self.url}/v1/leases/{lease.lease_id}/calls", data=json.dumps(body)) as response,
        ):
            return response.status, await response.json()


async def test_own_ids_keep_the_latest(running, monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.calls.journal.KEPT_BYTES", 3000)
    lease = await leased(running)
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        curl = Curl(running, session)
        for number in range(20):
            assert (await curl(lease, f"mine-{number}", f"echo {number}" + "x" * 1000))[0] == 200
        assert (await curl(lease, "too-large-to-keep", LARGE))[0] == 200
        assert (await curl(lease, None, LARGE))[0] == 200
        first = await curl(lease, "mine-20", "count 20")
        assert first[0] == 200
        assert await curl(lease, "mine-20", "count 20") == first
        assert running.host.ran["count 20"] == 1
        status, problem = await curl(lease, "mine-0", "echo 0")
        assert (status, Problem.model_validate(problem).code) == (500, "outcome_unknown")


async def test_answer_outlives_its_lease(running):
    lease = await leased(running)
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        curl = Curl(running, session)
        first = await curl(lease, "mine", "count a")
        await running.core.leasing.release(lease.lease_id, None)
        assert await curl(lease, "mine", "count a") == first
        status, problem = await curl(lease, "other", "count a")
        assert (status, Problem.model_validate(problem).code) == (410, "lease_expired")
    assert running.host.ran["count a"] == 1


async def test_dead_flooder_loses_all(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.http.stream.MAX_QUEUED_BYTES", 100_000)
    async with serving(heartbeat_s=0.5, slots=1) as running, peer(running) as client:
        stream = running.core.state.clients.of("peer").connection
        lease = await leased(running, ttl_s=0.4)
        await client.call(lease, "hang", Exec(command="hang"))
        for number in range(3):
            await client.call(lease, f"write-{number}", WriteFile(path="x", data=bytes(80_000)))
        await until(lambda: stream.paused or stream not in running.core.state.streams)
        client.die()
        await until(lambda: running.core.state.table.free == 1 and not running.core.state.streams, "its end")


async def test_a_client_must_read(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.http.stream.MAX_WAITING", 1000)
    async with serving(heartbeat_s=0.3) as running, peer(running) as client:
        stream = running.core.state.clients.of("peer").connection
        beats = [{"kind": "heartbeat", "seq": 10**1000 + n} for n in range(500)]

        async def send_without_end() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await client.send(*beats)

        sending = asyncio.create_task(send_without_end())
        # it is cut a moment later, and is not paused any more then
        await until(lambda: stream.paused or stream not in running.core.state.streams)
        assert sum(isinstance(each, Heartbeat) for each in gc.get_objects()) <= 1500
        await until(lambda: not running.core.state.streams)
        await sending


async def test_sleep_prolongs_no_dead(running):
    core = running.core
    lease = await leased(running, ttl_s=10)
    held = core.state.table.held[lease.lease_id]
    core.state.forgive(-1000)  # the clock steps on
    # it was stopped, and what waited in its sockets is read before it notices
    core.state.table.seen("peer", core.state.now())
    core.state.forgive(1000)
    assert core.state.table.expires_at(held) - core.state.now() <= 10


async def test_dropped_is_exported(running, monkeypatch):
    lease = await leased(running)
    info = await running.core.workspaces.snapshot(lease.lease_id, None, None)
    await running.core.leasing.release(lease.lease_id, None)
    begin = asyncio.create_subprocess_exec

    async def slowly(*arguments, **options):
        running.core.layers.drop_snapshot(info.snapshot_id)
        await asyncio.sleep(0.02)
        assert running.host.layers, "it was dropped under its reader"
        return await begin(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    snapshot = running.core.state.snapshots.by_id[info.snapshot_id]
    async with running.core.transfer.exported(snapshot, compress=False):
        pass
    await until(lambda: not running.host.layers)
    assert running.core.state.counters["layers_leaked"] == 0
