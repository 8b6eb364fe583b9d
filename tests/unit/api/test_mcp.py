"""Tools of real MCP servers, over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from atropos.api.external.mcp import McpConnection, McpTool
from atropos.api.settings import McpServerSettings, ToolServerSettings
from atropos.api.tool_server import create_app
from atropos.errors import ConfigError, ToolServerUnavailable
from atropos.tools.base import Tool
from tests.processes import descendants, running
from tests.waiting import until

from .conftest import call

SERVER = str(Path(__file__).with_name("mcp_server.py"))
SESSIONS = str(Path(__file__).with_name("mcp_sessions.py"))
STDIO = McpServerSettings(name="little", command=sys.executable, args=(SERVER,), timeout_s=60)
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def offering(*servers: McpServerSettings, tools: Sequence[Tool] = ()) -> AsyncGenerator[httpx.AsyncClient, None]:
    app = create_app(ToolServerSettings(token=SecretStr("x"), mcp=servers), tools=tools)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"Authorization": "Bearer x"}, timeout=60
        ) as client:
            client.host = app.state.host
            yield client


@contextlib.asynccontextmanager
async def connected(server: McpServerSettings) -> AsyncGenerator[tuple[httpx.AsyncClient, McpConnection], None]:
    """The same of one server, and the connection to it."""
    async with (
        contextlib.aclosing(McpConnection(server)) as connection,
        offering(tools=[McpTool(connection, one) for one in await connection.tools()]) as client,
    ):
        yield client, connection


async def ask(client: httpx.AsyncClient, name: str, **arguments: Any) -> httpx.Response:
    return await client.post("/execute", json=call(name, call_id=uuid.uuid4().hex, **arguments))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def little() -> AsyncGenerator[httpx.AsyncClient, None]:
    """A server for all tests that leave it as it was, or started anew."""
    async with offering(STDIO) as client:
        yield client


@in_one_loop
async def test_mcp_tools_are_tools(little: httpx.AsyncClient):
    tools = {tool["name"]: tool for tool in (await little.get("/tools")).json()["tools"]}
    add = tools["little_add"]
    assert add["toolset"] == "mcp-little"
    assert add["read_only"] is True
    assert add["schema"]["function"]["parameters"]["required"] == ["a", "b"]
    assert tools["little_fail"]["schema"]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert (await ask(little, "little_add", a=2, b=3)).json()["result"]["output"] == "5"
    bad = (await ask(little, "little_add", a="x")).json()["result"]
    assert bad["success"] is False
    failed = (await ask(little, "little_fail")).json()["result"]
    assert (failed["success"], "fail" in failed["error"]) == (False, True)


@in_one_loop
async def test_a_wrong_answer_fails_one_call(little: httpx.AsyncClient, tmp_path: Path):
    body = call("little_slow", "beside a wrong answer", mark=str(tmp_path / "mark"))
    slow = asyncio.create_task(little.post("/execute", json=body))
    await until((tmp_path / "mark").exists)
    wrong = await ask(little, "little_lie")
    assert wrong.status_code == 200, wrong.text
    assert "has an output schema" in wrong.json()["result"]["error"]
    assert not slow.done()
    await little.delete("/trajectories/beside%20a%20wrong%20answer")
    assert (await slow).json()["code"] == "trajectory_ended"


@in_one_loop
async def test_a_hanging_tool_times_out(little: httpx.AsyncClient):
    slow = asyncio.create_task(little.post("/execute", json={**call("little_slow", "hangs"), "timeout_s": 0.5}))
    assert (await ask(little, "little_add", a=1, b=1)).json()["result"]["output"] == "2"
    assert (await slow).json()["result"]["timed_out"] is True


@pytest.mark.slow("starts servers")
@in_one_loop
async def test_a_dead_server_comes_back(little: httpx.AsyncClient):
    died = await ask(little, "little_die")
    assert died.status_code == 409, died.text
    assert died.json()["code"] == "outcome_unknown"
    assert (await ask(little, "little_add", a=1, b=2)).json()["result"]["output"] == "3"


@pytest.mark.slow("starts servers")
async def test_a_hanging_server_is_restarted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    others = descendants()

    def servers() -> list[int]:
        return [pid for pid, line in descendants().items() if SERVER in line and pid not in others]

    monkeypatch.setattr("atropos.api.external.mcp.PING_S", 0.5)
    async with offering(STDIO) as client:
        (server,) = servers()
        os.kill(server, signal.SIGSTOP)
        body = {**call("little_add", call_id="h", a=1, b=1), "timeout_s": 0.3}
        assert (await client.post("/execute", json=body)).json()["result"]["timed_out"] is True
        await until(lambda: "does not answer; reconnecting" in caplog.text, "the end of the connection")
        time.sleep(3.5)  # noqa: ASYNC251 (the event loop is blocked, or the process stopped, while the server is ended)
        await until(lambda: server not in descendants(), "the end of the server")
        assert (await ask(client, "little_add", a=1, b=2)).json()["result"]["output"] == "3"
    assert not servers()


@pytest.mark.slow("starts servers")
async def test_a_stopped_process_drops_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("atropos.api.external.mcp.PING_S", 3.0)
    async with offering(STDIO.model_copy(update={"timeout_s": 300})) as client:
        body = call("little_slow", "other", mark=str(tmp_path / "mark"))
        other = asyncio.create_task(client.post("/execute", json=body))
        await until((tmp_path / "mark").exists)
        late = await client.post("/execute", json={**call("little_slow", "late"), "timeout_s": 0.3})
        assert late.json()["result"]["timed_out"] is True
        time.sleep(3.5)  # noqa: ASYNC251 (the event loop is blocked, or the process stopped, during the check)
        assert (await ask(client, "little_add", a=1, b=2)).json()["result"]["output"] == "3"
        await client.delete("/trajectories/other")
        assert (await other).json()["code"] == "trajectory_ended"


@pytest.mark.slow("starts servers")
async def test_a_busy_server_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    server = STDIO.model_copy(update={"timeout_s": 300, "env": {"LISTING_HELD": str(tmp_path / "held")}})
    async with connected(server) as (client, connection):
        bodies = [call("little_slow", f"other-{n}", mark=str(tmp_path / f"{n}")) for n in range(3)]
        others = [asyncio.create_task(client.post("/execute", json=body)) for body in bodies]
        await until(lambda: all((tmp_path / f"{n}").exists() for n in range(3)))
        (tmp_path / "held").touch()  # what the check asks for comes late
        for busy, ping_s in ((True, 3.0), (False, 0.5)):
            monkeypatch.setattr("atropos.api.external.mcp.PING_S", ping_s)
            late = await client.post("/execute", json={**call("little_slow", f"late-{busy}"), "timeout_s": 0.3})
            assert late.json()["result"]["timed_out"] is True
            check = asyncio.create_task(connection.answers(await connection.client()))  # as that call began one
            while busy and not check.done():
                assert (await ask(client, "little_add", a=1, b=2)).status_code == 200
                await asyncio.wait([check], timeout=0.1)
            assert await check is busy
            assert not busy or not any(one.done() for one in others)
        assert {(await one).json()["code"] for one in others} == {"outcome_unknown"}
    assert [one.message for one in caplog.records if "does not answer" in one.message] == [
        "MCP server little does not answer; reconnecting: no answer in time"
    ]


@pytest.mark.slow("starts servers")
async def test_a_gone_server_fails_no_tool(tmp_path: Path):
    others = descendants()
    script = f"[ -e {tmp_path}/mute ] && exec sleep 3600; exec {sys.executable} {SERVER}"
    server = STDIO.model_copy(update={"command": "sh", "args": ("-c", script)})
    async with connected(server) as (client, connection):
        (tmp_path / "mute").touch()
        assert (await ask(client, "little_die")).status_code == 409
        connection.server = server.model_copy(update={"timeout_s": 1})
        client.host.tools["little_add"].timeout_s = 1
        calls = [client.post("/execute", json=call("little_add", f"t{n}", a=1, b=2)) for n in range(3)]
        answers = await asyncio.gather(*calls)
        assert {(one.status_code, one.json().get("code")) for one in answers} == {(503, "tool_server_unavailable")}
        assert running("sleep 3600") == 1, "it is still being opened"
    assert descendants().keys() <= others.keys()


@pytest.mark.slow("starts servers")
async def test_a_failed_start_is_reported():
    with pytest.raises(ToolServerUnavailable, match="MCP server 'gone'"):
        async with offering(McpServerSettings(name="gone", command="/no/such/program")):
            pass
    with pytest.raises(ConfigError, match="has no tool 'missing'"):
        async with offering(STDIO.model_copy(update={"tools": ("missing",)})):
            pass


async def over_http(port: int, server: str = SERVER) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, server, str(port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return process
            except OSError:
                await asyncio.sleep(0.05)


async def test_a_lost_session_is_reopened(port: int):
    process = await over_http(port, SESSIONS)
    try:
        async with offering(McpServerSettings(name="old", url=f"http://127.0.0.1:{port}/mcp", timeout_s=60)) as client:
            for code in (-32602, -32001, -32000):  # the latter two are the SDK's for timeouts and closed connections
                wrong = (await ask(client, "old_add", code=code)).json()["result"]
                assert (wrong["error"], wrong["timed_out"]) == ("old_add: no such thing", False)
            late = await ask(client, "old_add", gateway=True)
            assert (late.status_code, late.json()["code"]) == (409, "outcome_unknown"), late.text
            process.kill()
            await process.wait()
            process = await over_http(port, SESSIONS)  # restarted while no call ran
            lost = await ask(client, "old_add")
            assert (lost.status_code, lost.json()["code"]) == (409, "outcome_unknown"), lost.text
            assert (await ask(client, "old_add")).json()["result"]["output"] == "added"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow("starts servers")
async def test_streamable_http_comes_back(port: int, tmp_path: Path):
    process = await over_http(port)
    try:
        server = McpServerSettings(
            name="web", url=f"http://127.0.0.1:{port}/mcp", tools=("add", "slow", "fail"), timeout_s=60
        )
        async with offering(server) as client:
            assert (await ask(client, "web_add", a=20, b=22)).json()["result"]["output"] == "42"
            assert (await ask(client, "web_fail")).json()["result"]["success"] is False
            slow = asyncio.create_task(ask(client, "web_slow", mark=str(tmp_path / "mark")))
            await until((tmp_path / "mark").exists)
            process.kill()
            await process.wait()
            lost = await slow
            assert (lost.status_code, lost.json()["code"]) == (409, "outcome_unknown"), lost.text
            gone = await ask(client, "web_add", a=1, b=1)
            assert (gone.status_code, gone.json()["code"]) == (503, "tool_server_unavailable"), gone.text
            process = await over_http(port)
            assert (await ask(client, "web_add", a=1, b=1)).json()["result"]["output"] == "2"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
