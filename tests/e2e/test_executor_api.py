"""The executor API over real slots on the local backend, and an executor with the ToolServer in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from atropos.api.executor.models import ExecutorServerSettings
from atropos.api.executor_api import create_executor_app
from atropos.api.settings import ToolServerSettings
from atropos.api.tool_server import create_app
from atropos.config import ImageStoreSettings
from atropos.metrics import CONTENT_TYPE
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, build_tool_registry
from tests.e2e.servers import OWN, TOKEN, running
from tests.images.registry import MISSING, Registry, registry
from tests.images.test_leases import busybox_image
from tests.unit.api.site import Site
from tests.waiting import until


@contextlib.asynccontextmanager
async def opened(**settings: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    settings = {"pool": SlotPoolConfig(backend="local", slots_per_container=2, max_containers=1), **settings}
    app = create_executor_app(ExecutorServerSettings(token=SecretStr("x"), **settings))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://test",
            headers={"Authorization": "Bearer x"},
            timeout=60,
        ) as client,
    ):
        yield client


async def granted(client: httpx.AsyncClient, **wanted: Any) -> str:
    """The path of a new trajectory, asked for until there is a slot."""
    async with asyncio.timeout(60):
        while (answer := await client.post("/trajectories", json=wanted)).status_code == 429:
            pass
    assert answer.status_code == 201, answer.text
    return answer.headers["Location"]


@pytest_asyncio.fixture
async def api() -> AsyncGenerator[httpx.AsyncClient, None]:
    async with opened(acquire_s=2) as client:
        yield client


async def terminal(client: httpx.AsyncClient, path: str, command: str, **more: Any) -> httpx.Response:
    return await client.post(f"{path}/calls", json={"name": "terminal", "arguments": {"command": command}, **more})


async def test_each_has_its_own_slot(api: httpx.AsyncClient):
    one, two = await granted(api), await granted(api)
    await terminal(api, one, "echo secret > note; sleep 0.1")
    answers = await asyncio.gather(terminal(api, one, "cat note"), terminal(api, two, "cat note"))
    assert answers[0].json()["result"]["output"] == "secret\n"
    assert answers[1].json()["result"]["exit_code"] == 1
    full = await api.post("/trajectories", json={})
    assert (full.status_code, full.json()["code"]) == (429, "acquire_timeout")
    assert int(full.headers["Retry-After"]) >= 1
    metrics = await api.get("/metrics")
    assert metrics.headers["content-type"] == CONTENT_TYPE
    assert 'atropos_tool_call_seconds_count{tool="terminal",result="ok"} 2' in metrics.text
    assert 'atropos_pool_slots{state="leased"} 2' in metrics.text
    assert (await api.get("/metrics", headers={"Authorization": "Bearer wrong"})).status_code == 401
    await api.delete(one)
    # its client goes away: the lease ends by itself, and the slot is had by another
    away = await granted(api, ttl_s=0.5)
    another = await granted(api)
    assert (await terminal(api, another, "ls -A")).json()["result"]["output"] == ""
    assert (await api.get(away)).status_code == 404


async def test_resent_call_runs_once(api: httpx.AsyncClient):
    path = await granted(api)
    for _ in range(3):
        await terminal(api, path, "echo x >> log", id="once")
    assert (await terminal(api, path, "wc -l < log")).json()["result"]["output"].strip() == "1"
    events = await api.post(
        f"{path}/calls",
        json={"name": "terminal", "arguments": {"command": "sleep 0.2; echo done"}},
        headers={"Accept": "text/event-stream"},
    )
    assert "event: accepted" in events.text
    assert "event: result" in events.text
    assert "done" in events.text


async def test_long_call_outlasts_drain(tmp_path: Path):
    settings = tmp_path / "executor.toml"
    settings.write_text('drain_s = 0.2\n[pool]\nbackend = "local"\nslots_per_container = 2\nmax_containers = 1\n')
    async with running("executor-server", "--config", str(settings)) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            paths = [await granted(client) for _ in range(2)]
            calls = [
                asyncio.create_task(terminal(client, paths[0], "sleep 600")),
                asyncio.create_task(
                    client.post(
                        f"{paths[1]}/calls",
                        json={"name": "terminal", "arguments": {"command": "sleep 600"}},
                        headers={"Accept": "text/event-stream"},
                    )
                ),
            ]
            async with asyncio.timeout(20):
                while [(await client.get(path)).json()["running"] for path in paths] != [1, 1]:
                    pass
            server.process.send_signal(signal.SIGTERM)
            plain, events = await asyncio.gather(*calls)
        assert (plain.status_code, plain.json()["code"]) == (410, "lease_expired"), plain.text
        assert 'event: error\ndata: {"code":"lease_expired"' in events.text
        assert await asyncio.wait_for(server.process.wait(), 20) == 0
        assert "Traceback" not in server.log


async def test_tool_server_by_two_flags():
    flags = ("--backend", "local", "--slots-per-container", "1", "--max-containers", "1", "--toolset", "all")
    async with (
        running("tool-server", *OWN) as tools,
        running("executor-server", *flags, "--tool-server-url", tools.url) as server,
        httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client,
    ):
        path = await granted(client)
        said = await client.post(f"{path}/calls", json={"name": "echo", "arguments": {"text": "hi"}})
        assert said.json()["result"]["output"] == "hi"


async def test_a_tool_server_in_process():
    site = Site()
    await site.start()
    app = create_app(ToolServerSettings(allow_hosts=(f"127.0.0.1:{site.port}",)))
    tools = build_tool_registry(["default", "web"], tool_server_url="inprocess")
    config = ToolExecutorConfig(tool_server_url="inprocess")
    try:
        async with (
            SlotPool(SlotPoolConfig(backend="local", slots_per_container=1, max_containers=1)) as pool,
            ToolExecutor(pool=pool, tools=tools, config=config, tool_server_app=lambda: app) as executor,
        ):
            assert "web_search" not in executor.tools  # no provider is configured: the model is not told of it
            page, here = await asyncio.gather(
                executor.execute("t", ToolCall(name="web_extract", arguments={"urls": [site.url("/article")]})),
                executor.execute("u", ToolCall(name="terminal", arguments={"command": "echo hi"})),
            )
            assert "leased, used, reset" in page.output
            assert here.output == "hi\n"
            refused = await executor.execute(
                "t", ToolCall(name="web_extract", arguments={"urls": ["http://169.254.169.254/latest/meta-data"]})
            )
            assert "only public addresses" in (refused.error or "")
            await executor.release_trajectory("t")
            await until(lambda: app.state.host.stats()["trajectories"] == 0)
    finally:
        await site.stop()


@pytest.fixture
def images(tmp_path: Path) -> Generator[Registry]:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    (tmp_path / "registry").mkdir()
    with registry(tmp_path / "registry") as found:
        yield found


async def test_trajectory_names_an_image(tmp_path: Path, images: Registry):
    busybox_image(tmp_path / "layout", "from the image")
    images.push(tmp_path / "layout", "busy:1")
    name = f"{images.host}/busy:1"
    store = ImageStoreSettings(folder=str(tmp_path / "store"), insecure_registries=(images.host,))
    pool = SlotPoolConfig(slots_per_container=2, min_containers=1, max_containers=1, image_store=store)
    async with opened(pool=pool, acquire_s=10) as client:

        async def prepared(image: str, **more: Any) -> dict[str, Any]:
            answer = await client.post("/prepare", json={"image": image, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await prepared(name, wait_s=0)
        assert first["phase"] in {"queued", "pulling", "unpacking"}
        states = [first]
        async with asyncio.timeout(60):
            while states[-1]["phase"] != "ready":
                states.append(await prepared(name, wait_s=1))
        assert states[-1]["image"]["env"]["GREETING"] == "from the image"
        path = await granted(client, image=name, trajectory_id="t")
        shown = await terminal(client, path, "cat text; pwd; echo $GREETING")
        assert shown.json()["result"]["output"] == "from the image/srv/app\nfrom the image\n"
        assert (await client.post("/trajectories", json={"image": name, "trajectory_id": "t"})).status_code == 200
        other = await client.post("/trajectories", json={"trajectory_id": "t"})
        assert (other.status_code, other.json()["code"]) == (409, "trajectory_id_reused")
        absent = f"{images.host}/absent:1"
        failed = await prepared(absent, wait_s=60)
        assert (failed["phase"], "manifest unknown" in failed["error"]) == ("failed", True)
        refused = await client.post("/trajectories", json={"image": absent})
        assert (refused.status_code, refused.json()["code"]) == (404, "image_unavailable")
        for bad in (f"dir:{tmp_path}", f"oci:{tmp_path}/layout", "docker-daemon:x", "not a name"):
            for where in ("/prepare", "/trajectories"):
                answer = await client.post(where, json={"image": bad})
                assert answer.status_code == 422, answer.text
