"""Traces of real runs, as a real OTLP/HTTP receiver gets them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from atropos import tracing
from atropos.api.executor.models import ExecutorServerSettings
from atropos.api.executor_api import create_executor_app
from atropos.envs import HermesAgentBaseEnv
from atropos.errors import ConfigError
from atropos.slots import SlotPoolConfig
from tests.e2e.hermes_support import call, make, running_policy, script
from tests.settings import shows

SECRET = "pa55word-in-a-command"
WORKS = script(
    {"calls": [call("terminal", command=f"echo {SECRET}; sleep 0.2")]},
    {"calls": [call("terminal", command=f"exit 3 # {SECRET}")]},
    f"finished {SECRET}",
)
SERVER, CLIENT = 2, 3
"""OTLP's numbers of span kinds."""


class Env(HermesAgentBaseEnv):
    name = "traced"

    async def setup(self):
        self.rows = self.load_rows()

    async def get_next_item(self):
        return next(self.rows, None)

    async def compute_reward(self, item, result, ctx):
        return 1.0


@pytest.fixture
async def receiver(tmp_path, monkeypatch):
    """(its URL, the file that it writes)."""
    monkeypatch.setattr(tracing, "EXPORT_S", 60.0)  # a stalled receiver has each span in the end
    file = tmp_path / "spans.jsonl"
    file.touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("otlp_receiver.py")), str(file), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 60))
        yield f"http://127.0.0.1:{port}", file
    finally:
        process.kill()
        await process.wait()


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@shows("otlp_endpoint")
@pytest.mark.timeout(180)
async def test_a_trajectory_is_one_trace(receiver, tmp_path):
    url, file = receiver
    async with running_policy(tmp_path) as policy:
        env = make(Env, policy, tmp_path, [{"prompt": WORKS}], otlp_endpoint=url, tool_server_token="s3cret-token")
        await env.process_manager()
    assert tracing.traceparent() is None
    spans = read(file)
    by_id = {span["id"]: span for span in spans}
    assert {span["service"] for span in spans} == {"traced"}

    def chain(span: dict) -> list[str]:
        names: list[str] = []
        while span is not None:
            names.append(span["name"])
            span = by_id.get(span["parent"])
        return names

    roots = [span for span in spans if span["name"] == "invoke_agent traced"]
    assert len(roots) == 2  # a group of two
    assert len({root["trace"] for root in roots}) == 2
    for root in roots:
        assert root["attributes"]["atropos.score"] == 1.0
        assert root["attributes"]["gen_ai.operation.name"] == "invoke_agent"
    calls = [span for span in spans if span["name"] == "execute_tool terminal"]
    assert len(calls) == 4
    for one in calls:
        assert one["attributes"]["gen_ai.tool.name"] == "terminal"
        assert one["attributes"]["gen_ai.conversation.id"] in {r["attributes"]["gen_ai.conversation.id"] for r in roots}
        assert by_id[one["parent"]]["name"] == "invoke_agent traced"
    failed = [span["attributes"]["error.type"] for span in calls if span["status"] == 2]
    assert failed == ["tool_error", "tool_error"]
    served = [s for s in spans if s["name"].startswith("sandbox ") and "execute_tool terminal" in chain(s)]
    assert {span["kind"] for span in served} == {SERVER}
    assert all(by_id[span["parent"]]["kind"] == CLIENT for span in served)
    longest = max(served, key=lambda span: span["attributes"]["atropos.ran_s"])
    assert 0.2 <= longest["attributes"]["atropos.ran_s"] <= by_id[longest["parent"]]["seconds"]
    for name in ("chat", "hook compute_reward", "acquire slot"):
        assert any("invoke_agent traced" in chain(span) for span in spans if span["name"] == name), name

    text = file.read_text()
    for secret in (SECRET, "s3cret-token", "finished"):
        assert secret not in text
    assert not any(span["events"] or span["message"] for span in spans)


async def test_calls_join_callers_trace(receiver):
    url, file = receiver
    pool = SlotPoolConfig(backend="local", slots_per_container=1, max_containers=1)
    app = create_executor_app(ExecutorServerSettings(token=SecretStr("x"), pool=pool, otlp_endpoint=url))
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        headers = {"Authorization": "Bearer x"}
        async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers, timeout=60) as client:
            where = (await client.post("/trajectories", json={})).headers["Location"]
            body = {"name": "terminal", "arguments": {"command": "true"}}
            parent = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            assert (await client.post(f"{where}/calls", json=body, headers=parent)).status_code == 200
            broken = {"traceparent": "nonsense"}
            assert (await client.post(f"{where}/calls", json=body, headers=broken)).status_code == 200
    mine = [span for span in read(file) if span["trace"] == trace]
    assert {"execute_tool terminal", "exec", "sandbox exec"} <= {span["name"] for span in mine}
    assert next(s for s in mine if s["name"] == "execute_tool terminal")["parent"] == "b7ad6b7169203331"


def test_a_bad_endpoint_is_refused():
    with pytest.raises(ConfigError, match=r"otlp_endpoint: '127\.0\.0\.1:4318' is no URL; write http://"):
        tracing.start("127.0.0.1:4318", "env")


async def test_lost_collector_is_no_cost():
    running = tracing.start("http://127.0.0.1:9", "alone")
    try:
        with pytest.raises(ConfigError, match="already sends its spans"):
            tracing.start("http://127.0.0.1:9", "again")
        started = time.monotonic()
        for _ in range(1000):
            with tracing.span("x"), contextlib.suppress(ValueError):
                raise ValueError("boom")
        assert time.monotonic() - started < 60, "a thousand exports that fail would take longer"
    finally:
        async with asyncio.timeout(60):
            await asyncio.to_thread(running.close)
    assert tracing.span("off") is tracing.span("off again", gen_ai__tool__name="x")
