"""The ToolServer in a process of its own, as an operator starts it, under load and under fire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from pydantic import SecretStr

from atropos.errors import OutcomeUnknown, ToolServerUnavailable
from atropos.tools.tool_server.client import Life, ToolServerClient
from tests.e2e.servers import OWN, TOKEN, Server, running
from tests.processes import adopt_orphans, descendants, kept_port
from tests.waiting import until

adopt_orphans()


@contextlib.asynccontextmanager
async def client(server: Server) -> AsyncGenerator[ToolServerClient, None]:
    made = ToolServerClient(server.url, SecretStr(TOKEN))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


class Asker:
    """Calls over one HTTP client, each under an id of its own."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server, self.http = server, http
        self._ids = itertools.count()
        self._ended = Counter[str]()

    async def __call__(self, trajectory: str, name: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        body = {"trajectory_id": trajectory, "call_id": f"c{next(self._ids)}", "name": name, "arguments": arguments}
        body["life"] = self.life(trajectory)
        if timeout_s is not None:
            body["timeout_s"] = timeout_s
        async with self.http.post(f"{self.server.url}/execute", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["result"]

    def life(self, trajectory: str) -> str:
        return f"{trajectory}-{self._ended[trajectory]}"

    async def end(self, trajectory: str) -> bool:
        life = self.life(trajectory)
        self._ended[trajectory] += 1
        async with self.http.delete(f"{self.server.url}/trajectories/{trajectory}?life={life}") as answer:
            return (await answer.json())["ended"]

    async def stats(self) -> dict[str, Any]:
        async with self.http.get(f"{self.server.url}/stats") as answer:
            return await answer.json()


@contextlib.asynccontextmanager
async def asking(server: Server) -> AsyncGenerator[Asker, None]:
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {TOKEN}"}, connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        yield Asker(server, http)


async def until_running(server: Server, count: int) -> None:
    async with asking(server) as ask, asyncio.timeout(60):
        while (await ask.stats())["running"] != count:
            pass


@contextlib.asynccontextmanager
async def noise(ask: Asker) -> AsyncGenerator[None, None]:
    """One tool that hangs, one that fails, and one that answers 50 MB, over and over."""

    async def over_and_over(trajectory: str, name: str, **arguments: Any) -> None:
        while True:
            result = await ask(trajectory, name, **arguments)
            assert len(result["output"] + (result["error"] or "")) < 300_000
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(f"h{i}", "hang")) for i in range(32)]
        tasks += [group.create_task(over_and_over(f"e{i}", "explode")) for i in range(4)]
        tasks += [group.create_task(over_and_over("f", "flood", megabytes=50))]
        yield
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
    for name in [f"h{i}" for i in range(32)] + [f"e{i}" for i in range(4)] + ["f"]:
        await ask.end(name)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


async def test_256_trajectories_beside_bad_tools():
    """Their p99 beside the noise is at most twice their quiet one: rounds of both, in turn, in one run.

    What else the machine does can only spoil a ratio: the best of a few attempts counts.
    """
    rounds, ratios = int(os.environ.get("ATROPOS_TOOL_ROUNDS", "2")), list[float]()
    async with running("tool-server", *OWN) as server, asking(server) as ask:

        async def one(number: int, seconds: list[float]) -> None:
            for call in range(2):
                began = time.perf_counter()
                assert (await ask(f"t{number}", "echo", text=str(call)))["output"] == str(call)
                seconds.append(time.perf_counter() - began)

        async def everyone(seconds: list[float]) -> None:
            await asyncio.gather(*(one(number, seconds) for number in range(256)))

        await everyone([])
        calm, sockets = server.rss_mb(), server.descriptors()
        for _ in range(10):
            quiet, noisy = list[float](), list[float]()
            for _ in range(rounds):
                await everyone(quiet)
                async with noise(ask):
                    await everyone(noisy)
            ratios.append(p99(noisy) / p99(quiet))
            if ratios[-1] <= 2:
                break
        print(f"p99 beside the noise: {ratios} of the quiet one; {calm:.0f} MB, peak {server.peak_mb():.0f} MB")
        assert min(ratios) <= 2, ratios
        assert server.peak_mb() < calm + 150, "more than two floods at once were held"
        assert server.rss_mb() < calm + 40
        assert server.descriptors() <= sockets + 64
        for number in range(256):
            await ask.end(f"t{number}")
        stats = await ask.stats()
    assert (stats["running"], stats["with_state"], stats["trajectories"]) == (0, 0, 0)


