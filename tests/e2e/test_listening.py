"""What the project's servers listen on, counted in the kernel's own tables, and whose token opens which of them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from mcp import Client, StdioServerParameters

from atropos.api.external.browser import browser_available
from atropos.api.settings import BrowserSettings
from atropos.slots import SlotPool, SlotPoolConfig
from tests.e2e.servers import OWN, TOKEN, Server, running
from tests.processes import descendants
from tests.unit.api.site import Site

LISTEN, UNCONNECTED = "0A", "07"
pytestmark = pytest.mark.asyncio(loop_scope="module")


def _address(text: str) -> str:
    packed = bytes.fromhex(text.partition(":")[0])
    words = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))  # the kernel prints words
    return str(ipaddress.ip_address(words))


def listening(root: int) -> dict[str, str]:
    """Addresses that a process and all below it take connections or datagrams on, in this machine's own network."""
    inodes: dict[str, str] = {}
    here = os.readlink("/proc/self/ns/net")
    for pid, line in {root: "", **descendants(root)}.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") != here:
                continue
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes[os.readlink(entry.path)] = line
    found: dict[str, str] = {}
    for table, state in (("tcp", LISTEN), ("tcp6", LISTEN), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            owner = inodes.get(f"socket:[{fields[9]}]")
            if owner is not None and fields[3] == state:
                found[f"{table} {_address(fields[1])}:{int(fields[1].partition(':')[2], 16)}"] = owner[:100]
    return found


def beyond_loopback(root: int) -> dict[str, str]:
    found = listening(root)
    return {
        name: owner
        for name, owner in found.items()
        if not ipaddress.ip_address(name.split()[1].rpartition(":")[0]).is_loopback
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncGenerator[Server, None]:
    async with running("executor-server", "--backend", "local", "--slots-per-container", "1") as server:
        yield server


@pytest.mark.skipif(bool(MISSING := browser_available(BrowserSettings())), reason=f"no browser: {MISSING}")
async def test_loopback_by_default(tmp_path: Path):
    site = Site()
    await site.start()
    settings = tmp_path / "settings.toml"
    settings.write_text(f'allow_hosts = ["127.0.0.1:{site.port}"]\n')
    try:
        async with running("tool-server", "--config", str(settings)) as server:
            call = {
                "trajectory_id": "t",
                "call_id": "c",
                "name": "browser_navigate",
                "arguments": {"url": site.url("/")},
            }
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=90) as http:
                answer = await http.post(f"{server.url}/execute", json=call)
            assert answer.json()["result"]["success"], answer.text
            assert f"tcp 127.0.0.1:{server.port}" in listening(server.process.pid)
            assert beyond_loopback(server.process.pid) == {}
    finally:
        await site.stop()


async def test_executor_on_loopback(executor: Server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=executor.url, headers=headers, timeout=60) as http:
        opened = await http.post("/trajectories", json={})
        assert opened.status_code == 201
        assert f"tcp 127.0.0.1:{executor.port}" in listening(executor.process.pid)
        assert beyond_loopback(executor.process.pid) == {}
        await http.delete(opened.headers["Location"])


async def test_mcp_server_on_loopback():
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "atropos.cli", "mcp"])
    async with Client(parameters) as client:
        await client.call_tool("terminal", {"command": "true"})
        assert beyond_loopback(os.getpid()) == {}


async def test_a_token_opens_its_own_server_alone(executor: Server):
    """ToolServers, executor APIs and the containers of two pools: each refuses the others' tokens, and runs nothing."""
    configs = [SlotPoolConfig(backend="local", slots_per_container=1, max_containers=1) for _ in range(2)]
    async with (
        running("tool-server", *OWN) as tools,
        SlotPool(configs[0]) as one,
        SlotPool(configs[1]) as other,
        one.lease("a"),
        other.lease("b"),
        httpx.AsyncClient(timeout=60) as http,
    ):
        mine, theirs = (next(iter(pool.backend.containers())) for pool in (one, other))
        assert mine.token != theirs.token
        run = {"trajectory_id": "t", "call_id": "c", "name": "tally", "arguments": {"key": "k"}}
        for token in (theirs.token, TOKEN, TOKEN[:-1], mine.token[:-1], f"{mine.token}x", mine.token.swapcase()):
            headers = {"Authorization": f"Bearer {token}"}
            for method, path in (
                ("GET", "/v1/status"),
                ("POST", "/v1/leases"),
                ("GET", "/v1/stream"),
                ("POST", "/v1/drain"),
            ):
                answer = await http.request(method, f"{mine.url}{path}", headers=headers, json={})
                assert answer.status_code == 401, (path, token)
            if token != TOKEN:
                assert (await http.post(f"{tools.url}/execute", headers=headers, json=run)).status_code == 401
                opened = await http.post(f"{executor.url}/trajectories", headers=headers, json={})
                assert opened.status_code == 401
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await http.post(f"{tools.url}/execute", headers=right, json=run)).json()["result"]["output"] == "1"
        assert (await http.get(f"{executor.url}/trajectories", headers=right)).json() == {"trajectories": []}
