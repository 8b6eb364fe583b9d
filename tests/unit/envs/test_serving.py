"""What `serve` hands to the trajectory API arrives whole, or is counted and said to be lost."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json

import pytest
from aiohttp import web

from atropos.envs.adapter import TrajectoryApiLost
from atropos.errors import ConfigError
from tests.unit.envs.support import ScriptEnv, make


@contextlib.asynccontextmanager
async def trajectory_api(*statuses: int, batch_size: int = 8, delay_s: float = 0.0):
    """An API that answers what it is sent with these, one after the other, and then with 200."""
    answers, taken = list(statuses), []

    async def take(request):
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        await asyncio.sleep(delay_s)
        status = answers.pop(0) if answers else 200
        if status == 200:
            taken.append(json.loads(body))
        return web.json_response({"status": "received"}, status=status)

    async def info(_request):
        return web.json_response({"batch_size": batch_size, "max_token_len": 1000})

    app = web.Application()
    app.router.add_post("/scored_data", take)
    app.router.add_get("/info", info)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", taken
    finally:
        await runner.cleanup()


def env_at(api: str, **settings):
    return make(ScriptEnv, "http://127.0.0.1:9/v1", None, rollout_server_url=api, **settings)


def group():
    numbers = [[1, 2, 3]] * 3
    return {
        "tokens": numbers,
        "masks": numbers,
        "inference_logprobs": [[-0.5] * 3] * 3,
        "scores": [0.0, 1.0, 1.0],
        "messages": None,
        "group_overrides": {},
        "atropos": {"item": "x", "trajectories": []},
    }


@pytest.mark.parametrize(
    ("statuses", "unsent"), [((), {}), ((503,), {}), ((422,), {"refused": 1}), ((503, 502, 500), {"send_failed": 1})]
)
async def test_a_group_arrives_or_is_said_to_be_lost(statuses, unsent, caplog):
    async with trajectory_api(*statuses) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        await env.handle_send_to_api(group(), {"name": "x"})
    assert dict(env.metrics.unsent) == unsent
    assert len(taken) == (0 if unsent else 1)
    assert ("lost" in caplog.text) is bool(unsent)
    assert all("atropos" not in sent for sent in taken)


async def test_a_finished_group_is_sent_though_its_worker_is_cancelled():
    async with trajectory_api(delay_s=0.3) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        worker = asyncio.create_task(env.handle_send_to_api(group(), {"name": "x"}))
        await asyncio.sleep(0.1)
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker
    assert len(taken) == 1


@pytest.mark.parametrize(("batch", "size"), [(4, 3), (2, 3)])
async def test_sizes_of_which_no_batch_is_ever_made_are_refused_by_name(batch, size):
    async with trajectory_api(batch_size=batch) as (api, _):
        env = env_at(api, group_size=size)
        with pytest.raises(ConfigError, match=r"env\.group_size"):
            await env.get_server_info()


async def test_the_trainers_limit_bounds_every_trajectory():
    async with trajectory_api(batch_size=9) as (api, _):
        env = env_at(api, max_token_length=4000)
        await env.get_server_info()
        assert env.context_tokens == 999


async def test_a_trajectory_api_that_is_gone_is_one_line():
    env = env_at("http://127.0.0.1:9")
    env.env_id = 0
    with pytest.raises(TrajectoryApiLost, match="rollout_server_url"):
        await env.get_status()