async def test_thousands_leave_nothing():
    """Right, wrong, late, huge, given up, in batches, with state: memory, sockets and threads stay as they were.

    ATROPOS_TOOL_CALLS says how many (1,200 in CI, 10,000 by hand).
    """
    calls = int(os.environ.get("ATROPOS_TOOL_CALLS", "1200"))
    settings = ("--config", os.devnull)
    async with running("tool-server", *OWN, *settings) as server, asking(server) as ask:
        rng = random.Random(5)

        async def batch(name: str) -> None:
            body = [
                {
                    "trajectory_id": name,
                    "life": ask.life(name),
                    "call_id": f"b{i}",
                    "name": "echo",
                    "arguments": {"text": "x"},
                }
                for i in range(5)
            ]
            async with ask.http.post(f"{server.url}/batch", json={"calls": body}) as answer:
                assert len((await answer.text()).splitlines()) == 5

        async def give_up(name: str) -> None:
            task = asyncio.create_task(ask(name, "nap", seconds=0.05))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])

        async def trajectory(number: int) -> None:
            name = f"t{number}"
            for _ in range(10):
                match rng.randrange(8):
                    case 0:
                        await ask(name, "explode")
                    case 1:
                        await ask(name, "nonsense")
                    case 2:
                        await ask(name, "hang", timeout_s=0.01)
                    case 3:
                        await ask(name, "keep", item="x" * 1000)
                    case 4:
                        await batch(name)
                    case 5:
                        await give_up(name)
                    case 6:
                        await ask(name, "flood", megabytes=1)
                    case _:
                        await ask(name, "echo", text="é" * 1000)
            if number % 10:
                await ask.end(name)

        async def some(first: int, count: int) -> None:
            for start in range(first, first + count, 32):
                await asyncio.gather(*(trajectory(number) for number in range(start, min(start + 32, first + count))))

        warm = max(40, calls // 40)
        await some(0, warm)
        before = (server.descriptors(), server.threads(), server.rss_mb())
        await some(warm, calls // 10)
        await until(lambda: server.descriptors() <= before[0] + 32, "the end of connections that were given up")
        after = (server.descriptors(), server.threads(), server.rss_mb())
        for number in range(0, warm + calls // 10, 10):
            await ask.end(f"t{number}")
        stats = await ask.stats()
    print(f"{calls} calls: descriptors, threads, MB: {before} -> {after}; {stats}")
    assert after[1] <= before[1] + 2
    assert after[2] <= before[2] + 25 + 64 * calls / 10_000  # the journal remembers 64 MB of answers at most
    assert (stats["running"], stats["with_state"], stats["trajectories"], stats["journal"]) == (0, 0, 0, 0)


async def test_sigterm_finishes_calls(tmp_path: Path):
    async with running("tool-server", *OWN) as server, client(server) as tools:
        waiting = asyncio.create_task(tools.execute(Life("t"), "c", "wait_for_file", {"path": str(tmp_path / "go")}))
        await until_running(server, 1)
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: "ending: running calls are finished first" in server.log)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
            body: dict[str, Any] = {"trajectory_id": "u", "call_id": "c", "name": "echo", "arguments": {"text": "a"}}
            refused = await http.post(f"{server.url}/execute", json=body)
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        (tmp_path / "go").touch()
        assert (await waiting).output == "it is there"
        assert await asyncio.wait_for(server.process.wait(), 60) == 0


async def test_call_after_drain_answered(tmp_path: Path):
    (tmp_path / "settings.toml").write_text("drain_s = 0.2\n")
    async with running("tool-server", *OWN, "--config", str(tmp_path / "settings.toml")) as server:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
            body: dict[str, Any] = {"trajectory_id": "t", "call_id": "c", "name": "hang", "arguments": {}}
            hang = asyncio.create_task(http.post(f"{server.url}/execute", json=body))
            await until_running(server, 1)
            server.process.send_signal(signal.SIGTERM)
            ended = await hang
        assert (ended.status_code, ended.json()["code"]) == (409, "trajectory_ended")
        assert await asyncio.wait_for(server.process.wait(), 60) == 0
        await server.read_out()
        assert "Traceback" not in server.log


async def test_second_signal_ends_it():
    async with running("tool-server", *OWN) as server, client(server) as tools:
        hang = asyncio.create_task(tools.execute(Life("t"), "c", "hang", {}))
        await until_running(server, 1)
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: "ending: running calls are finished first" in server.log)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(server.process.wait(), 60)
        hang.cancel()
        await asyncio.gather(hang, return_exceptions=True)


async def test_early_signal_is_tidy(tmp_path: Path):
    settings = tmp_path / "settings.toml"
    settings.write_text('[[mcp]]\nname = "mute"\ncommand = "sleep"\nargs = ["987654"]\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli", "tool-server", "--port", "0", "--config", str(settings)),
        env={**os.environ, "ATROPOS_TOOL_SERVER_TOKEN": TOKEN},
    )
    await until(lambda: [line for line in descendants().values() if "987654" in line])
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 143
    assert not [line for line in descendants().values() if "987654" in line]


async def test_a_restart_is_told_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("atropos.tools.tool_server.client.MAX_ATTEMPTS", 40)
    with kept_port() as port:
        async with running("tool-server", *OWN, port=port) as server, client(server) as tools:
            kept = Life("s")
            assert (await tools.execute(kept, "k1", "keep", {"item": "a"})).output == "a"
            changing = asyncio.create_task(tools.execute(Life("t"), "c", "hang", {}))
            looking = asyncio.create_task(
                tools.execute(Life("u"), "c", "wait_for_file", {"path": str(tmp_path / "go")})
            )
            await until_running(server, 2)
            server.process.kill()
            await server.process.wait()
            late = asyncio.create_task(tools.execute(Life("v"), "c", "echo", {"text": "never left"}))
            async with running("tool-server", *OWN, port=port):
                with pytest.raises(OutcomeUnknown, match="restarted"):
                    await asyncio.wait_for(changing, 90)
                (tmp_path / "go").touch()
                assert (await asyncio.wait_for(looking, 90)).output == "it is there"
                assert (await asyncio.wait_for(late, 90)).output == "never left"
                with pytest.raises(ToolServerUnavailable, match=r"the state of this trajectory .* is gone"):
                    await tools.execute(kept, "k2", "keep", {"item": "b"})
                assert (await tools.execute(kept, "k3", "keep", {"item": "c"})).output == "c"


async def test_resets_run_no_call_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.tools.tool_server.client.MAX_ATTEMPTS", 60)
    monkeypatch.setattr("atropos.tools.tool_server.client.MAX_DELAY_S", 0.2)
    rng = random.Random(3)
    resets = 0

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        left = rng.choice([200, 600, 900, 1500, 1 << 30])

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left, resets
            while left > 0 and (data := await source.read(300)):
                left -= len(data)
                sink.write(data)
                await sink.drain()
            if left <= 0:
                resets += 1
            for one in (writer, back):
                one.transport.abort()

        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    async with running("tool-server", *OWN) as server:
        proxy = await asyncio.start_server(passed_on, "127.0.0.1", 0)
        made = ToolServerClient(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", SecretStr(TOKEN))
        for _ in range(20):
            with contextlib.suppress(ToolServerUnavailable):
                await made.start()
                break
        lives = [Life(f"t{i}") for i in range(20)]
        results = await asyncio.gather(
            *(made.execute(lives[i % 20], f"c{i}", "tally", {"key": f"{i}"}) for i in range(60))
        )
        await made.close()
        proxy.close()
    assert resets > 5
    assert {result.output for result in results} == {"1"}, "a call was run twice"


async def test_a_kill_is_told_as_such(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.tools.tool_server.client.MAX_ATTEMPTS", 3)  # it waits between them
    async with running("tool-server", *OWN) as server, client(server) as tools:
        call = asyncio.create_task(tools.execute(Life("t"), "c", "hang", {}))
        await until_running(server, 1)
        server.process.kill()
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(call, 60)
        with pytest.raises(ToolServerUnavailable):
            await asyncio.wait_for(tools.execute(Life("t"), "d", "echo", {"text": "a"}), 60)
