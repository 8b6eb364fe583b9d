"""Truth 6: every queue, output, journal and cache has a bound; reaching it has a defined, visible effect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from atropos import wire
from atropos.api.e2b import messages, processes
from atropos.api.e2b.sandboxes import Sandboxes
from atropos.api.executor.models import ExecutorServerSettings
from atropos.errors import AcquireTimeout
from atropos.slots import LeaseLimits
from tests.unit.api.account import own_account
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


def rss_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text()
    return int(fields.partition("VmRSS:")[2].split()[0]) / 1024


async def test_floods_of_output_are_cut(shared_pool):
    pool = shared_pool
    slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
    try:
        server = int(slots[0].container.partition("-")[0])
        flood = "echo head; head -c 60000000 /dev/zero | tr '\\0' x; echo; echo tail"
        await slots[0].exec(flood)
        before = rss_mib(server)
        results = await asyncio.gather(*(slot.exec(flood) for slot in slots))
        for result in results:
            assert (result.exit_code, result.truncated, result.limit) == (0, True, "output")
            assert result.output.startswith("head\n")
            assert result.output.endswith("tail\n")
            assert len(result.output_bytes) <= pool.config.limits.output_bytes + 10_000
            assert result.dropped_bytes + len(result.output_bytes) >= 60_000_000
        assert rss_mib(server) < before + 64
    finally:
        await asyncio.gather(*(slot.release() for slot in slots))


async def test_waiting_is_bounded(shared_pool):
    pool = shared_pool
    async with pool.lease("1"), pool.lease("2"), pool.lease("3"), pool.lease("4"):
        waits = [pool.acquire(f"t{n}", timeout_s=0.3) for n in range(500)]
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(result, AcquireTimeout) for result in results)
        assert "4 leased" in str(results[0])
        assert pool.stats().waiting == 0


async def test_thousand_calls_at_once(shared_pool):
    async with shared_pool.lease("t") as slot:
        results = await asyncio.gather(*(slot.run(wire.WriteFile(path=f"f{n % 7}", data=b"x")) for n in range(1000)))
        assert {result.kind for result in results} == {"done"}


async def test_a_limit_is_named(shared_pool):
    for command, limit, limits in [
        ("head -c 100000000 /dev/zero > f", "disk", LeaseLimits(disk_mib=16)),
        ("for i in $(seq 3000); do : > f$i || exit 1; done", "inodes", LeaseLimits(inodes=1500)),
        ("sleep 1000", "time", LeaseLimits(wall_s=3.0 * SLOWNESS)),
    ]:
        async with shared_pool.lease(limit, limits=limits) as slot:
            assert (await slot.exec(command)).limit == limit
            assert (await slot.exec("echo usable")).output == "usable\n"


async def test_e2b_api_forgets_commands(shared_pool):
    sandboxes = Sandboxes(shared_pool, ExecutorServerSettings(token=SecretStr("t")), own_account())
    sandbox = await sandboxes.create("base", timeout_s=60, metadata={}, env={}, hosts=None)
    waits = "until [ -e /tmp/go ]; do sleep 0.02; done"
    message = messages.parse(messages.Start, json.dumps({"process": {"cmd": "sh", "args": ["-c", waits]}}).encode())
    for _ in range(3):
        async with contextlib.aclosing(
            processes.start(sandbox, message, user=None, deadline_s=1000, ping_s=30)
        ) as events:
            assert "start" in (await anext(events))["event"]
    assert len(sandbox.commands) == 3
    await sandbox.slot.exec("touch /tmp/go")
    await until(lambda: not sandbox.commands and not sandbox.tasks, "nothing is kept of commands that have ended")
    await sandboxes.aclose()
