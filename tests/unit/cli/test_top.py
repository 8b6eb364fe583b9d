"""`atropos top` against a real dashboard server and a real sandbox server, as its user sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import termios
from dataclasses import asdict

import httpx
import pytest

from atropos.cli.looking import refuse
from atropos.dashboard.live import ContainerSlots, InFlight, LiveSample, LiveView
from atropos.dashboard.server import DashboardServer
from atropos.dashboard.store import TrajectoryStore
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.client import SandboxClient
from tests.unit.client.test_client import request
from tests.unit.command import ended
from tests.unit.server.fakes import TOKEN, serving

pytestmark = pytest.mark.slow("starts Python anew")

HOSTILE = "task\x1b[31m\u202e\x07"


def view() -> LiveView:
    return LiveView(
        numbers={"groups": "12", "mean score": "0.431", "tool calls": "1234", "acquire p50 / p99": "2 / 41 ms"},
        containers=[
            ContainerSlots("0 small", 3, 4, 1, 0, ready=True),
            ContainerSlots("1 large", 600, 400, 0, 0, ready=False),
        ],
        in_flight=[
            InFlight(f"{HOSTILE}{n}", HOSTILE, 100 + n, f"terminal {HOSTILE}\nsecond [bold]line", 3.5, n)
            for n in range(300)
        ],
        waiting=2,
        faults=[("retry", HOSTILE, 11)],
        history=[LiveSample(calls_per_s=float(n)) for n in range(100)],
        trouble=f"no node {HOSTILE}",
    )


async def run(*arguments: str, columns: int = 80) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli", "top", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, said.decode()


@pytest.fixture
async def dashboard():
    server = DashboardServer("squares", TrajectoryStore(), token="right", live=view)
    await server.start()
    yield server
    await server.close()


@pytest.mark.parametrize("columns", [40, 80, 200])
async def test_an_env_fits_every_width(dashboard, columns):
    code, text = await run(dashboard.url, "--once", columns=columns)
    assert code == 0, text
    assert max(map(len, text.splitlines())) <= columns
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)
    assert "\u202e" not in text
    assert "603 of" in text
    assert "600/1000" in text
    assert "11 x retry" in text
    assert ("item" in text) == (columns == 200)


@pytest.mark.parametrize("columns", [60, 80, 200])
async def test_long_siblings_stay_apart(columns):
    long = "django__django-11099-of-a-benchmark-with-long-names-17"
    flight = [InFlight(f"{long}-{n}", long, 5, "terminal " + "x" * 300, 1.0, n) for n in range(4)]
    server = DashboardServer("long", TrajectoryStore(), token="right", live=lambda: LiveView(in_flight=flight))
    await server.start()
    try:
        _, text = await run(server.url, "--once", columns=columns)
    finally:
        await server.close()
    shown = [line.split()[0] for line in text.splitlines() if "17-" in line]
    assert sorted(name.rpartition("-")[2] for name in shown) == ["0", "1", "2", "3"], text
    assert max(map(len, text.splitlines())) <= columns


async def test_server_shows_slots():
    async with serving() as running:
        client = SandboxClient(running.url, TOKEN, client_id="top")
        await client.connect()
        await client.acquire(request(client_id="top", trajectory_id="trajectory-7"))
        code, text = await run(running.url, "--token", TOKEN, "--once")
        await client.close()
    assert code == 0, text
    assert "1 of 4 slots leased" in text
    assert "trajectory-7" in text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["http://127.0.0.1:9"], 2, "token: missing; give --token, ATROPOS_DASHBOARD_TOKEN, or the URL"),
        (["http://127.0.0.1:9", "--token", "x"], 70, "127.0.0.1:9"),
        (["ftp://x", "--token", "x"], 2, "is no http URL"),
        (["http://127.0.0.1:port", "--token", "x"], 2, "is no http URL"),
        (["http://[::1", "--token", "x"], 2, "is no http URL"),
        (["http://127.0.0.1:7580/?token=…"], 2, "token: missing; give --token, ATROPOS_DASHBOARD_TOKEN, or the URL"),
    ],
)
def test_what_can_not_be_asked_is_one_line(words, code, said, monkeypatch, capfd):
    done = ended(monkeypatch, capfd, "top", *words, "--once")
    text = done.out + done.err
    assert (done.code, said in text, len(text.splitlines())) == (code, True, 1), text


async def test_refusal_is_one_line(dashboard):
    code, text = await run(f"http://127.0.0.1:{dashboard.port}", "--token", "wrong", "--once", columns=200)
    assert (code, "refuses the token" in text, len(text.splitlines())) == (2, True, 1), text


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (httpx.Response(429, json={"code": "rate_limited", "message": "2 a second"}), BackendUnavailable, "2 a second"),
        (httpx.Response(409, json={"code": "ambiguous", "message": "write KEY/ID"}), ConfigError, "write KEY/ID"),
        (httpx.Response(404, json={"code": "not_found", "message": "Not Found"}), ConfigError, "no executor server"),
        (httpx.Response(502, text="<html>"), ConfigError, "no executor server"),
    ],
)
def test_a_servers_refusal_says_why(answer: httpx.Response, kind: type[Exception], said: str):
    with pytest.raises(kind, match=said):
        refuse("http://127.0.0.1:8461", answer)


async def test_without_terminal_prints(dashboard):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli", "top", dashboard.url, "--interval", "0.2"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    looks = 0
    try:
        async with asyncio.timeout(60):
            while looks < 2:
                looks += b"603 of" in await process.stdout.readline()
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 143


async def test_internet_proxy_unasked(dashboard, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    code, text = await run(dashboard.url, "--once")
    assert code == 0, text


async def shown_until_q(url: str, asked: asyncio.Event | None = None) -> bytes:
    """What it draws until q is typed, once it has drawn and, where given, has asked again; the terminal is as before."""
    ours, its = os.openpty()
    try:
        before = termios.tcgetattr(its)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atropos.cli", "top", url),
            stdin=its,
            stdout=its,
            env={**os.environ, "TERM": "xterm"},
        )
        shown = b""
        while b"in flight" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65_536)
        assert termios.tcgetattr(its) != before
        if asked is not None:
            await asyncio.wait_for(asked.wait(), 30)
        os.write(ours, b"q")
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert termios.tcgetattr(its) == before
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                shown += os.read(ours, 65_536)
        return shown
    finally:
        os.close(ours)
        os.close(its)


async def test_q_gives_the_terminal_back(dashboard):
    await shown_until_q(f"http://127.0.0.1:{dashboard.port}/?token=right")


async def test_q_ends_it_while_it_hangs():
    body = json.dumps({"title": "env", "view": asdict(view())}).encode()
    asked = asyncio.Event()

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        shown = await shown_until_q(f"http://127.0.0.1:{port}/?token=right", asked)
    assert b"does not answer" not in shown  # the look was given up, not waited for
