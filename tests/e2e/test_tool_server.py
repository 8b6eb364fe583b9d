"""The ToolServer in a process of its own, as an operator starts it, under load and under fire."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import httpx
import pytest
from pydantic import SecretStr

from atropos.errors import OutcomeUnknown, ToolServerUnavailable
from atropos.tools.remote import ToolServerClient
from tests.e2e.servers import OWN, TOKEN, Server, running


@contextlib.asynccontextmanager
async def client(server: Server) -> AsyncGenerator[ToolServerClient, None]:
    made = ToolServerClient(server.url, SecretStr(TOKEN), timeout_s=30)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_256_trajectories_beside_a_hanging_a_failing_and_a_flooding_tool():
    """Nobody waits for another's hanging call, answers stay bounded, and memory and sockets do not grow."""
    async with (
        running("tool-server", *OWN) as server,
        aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {TOKEN}"}, connector=aiohttp.TCPConnector(limit=0)
        ) as http,
    ):

        async def ask(trajectory: str, call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
            body = {"trajectory_id": trajectory, "call_id": call_id, "name": name, "arguments": arguments}
            async with http.post(f"{server.url}/execute", json=body) as answer:
                assert answer.status == 200
                return (await answer.json())["result"]

        async def one(number: int) -> None:
            assert (await ask(f"t{number}", "c", "echo", text=str(number)))["output"] == str(number)
            assert "boom" in (await ask(f"t{number}", "d", "explode"))["error"]
            async with http.delete(f"{server.url}/trajectories/t{number}") as answer:
                assert (await answer.json())["ended"] is True

        hanging = [asyncio.create_task(ask(f"h{i}", "h", "hang")) for i in range(32)]
        flooding = [asyncio.create_task(ask(f"f{i}", "f", "flood", megabytes=50)) for i in range(3)]
        async with asyncio.timeout(200):
            await asyncio.gather(*(one(number) for number in range(256)))
            for task in flooding:
                result = await task
                assert result["truncated"] is True
                assert len(result["output"]) < 300_000
            before, sockets = server.rss_mb(), server.descriptors()
            await asyncio.gather(*(one(number) for number in range(256)))
        assert not any(task.done() for task in hanging)
        assert server.rss_mb() < before + 30
        assert server.descriptors() <= sockets + 20
        for number, task in enumerate(hanging):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with http.delete(f"{server.url}/trajectories/h{number}") as answer:
                assert answer.status == 200
        async with http.get(f"{server.url}/stats") as answer:
            stats = await answer.json()
        assert (stats["running"], stats["with_state"]) == (0, 0)


async def test_sigterm_finishes_what_runs_and_refuses_what_comes():
    async with running("tool-server", *OWN) as server, client(server) as tools:
        nap = asyncio.create_task(tools.execute("t", "c", "nap", {"seconds": 1.0}))
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            body: dict[str, Any] = {"trajectory_id": "u", "call_id": "c", "name": "echo", "arguments": {"text": "a"}}
            refused = await http.post(f"{server.url}/execute", json=body)
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert (await nap).output == "rested"
        assert await asyncio.wait_for(server.process.wait(), 20) == 0


async def test_a_second_signal_ends_it_at_once():
    async with running("tool-server", *OWN) as server, client(server) as tools:
        hang = asyncio.create_task(tools.execute("t", "c", "hang", {}))
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(server.process.wait(), 20)
        hang.cancel()
        await asyncio.gather(hang, return_exceptions=True)


async def test_a_server_killed_in_the_middle_is_told_as_such(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.tools.remote.MAX_ATTEMPTS", 3)  # it waits between them
    async with running("tool-server", *OWN) as server, client(server) as tools:
        call = asyncio.create_task(tools.execute("t", "c", "hang", {}))
        await asyncio.sleep(0.3)
        server.process.kill()
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(call, 60)
        with pytest.raises(ToolServerUnavailable):
            await asyncio.wait_for(tools.execute("t", "d", "echo", {"text": "a"}), 60)
