"""The routes, as people with curl see them."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import tarfile
import time

import aiohttp
import pytest

from atropos.resources import NOTHING
from atropos.wire import (
    Capabilities,
    CommandResult,
    Exec,
    Feature,
    Health,
    Hello,
    Lease,
    Problem,
    ReleaseResult,
    Reply,
    SnapshotInfo,
    Status,
    client_name,
)
from tests import privileges
from tests.processes import descendants
from tests.unit.server.fakes import TOKEN, FakeHost, Running, serving
from tests.waiting import SLOWNESS, until

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ECHO = {"operation": {"op": "exec", "command": "echo hi"}}


class Curl:
    def __init__(self, running: Running, session: aiohttp.ClientSession) -> None:
        self.url, self.session = running.url, session

    async def __call__(self, method: str, path: str, body: object = None, **options) -> tuple[int, bytes]:
        data = options.pop("data", None if body is None else json.dumps(body))
        async with self.session.request(
            method, self.url + path, data=data, headers=options.pop("headers", HEADERS), **options
        ) as response:
            return response.status, await response.read()

    async def lease(self, name: str = "lease-0001") -> Lease:
        status, raw = await self("POST", "/v1/leases", {"lease_id": name, "client_id": "curl"})
        assert status == 200, raw
        return Lease.model_validate_json(raw)


@pytest.fixture
async def server():
    async with serving() as running:
        yield running


@pytest.fixture
async def curl(server):
    async with aiohttp.ClientSession() as session:
        yield Curl(server, session)


ROUTES = [
    ("GET", "/v1/capabilities"),
    ("GET", "/v1/status"),
    ("GET", "/metrics"),
    ("POST", "/v1/leases"),
    ("POST", "/v1/leases/lease-0001/renew"),
    ("DELETE", "/v1/leases/lease-0001"),
    ("POST", "/v1/leases/lease-0001/calls"),
    ("POST", "/v1/leases/lease-0001/snapshot"),
    ("GET", "/v1/snapshots/x"),
    ("DELETE", "/v1/snapshots/x"),
    ("POST", "/v1/drain"),
    ("GET", "/v1/stream"),
    ("GET", "/anything/else"),
]


@pytest.mark.parametrize(
    "given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer \xff"}]
)
async def test_no_token_no_answer(server, curl, given):
    await curl.lease()
    for method, path in ROUTES:
        status, raw = await curl(method, path, {} if method == "POST" else None, headers=given)
        assert (status, Problem.model_validate_json(raw).code) == (401, "unauthorized")
    assert server.core.state.table.free == 3
    assert not server.core.state.table.draining
    status, raw = await curl("GET", "/v1/health", headers={})
    assert (status, Health.model_validate_json(raw).status) == (200, "ok")


async def test_a_whole_life_by_hand(server, curl):
    lease = await curl.lease()
    status, raw = await curl("POST", f"/v1/leases/{lease.lease_id}/calls", ECHO)
    reply = Reply.model_validate_json(raw)
    assert isinstance(reply.result, CommandResult)
    assert (status, reply.result.output) == (200, b"hi")
    status, raw = await curl("POST", f"/v1/leases/{lease.lease_id}/renew?epoch={lease.epoch}")
    assert Lease.model_validate_json(raw) == lease
    status, raw = await curl("POST", f"/v1/leases/{lease.lease_id}/snapshot")
    info = SnapshotInfo.model_validate_json(raw)
    status, raw = await curl("GET", f"/v1/snapshots/{info.snapshot_id}")
    assert SnapshotInfo.model_validate_json(raw) == info
    assert (await curl("DELETE", f"/v1/snapshots/{info.snapshot_id}"))[0] == 204
    assert (await curl("GET", f"/v1/snapshots/{info.snapshot_id}"))[0] == 404
    for _ in range(2):
        status, raw = await curl("DELETE", f"/v1/leases/{lease.lease_id}?epoch={lease.epoch}")
        assert ReleaseResult.model_validate_json(raw).released
    status, raw = await curl("POST", f"/v1/leases/{lease.lease_id}/calls", ECHO)
    assert (status, Problem.model_validate_json(raw).code) == (410, "lease_expired")


async def test_a_call_id_runs_once(server, curl):
    lease = await curl.lease()
    body = {"call_id": "mine", "operation": {"op": "exec", "command": "count a"}}
    answers = await asyncio.gather(*(curl("POST", f"/v1/leases/{lease.lease_id}/calls", body) for _ in range(5)))
    assert len({raw for _, raw in answers}) == 1
    assert server.host.ran["count a"] == 1


async def test_an_older_epoch_is_refused(server, curl):
    lease = await curl.lease()
    body = {**ECHO, "epoch": lease.epoch - 1}
    status, raw = await curl("POST", f"/v1/leases/{lease.lease_id}/calls", body)
    assert (status, Problem.model_validate_json(raw).code) == (410, "lease_expired")
    status, raw = await curl("DELETE", f"/v1/leases/{lease.lease_id}?epoch={lease.epoch - 1}")
    assert not ReleaseResult.model_validate_json(raw).released
    assert server.core.state.table.free == 3


async def test_a_full_server_answers_409(server, curl):
    for number in range(4):
        await curl.lease(f"lease-000{number}")
    status, raw = await curl("POST", "/v1/leases", {"lease_id": "lease-more", "client_id": "curl"})
    problem = Problem.model_validate_json(raw)
    assert (status, problem.code, problem.room) == (409, "full", NOTHING)


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "says"),
    [
        ("POST", "/v1/leases", "{", 400, "Invalid JSON"),
        ("POST", "/v1/leases", "[]", 400, "object"),
        ("POST", "/v1/leases", '{"lease_id": "x", "client_id": "c"}', 400, "lease_id"),
        ("POST", "/v1/leases", '{"lease_id": "../../../etc", "client_id": "c"}', 400, "lease_id"),
        ("POST", "/v1/leases", '{"lease_id": "lease-0001", "client_id": "c", "ttl_s": -1}', 400, "ttl_s"),
        ("POST", "/v1/leases", '{"lease_id": "lease-0001", "client_id": "c", "mine": 1}', 400, "mine"),
        ("POST", "/v1/leases", "x" * 70_000, 413, ""),
        ("POST", "/v1/leases/lease-0001/calls", '{"operation": {"op": "format"}}', 400, "operation"),
        ("POST", "/v1/leases/lease-0001/calls", json.dumps({"call_id": "x" * 201, **ECHO}), 400, "call_id"),
        ("DELETE", "/v1/leases/lease-0001?epoch=one", None, 400, "epoch"),
        ("PUT", "/v1/leases", None, 405, ""),
        ("GET", "/nowhere", None, 404, ""),
        ("GET", "/v1/stream", None, 426, "WebSocket"),
        ("POST", "/v1/drain", '{"deadline_s": -1}', 400, "deadline_s"),
    ],
)
async def test_bad_input_is_one_problem(curl, method, path, data, status, says):
    got, raw = await curl(method, path, data=data)
    problem = Problem.model_validate_json(raw)
    assert got == status
    assert says in problem.message
    assert "\n" not in problem.message


async def test_counts_fit_together(server, curl):
    lease = await curl.lease()
    status = Status.model_validate_json((await curl("GET", "/v1/status"))[1])
    assert (status.slots, status.free, status.leased, status.retired) == (4, 3, 1, 0)
    assert (status.leases[0].slot, status.leases[0].client) == (lease.slot, client_name("curl"))
    assert status.counters["leases_granted"] == 1
    text = (await curl("GET", "/metrics"))[1].decode()
    assert 'atropos_slots{state="free"} 3' in text
    assert "atropos_leases_granted_total 1" in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.split()) == 2
    found = Capabilities.model_validate_json((await curl("GET", "/v1/capabilities"))[1])
    assert (found.isolated, found.stateful, found.boot_id) == (True, True, status.boot_id)


async def test_leased_gpus_are_counted():
    async with serving(gpus=3, gpu_type='a "T"') as running, aiohttp.ClientSession() as session:
        curl = Curl(running, session)
        for name in ("one", "two"):
            body = {"lease_id": f"lease-{name}", "client_id": "curl", "limits": {"gpus": 1}}
            assert (await curl("POST", "/v1/leases", body))[0] == 200
        text = (await curl("GET", "/metrics"))[1].decode()
        assert 'atropos_gpus_leased{type="a \\"T\\""} 2\n' in text


async def test_token_opens_no_lease(server, curl):
    """What the server shows names neither a lease nor a client: with both unguessable, only the holder can use them."""
    lease_id, client_id = secrets.token_hex(16), secrets.token_hex(16)
    await curl("POST", "/v1/leases", {"lease_id": lease_id, "client_id": client_id, "trajectory_id": "t"})
    async with curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as owner:
        await owner.send_str(f"[{Hello(client_id=client_id).model_dump_json()}]")
        assert (await frames(owner))[0]["kind"] == "welcome"
        snapshot = (await curl("POST", f"/v1/leases/{lease_id}/snapshot"))[1]
        shown = [(await curl("GET", path))[1] for path in ("/v1/status", "/metrics", "/v1/capabilities", "/v1/health")]
        for text in (*shown, snapshot):
            assert lease_id.encode() not in text
            assert client_id.encode() not in text
        for name in json.loads(shown[0])["connected"]:  # what is shown doesn't shut the client out
            async with curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as other:
                await other.send_str(f"[{Hello(client_id=name, connection=2**62, holds=()).model_dump_json()}]")
                await frames(other)
        await owner.send_str('[{"kind": "heartbeat", "seq": 7}]')
        assert (await frames(owner))[0]["seq"] == 7
    assert (await curl("POST", f"/v1/leases/{lease_id}/calls", ECHO))[0] == 200


async def test_a_missing_limit_is_named():
    host = FakeHost()
    host.features = [Feature(name="memory_limit", ok=False, required=False, detail="no memory controller")]
    async with serving(host) as running, aiohttp.ClientSession() as session:
        curl = Curl(running, session)
        found = Capabilities.model_validate_json((await curl("GET", "/v1/capabilities"))[1])
        assert (found.isolated, found.stateful) == (False, True)
        assert (await curl.lease()).limit_note == "memory_limit: no memory controller"


async def test_drain_waits_for_the_last():
    async with serving(drain_s=60) as running, aiohttp.ClientSession() as session:
        curl = Curl(running, session)
        lease = await curl.lease()
        status, raw = await curl("POST", "/v1/drain")
        assert Status.model_validate_json(raw).draining
        status, raw = await curl("POST", "/v1/leases", {"lease_id": "lease-more", "client_id": "curl"})
        assert (status, Problem.model_validate_json(raw).code) == (503, "backend_unavailable")
        assert Health.model_validate_json((await curl("GET", "/v1/health"))[1]).status == "draining"
        assert (await curl("POST", f"/v1/leases/{lease.lease_id}/calls", ECHO))[0] == 200
        assert not running.task.done()
        await curl("DELETE", f"/v1/leases/{lease.lease_id}")
        assert await asyncio.wait_for(running.task, 10) == 0


async def test_later_drain_own_time():
    async with serving(drain_s=3600) as running, aiohttp.ClientSession() as session:
        curl = Curl(running, session)
        await curl.lease()
        await curl("POST", "/v1/drain", {"deadline_s": 3000})
        await asyncio.sleep(1)  # of which the second one's second must lose nothing
        began = time.monotonic()
        await curl("POST", "/v1/drain", {"deadline_s": 1})
        assert await asyncio.wait_for(running.task, 10 * SLOWNESS) == 0
        assert time.monotonic() - began >= 1


def archive(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    return out.getvalue()


@privileges.owners
async def test_sent_snapshot_is_leased(server, curl):
    path = "/v1/snapshots/snap-sent/archive"
    status, raw = await curl("PUT", path + "?layers=1", data=archive("0/a", "0/b"))
    info = SnapshotInfo.model_validate_json(raw)
    assert (status, info.snapshot_id, info.layers, info.bytes) == (200, "snap-sent", 1, 6)
    assert (await curl("PUT", path + "?layers=1", data=b"ignored"))[0] == 200
    body = {"lease_id": "lease-fork", "client_id": "curl", "snapshot": "snap-sent"}
    assert (await curl("POST", "/v1/leases", body))[0] == 200
    assert server.core.state.runs["lease-fork"].sandbox.files == {"a": b"abc", "b": b"abc"}


@privileges.owners
@pytest.mark.parametrize(
    ("query", "data", "status", "says"),
    [
        ("?layers=1", archive("0/../evil"), 400, "a name that is not a layer"),
        ("?layers=1", archive("1/other"), 400, "a name that is not a layer"),
        ("?layers=1", b"no archive at all", 400, "could not be imported"),
        ("?layers=1", archive("0/a")[:600], 400, "could not be imported"),
        ("?layers=0", b"", 422, "layers: 0"),
        ("?layers=17", b"", 422, "layers: 17"),
        ("?layers=many", b"", 400, "layers"),
        ("?layers=1&base=other", b"", 422, "base 'other'"),
    ],
)
async def test_bad_archive_is_tidy(server, curl, query, data, status, says):
    got, raw = await curl("PUT", "/v1/snapshots/snap-sent/archive" + query, data=data)
    problem = Problem.model_validate_json(raw)
    assert (got, says in problem.message) == (status, True), problem
    assert (server.core.state.snapshots.by_id, server.core.state.snapshots.pending) == ({}, set())
    await until(lambda: not server.host.layers, "no layer")


async def test_gone_sender_is_tidy(server, curl):
    async def half():
        yield archive("0/a")[:512]
        await asyncio.sleep(3600)

    sending = asyncio.create_task(curl("PUT", "/v1/snapshots/snap-sent/archive?layers=2", data=half()))
    await until(lambda: server.core.transfer._arriving, "the transfer")
    sending.cancel()
    await asyncio.wait([sending])
    left = lambda: server.core.transfer._arriving or server.core.state.snapshots.pending or server.host.layers  # noqa: E731
    await until(lambda: not left(), "nothing left")


@privileges.owners
async def test_two_archives_are_unpacked_at_once(server, curl):
    lease = await curl.lease()
    whole, go_on, most = archive("0/a"), asyncio.Event(), 0
    paths = [f"/v1/snapshots/snap-{n}/archive?layers=1" for n in range(8)]
    sending = [asyncio.create_task(curl("PUT", path, data=in_two(whole, go_on))) for path in paths]
    try:
        await until(
            lambda: len(server.core.transfer._arriving) == 8 and unpacking() >= 2,
            "eight transfers, two of them unpacked",
        )
        for _ in range(20):
            assert (await curl("POST", f"/v1/leases/{lease.lease_id}/calls", ECHO))[0] == 200
            most = max(most, unpacking())
            await asyncio.sleep(0.02)
        assert most <= 2
    finally:
        go_on.set()
        answers = await asyncio.gather(*sending)
    assert [status for status, _ in answers] == [200] * 8


async def in_two(data, go_on):
    yield data[:512]
    await go_on.wait()
    yield data[512:]


def unpacking() -> int:
    """Programs that unpack a snapshot for us."""
    return sum("snapshot_tar" in command for command in descendants().values())


@privileges.owners
async def test_a_repeated_archive_waits(server, curl):
    path, whole = "/v1/snapshots/snap-sent/archive?layers=1", archive("0/a")
    go_on = asyncio.Event()
    for breaks in (True, False):
        go_on.clear()
        first = asyncio.create_task(curl("PUT", path, data=in_two(whole, go_on)))
        await until(lambda: server.core.transfer._arriving, "the transfer")
        again = asyncio.create_task(curl("PUT", path, data=whole))
        await asyncio.sleep(0.05)
        assert not again.done()
        if breaks:
            first.cancel()
        go_on.set()
        assert (await again)[0] == 200
        assert breaks or (await first)[0] == 200
        assert len(server.host.layers) == len(server.core.state.snapshots.by_id) == 1
        server.core.layers.drop_snapshot("snap-sent")
        await until(lambda: not server.host.layers, "no layer")


async def frames(socket: aiohttp.ClientWebSocketResponse) -> list[dict]:
    message = await asyncio.wait_for(socket.receive(), 20 * SLOWNESS)
    return json.loads(message.data) if message.type == aiohttp.WSMsgType.TEXT else []


def hello(**fields) -> str:
    return f"[{Hello(client_id='ws', **fields).model_dump_json()}]"


@pytest.mark.parametrize(
    "first",
    [
        "not json",
        "{}",
        "[]",
        '[{"kind": "heartbeat"}]',
        '[{"kind": "hello", "client_id": "x", "version": 99}]',
        '[{"kind": "hello", "client_id": ""}]',
        '[{"kind": "hello", "client_id": "x", "more": 1}]',
        "[" * 100_000,
    ],
)
async def test_no_hello_is_closed(server, curl, first):
    async with curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as socket:
        await socket.send_str(first)
        assert await frames(socket) == []
        assert socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
    await until(lambda: not server.core.state.streams, "the end of the stream")


async def test_bad_frame_costs_no_lease(server, curl):
    lease = await curl.lease()
    async with curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as socket:
        await socket.send_str(hello())
        assert (await frames(socket))[0]["kind"] == "welcome"
        await socket.send_str('[{"kind": "call", "call_id": "x"}]')
        assert await frames(socket) == []
    assert (await curl("POST", f"/v1/leases/{lease.lease_id}/calls", ECHO))[0] == 200


async def test_newest_connection_stays(server, curl):
    async with (
        curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as first,
        curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as second,
        curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as late,
    ):
        await first.send_str(hello(connection=1))
        await frames(first)
        await second.send_str(hello(connection=2))
        assert (await frames(second))[0]["kind"] == "welcome"
        assert await frames(first) == []
        await late.send_str(hello(connection=1))
        assert await frames(late) == []
        await second.send_str('[{"kind": "heartbeat", "seq": 7}]')
        assert (await frames(second))[0]["seq"] == 7


async def test_others_leases_are_refused(server, curl):
    lease = await curl.lease()
    async with curl.session.ws_connect(curl.url + "/v1/stream", headers=HEADERS) as socket:
        await socket.send_str(hello())
        await frames(socket)
        call = {"kind": "call", "call_id": "c", "lease_id": lease.lease_id, "epoch": lease.epoch}
        await socket.send_str(json.dumps([{**call, "operation": Exec(command="echo").model_dump()}]))
        answer = (await frames(socket))[0]
        assert (answer["kind"], answer["code"]) == ("fault", "lease_expired")
    assert not server.host.ran


async def test_a_silent_stream_is_cut(curl):
    async with (
        serving(heartbeat_s=0.1) as running,
        curl.session.ws_connect(running.url + "/v1/stream", headers=HEADERS) as socket,
    ):
        await socket.send_str(hello())
        await frames(socket)
        assert await frames(socket) == []
        assert socket.close_code is not None
