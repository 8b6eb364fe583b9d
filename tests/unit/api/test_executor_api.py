"""The executor API's promises about trajectories and calls, over an executor that can be held and broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import SecretStr, ValidationError

from atropos.api import gate
from atropos.api.executor.models import CallBody, ExecutorServerSettings, OpenTrajectory
from atropos.api.executor.trajectories import Trajectories
from atropos.api.executor_api import create_executor_app, drain
from atropos.api.tenants import Tenant
from atropos.errors import (
    AcquireTimeout,
    BackendUnavailable,
    OutcomeUnknown,
    SandboxError,
    SlotLost,
    ToolServerUnavailable,
)
from atropos.slots import Share
from atropos.tools import ToolExecutor
from atropos.tools.models import ToolCall, ToolResult
from atropos.tools.registry import build_tool_registry
from tests.unit.api.account import own_account
from tests.unit.tools.fakes import FakePool
from tests.waiting import until


class HeldExecutor:
    """Stands in for a ToolExecutor with `slots` slots."""

    def __init__(self, slots: int = 4) -> None:
        self.free = slots
        self.asked = self.taken = 0
        self.leased: set[str] = set()
        self.ran: list[Any] = []
        self.hold = asyncio.Event()
        self.held = 0
        self.error: Exception | None = None
        self.changed = asyncio.Condition()
        self.tools = build_tool_registry()
        self.pool: Any = SimpleNamespace(share=Share(), config=SimpleNamespace(bases={}))

    async def slot(self, trajectory_id: str, **_: Any) -> object:
        self.asked += 1
        async with self.changed:
            await self.changed.wait_for(lambda: self.free > 0 or self.error is not None)
            if self.error is not None:
                raise self.error
            self.free -= 1
            self.taken += 1
            self.leased.add(trajectory_id)
        return object()

    async def change(self, *, free: int = 0, error: Exception | None = None) -> None:
        """For those that wait for a slot."""
        async with self.changed:
            self.free, self.error = free, error
            self.changed.notify_all()

    def broken(self, trajectory_id: str) -> None:
        return None

    async def execute(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        if trajectory_id not in self.leased:
            await self.slot(trajectory_id)
        if self.error is not None:
            raise self.error
        if call.name == "hang":
            self.held += 1
            await self.hold.wait()
        self.ran.append(call.arguments)
        if call.name == "picture":
            return ToolResult(success=True, output="a picture", data={"base64": "x" * 500_000})
        return ToolResult(success=True, output=f"ran {call.name}")

    async def release_trajectory(self, trajectory_id: str, reset_workspace: bool = True) -> None:
        async with self.changed:
            if trajectory_id in self.leased:
                self.leased.discard(trajectory_id)
                self.free += 1
                self.changed.notify_all()


@contextlib.asynccontextmanager
async def serving(executor: Any, **settings: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    app = create_executor_app(ExecutorServerSettings(token=SecretStr("x"), **settings), executor=executor)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"Authorization": "Bearer x"}
        ) as client:
            client.app = app  # type: ignore[attr-defined]
            yield client


def tenant(client: httpx.AsyncClient) -> Tenant:
    """The only one of a client's server."""
    (only,) = client.app.state.tenants.all()  # type: ignore[attr-defined]
    return only


