from __future__ import annotations

import contextlib
import json

import pytest
from aiohttp import web

from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer, Settings


class RunningPolicy:
    """The policy server in this loop, over real HTTP, with a log of every token it sampled."""

    def __init__(self, url, log):
        self.url = url
        self._log = log

    def truth(self):
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []


@contextlib.asynccontextmanager
async def running_policy(log, **settings):
    runner = web.AppRunner(
        PolicyServer(Policy(TASKS), Settings(**settings), log).application(), access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield RunningPolicy(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", log)
    finally:
        await runner.cleanup()


@pytest.fixture
async def policy(tmp_path):
    async with running_policy(tmp_path / "truth.jsonl") as running:
        yield running


@pytest.fixture
def faulty_policy(tmp_path):
    """A context manager: the policy with a fault, `faulty_policy(fault="503", fault_rate=0.3)`."""
    return lambda **settings: running_policy(tmp_path / "truth.jsonl", **settings)