@contextlib.asynccontextmanager
async def api(executor: HeldExecutor, **settings: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with serving(executor, **settings) as client:
        yield client
        executor.hold.set()
    assert executor.leased == set(), "a lease outlived the server"


@pytest.fixture
def executor() -> HeldExecutor:
    return HeldExecutor()


CALL = {"name": "terminal", "arguments": {"command": "true"}, "id": "c1"}


async def test_one_client_for_all_hosts(executor: HeldExecutor):
    app = create_executor_app(ExecutorServerSettings(token=SecretStr("x"), e2b_domain="x.test"), executor=executor)
    async with app.router.lifespan_context(app):
        http = app.state.hosts.http
        assert app.state.hosts.http is http
    assert http.closed


async def test_open_call_end(executor: HeldExecutor):
    async with api(executor) as client:
        opened = await client.post("/trajectories", json={})
        assert opened.status_code == 201
        path = opened.headers["Location"]
        answer = (await client.post(f"{path}/calls", json=CALL)).json()
        assert (answer["state"], answer["result"]["output"]) == ("done", "ran terminal")
        assert (await client.get(path)).json()["calls"] == 1
        assert (await client.delete(path)).json() == {"ended": True}
        assert (await client.delete(path)).json() == {"ended": False}
        assert (await client.get(path)).status_code == 404
        assert (await client.post(f"{path}/calls", json=CALL)).status_code == 404
        assert executor.free == 4


async def test_opening_again_is_idempotent(executor: HeldExecutor):
    async with api(executor) as client:
        first = await client.post("/trajectories", json={"trajectory_id": "mine"})
        again = await client.post("/trajectories", json={"trajectory_id": "mine"})
        assert (first.status_code, again.status_code) == (201, 200)
        assert len(executor.leased) == 1


async def test_when_full_it_says_so(executor: HeldExecutor):
    async with api(executor, acquire_s=0.05) as client:
        answers = await asyncio.gather(*(client.post("/trajectories", json={}) for _ in range(7)))
        assert sorted(answer.status_code for answer in answers) == [201] * 4 + [429] * 3
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["code"] == "acquire_timeout"
        assert int(refused.headers["Retry-After"]) >= 1
        assert len((await client.get("/trajectories")).json()["trajectories"]) == 4
        opened = next(answer for answer in answers if answer.status_code == 201)
        await client.delete(opened.headers["Location"])
        assert (await client.post("/trajectories", json={})).status_code == 201


async def test_calls_sent_again_run_once(executor: HeldExecutor):
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"
        anonymous = {"name": "terminal", "arguments": {"command": "true"}}
        for _ in range(3):
            answer = await client.post(path, json=anonymous, headers={"Idempotency-Key": "k1"})
            assert answer.json()["call_id"] == "k1"
        assert len(executor.ran) == 1
        other = await client.post(path, json={**anonymous, "arguments": {}}, headers={"Idempotency-Key": "k1"})
        assert (other.status_code, other.json()["code"]) == (409, "call_id_reused")
        both = await client.post(path, json=CALL, headers={"Idempotency-Key": "k2"})
        assert (both.status_code, both.json()["code"]) == (409, "ids_differ")


async def test_a_lost_client_gets_its_result(executor: HeldExecutor):
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"
        lost = asyncio.create_task(client.post(path, json={"name": "hang", "id": "h"}))
        await until(lambda: executor.held)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert (await client.get(f"{path}/h")).status_code == 202
        executor.hold.set()
        assert (await client.post(path, json={"name": "hang", "id": "h"})).json()["result"]["output"] == "ran hang"
        assert (await client.get(f"{path}/h")).json()["state"] == "done"
        assert len(executor.ran) == 1


async def test_a_long_call_answers_events(executor: HeldExecutor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.api.executor_api.WAITING_S", 0.01)
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def seen(message: Any) -> None:
                await send(message)
                if b"event: waiting" in message.get("body", b""):
                    executor.hold.set()

            await client.app(scope, receive, seen)  # type: ignore[attr-defined]

        transport = httpx.ASGITransport(app=watched)
        headers = {"Authorization": "Bearer x", "Accept": "text/event-stream"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as patient:
            answer = await patient.post(path, json={"name": "hang", "id": "h"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
        names = [lines[0].removeprefix("event: ") for lines in events]
        assert names[0] == "accepted"
        assert "waiting" in names
        assert names[-1] == "result"
        assert json.loads(events[-1][1].removeprefix("data: "))["result"]["output"] == "ran hang"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (SlotLost("gone"), 410, "slot_lost"),
        (OutcomeUnknown("who knows"), 409, "outcome_unknown"),
        (BackendUnavailable("a stream broke"), 503, "backend_unavailable"),
    ],
)
async def test_a_lost_slot_breaks_the_trajectory(error: SandboxError, status: int, code: str):
    pool = FakePool()
    async with ToolExecutor(pool, build_tool_registry()) as executor, serving(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"]
        pool.slots[0].fault = error
        answer = await client.post(f"{path}/calls", json=CALL)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        pool.slots[0].fault = None
        other = await client.post(f"{path}/calls", json={**CALL, "id": "c2"})
        assert (other.status_code, other.json()["code"]) == (410, "slot_lost"), other.text
        assert "Retry-After" not in other.headers
        assert (await client.get(path)).json()["state"] == "broken"
        again = await client.post(f"{path}/calls", json=CALL, headers={"Accept": "text/event-stream"})
        expected = "outcome_unknown" if code == "outcome_unknown" else "slot_lost"
        assert f'"code":"{expected}"' in again.text


async def test_an_unrun_call_may_be_repeated(executor: HeldExecutor):
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"]
        executor.error = ToolServerUnavailable("it restarts")
        refused = await client.post(f"{path}/calls", json=CALL)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert (await client.get(f"{path}/calls/c1")).status_code == 503
        executor.error = None
        for _ in range(2):
            assert (await client.post(f"{path}/calls", json=CALL)).json()["result"]["success"] is True
        assert len(executor.ran) == 1


async def test_calls_fail_as_the_opening_did(executor: HeldExecutor):
    executor.free = 0
    async with api(executor) as client:
        opening = asyncio.create_task(client.post("/trajectories", json={"trajectory_id": "w"}))
        await until(lambda: executor.asked)
        calling = asyncio.create_task(client.post("/trajectories/w/calls", json=CALL))
        await until(lambda: tenant(client).trajectories.get("w").running)
        await executor.change(error=AcquireTimeout("no slot came free"))
        answers = await asyncio.gather(opening, calling)
        assert [(one.status_code, one.json()["code"]) for one in answers] == [(429, "acquire_timeout")] * 2
        assert executor.asked == 1


async def test_abandoned_trajectories_end(executor: HeldExecutor):
    async with api(executor) as client:
        for _ in range(3):
            await client.post("/trajectories", json={"ttl_s": 0.1})
        kept = (await client.post("/trajectories", json={"ttl_s": 60})).headers["Location"]
        await until(lambda: executor.free == 3)
        assert (await client.get(kept)).status_code == 200


async def test_running_calls_renew_trajectories(executor: HeldExecutor):
    executor.free = 0
    async with api(executor, ttl_s=0.1) as client:
        opening = asyncio.create_task(client.post("/trajectories", json={"trajectory_id": "w"}))
        await until(lambda: executor.asked)
        call = asyncio.create_task(client.post("/trajectories/w/calls", json={"name": "hang"}))
        await until(lambda: tenant(client).trajectories.get("w").running)
        await executor.change(free=2)
        assert (await opening).status_code == 201
        assert (await client.post("/trajectories", json={})).status_code == 201
        await until(lambda: executor.free == 1, "the end of the other, which has no call")
        executor.hold.set()
        assert (await call).status_code == 200


async def test_ends_interrupt_calls(executor: HeldExecutor):
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"]
        call = asyncio.create_task(client.post(f"{path}/calls", json={"name": "hang"}))
        await until(lambda: executor.held)
        await client.delete(path)
        answer = await call
        assert (answer.status_code, answer.json()["code"]) == (410, "lease_expired")


async def test_an_end_during_the_acquire(executor: HeldExecutor):
    executor.free = 0
    async with api(executor) as client:
        waiting = asyncio.create_task(client.post("/trajectories", json={"trajectory_id": "w"}))
        await until(lambda: executor.asked)
        assert (await client.delete("/trajectories/w")).json() == {"ended": True}
        assert (await waiting).status_code == 410
        await executor.change(free=1)
        assert (await client.post("/trajectories", json={"trajectory_id": "w"})).status_code == 201


@pytest.mark.parametrize("named", [False, True])
async def test_a_lost_opener_keeps_no_slot(executor: HeldExecutor, named: bool):
    executor.free = 0
    app = create_executor_app(ExecutorServerSettings(token=SecretStr("x")), executor=executor)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    where = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=where, headers={"Authorization": "Bearer x"}, timeout=60) as client:
        asking = asyncio.create_task(client.post("/trajectories", json={"trajectory_id": "mine"} if named else {}))
        await until(lambda: executor.asked)
        asking.cancel()
        await until(lambda: not server.server_state.connections, "the end of its connection")
        await executor.change(free=1)
        await until(lambda: executor.taken == 1)
        if named:
            again = await client.post("/trajectories", json={"trajectory_id": "mine"})
            assert (again.status_code, executor.taken) == (200, 1)
        else:
            await until(lambda: executor.free == 1)
            assert (await client.get("/trajectories")).json()["trajectories"] == []
    server.should_exit = True
    await running


async def test_an_end_answers_image_waiters(executor: HeldExecutor):
    class Pulling:
        started = asyncio.Event()
        share = Share()
        config = SimpleNamespace(bases=dict[str, str]())

        async def prepare(self, image: str, **_: Any) -> None:
            self.started.set()
            await asyncio.sleep(3600)

    executor.pool = Pulling()
    async with api(executor) as client:
        waiting = asyncio.create_task(client.post("/prepare", json={"image": "busybox", "wait_s": 60}))
        await Pulling.started.wait()
        await drain(client.app, 0)
        assert (await waiting).json()["phase"] == "queued"


async def test_excess_calls_are_refused(executor: HeldExecutor):
    async with api(executor, max_pending=2) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"
        calls = [asyncio.create_task(client.post(path, json={"name": "hang"})) for _ in range(2)]
        await until(lambda: executor.held == 2)
        assert (await client.post(path, json={"name": "hang"})).status_code == 429
        executor.hold.set()
        assert {(await call).status_code for call in calls} == {200}


async def test_bodies_under_way_are_bounded(executor: HeldExecutor, monkeypatch: pytest.MonkeyPatch):
    """Those of calls whose clients have left count as long as the calls wait."""
    monkeypatch.setattr(gate, "MAX_HELD_BYTES", 3_000_000)
    large = {"name": "hang", "arguments": {"content": "x" * 1_000_000}}
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"
        for number in range(2):
            lost = asyncio.create_task(client.post(path, json={**large, "id": f"l{number}"}))
            await until(lambda number=number: executor.held == number + 1)
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        again = await client.get(f"{path}/l0")
        assert again.status_code == 202, "small requests go on"
        refused = await client.post(path, json={**large, "name": "terminal"})
        assert (refused.status_code, refused.json()["code"], "Retry-After" in refused.headers) == (429, "full", True)
        executor.hold.set()
        await until(lambda: len(executor.ran) == 2)
        assert (await client.post(path, json={**large, "name": "terminal"})).status_code == 200
        assert tenant(client).account.bodies.held == 0


def test_waiting_calls_are_bounded():
    assert ExecutorServerSettings(token=SecretStr("x"), max_pending=256)
    with pytest.raises(ValidationError, match="max_pending"):
        ExecutorServerSettings(token=SecretStr("x"), max_pending=257)


async def test_finished_calls_are_bounded(executor: HeldExecutor):
    async with api(executor, remembered=5) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"
        for number in range(20):
            await client.post(path, json={**CALL, "id": f"c{number}"})
        assert (await client.get(f"{path}/c0")).status_code == 404
        assert (await client.get(f"{path}/c19")).status_code == 200


async def test_remembered_results_are_bounded(executor: HeldExecutor):
    async with api(executor) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"] + "/calls"
        for number in range(10):
            await client.post(path, json={"name": "picture", "id": f"p{number}"})
        kept = [n for n in range(10) if (await client.get(f"{path}/p{n}")).status_code == 200]
        assert kept == [7, 8, 9]


async def test_no_arguments_are_kept(executor: HeldExecutor):
    settings = ExecutorServerSettings(token=SecretStr("x"))
    trajectories = Trajectories(executor, settings, own_account())  # type: ignore[arg-type]
    trajectory, _ = await trajectories.open(OpenTrajectory())
    tracemalloc.start()
    try:
        for number in range(20):
            body = CallBody(name="write_file", arguments={"content": str(number) * 1_000_000})
            await trajectories.submit(trajectory, body, None).answer()
        executor.ran.clear()
        del body
        assert tracemalloc.get_traced_memory()[0] < 3_000_000
    finally:
        tracemalloc.stop()
        await trajectories.aclose()


async def test_no_token_runs_nothing(executor: HeldExecutor):
    async with api(executor) as client:
        del client.headers["Authorization"]
        for method, path in [
            ("POST", "/trajectories"),
            ("GET", "/trajectories"),
            ("GET", "/tools"),
            ("DELETE", "/trajectories/x"),
            ("POST", "/trajectories/x/calls"),
        ]:
            assert (await client.request(method, path, json={})).status_code == 401
        assert executor.leased == set()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"ttl_s": -1}', b'{"trajectory_id": "a/b"}', b'{"ttl_s": 1e999}', b'{"x": 1}', b'{"ttl_s": NaN}'],
)
async def test_nonsense_is_422(executor: HeldExecutor, body: bytes):
    async with api(executor) as client:
        answer = await client.post("/trajectories", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert answer.json()["code"] == "invalid"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ('""', "{}", "there is no tool ''"),
        (f'"{"x" * 300}"', "{}", "there is no tool 'xxx"),
        ('"half \\ud83d"', "{}", "there is no tool 'half "),
        ('"terminal"', f'{{"command": {"[" * 300}{"]" * 300}}}', "nested more than 64 levels"),
        ('"terminal"', '{"command": "\\ud83d"}', "half of a surrogate pair"),
        ('"terminal"', '"[]"', "must be a JSON object"),
    ],
)
async def test_bad_arguments_are_a_result(name: str, arguments: str, said: str):
    async with ToolExecutor(FakePool(), build_tool_registry()) as made, serving(made) as client:
        path = (await client.post("/trajectories", json={})).headers["Location"]
        body = f'{{"name": {name}, "arguments": {arguments}}}'
        answer = await client.post(f"{path}/calls", content=body, headers={"Content-Type": "application/json"})
        assert said in answer.json()["result"]["error"]


async def test_a_repeated_key_opens_once(executor: HeldExecutor):
    async with api(executor) as client:
        asked = [
            await client.post("/trajectories", json={}, headers={"Idempotency-Key": "a key / of mine"})
            for _ in range(2)
        ]
        assert [one.status_code for one in asked] == [201, 200]
        assert len({one.json()["trajectory_id"] for one in asked}) == 1
        other = await client.post("/trajectories", json={}, headers={"Idempotency-Key": "another"})
        assert other.status_code == 201
        assert len(executor.leased) == 2
