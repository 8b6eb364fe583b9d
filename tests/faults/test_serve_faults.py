"""`serve` while everything fails: each item reaches the trainer as it was sampled, or a line says why it didn't.

A fifth of the sandboxes is killed, whole containers are, a fifth of the ToolServer's and of run-api's answers are
refused or lost, and one generation in twenty (a fifth of all trajectories, by their turns) is broken off, refused,
reset or never answered. The env process, run-api and the ToolServer are real. `ATROPOS_SERVE_S=N` goes on for N seconds
(12 by default; 3600 is the hour that is run by hand), and until each kind of fault has struck.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer, Settings
from examples.policy.tokenizer import FOLDER
from examples.policy.truth import Truth
from examples.serve.processes import Trainer, ended, flags, run_api
from tests.e2e.hermes_support import sampled
from tests.e2e.servers import OWN, TOKEN, running
from tests.e2e.test_demo_endings import containers, left_by
from tests.e2e.test_env_faults import MEMBERS, TURNS
from tests.faults.http_faults import HttpFaults
from tests.processes import alive, descendants
from tests.waiting import until
from tests.web_app import serving

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("ATROPOS_SERVE_S", "12"))
STRUCK_S = 120.0
"""How much longer a loaded machine gets until each kind of fault has struck."""
CONTAINER_EVERY_S = 8.0 if SECONDS < 300 else 30.0
ANSWER_S = 0.1 if SECONDS < 300 else 1.0
"""What a generation takes."""
MODEL_FAULTS = ("abort", "error", "unfinished", "503", "reset", "slow")
SCORES = [(1 + member) / MEMBERS for member in range(MEMBERS)]


@contextlib.asynccontextmanager
async def flaky_policy(log: Path):
    """A policy server whose fault changes all the time."""
    server = PolicyServer(Policy(TASKS, mistakes=0.0), Settings(delay_s=ANSWER_S, delay_spread=0.5), log)

    async def change() -> None:
        for fault in itertools.cycle(MODEL_FAULTS):
            server.settings = replace(server.settings, fault=fault, fault_rate=0.01 if fault == "slow" else 0.06)
            await asyncio.sleep(0.7)

    async with serving(server.application()) as url:
        changing = asyncio.create_task(change())
        try:
            yield f"{url}/v1"
        finally:
            changing.cancel()


@contextlib.asynccontextmanager
async def env_process(folder: Path, policy: str, api: str, tools: str):
    env = {
        "tool_pool_mode": "local",
        "tokenizer_name": FOLDER,
        "rollout_server_url": api,
        "tool_server_url": tools,
        "tool_server_token": TOKEN,
        "group_size": MEMBERS,
        "slots_per_container": 8,
        "min_containers": 2,
        "max_containers": 2,
        "slot_memory_mib": 256,
        "max_token_length": 30_000,
        "trajectory_retries": 12,
        "model_retries": 3,
        "model_timeout_s": 8,
        "outage_s": 120,
        "seed": 3,
        "ensure_scores_are_not_same": "false",
        "include_messages": "true",
        "allow_network": "false",
        "use_wandb": "false",
    }
    model = {"base_url": policy, "server_type": "vllm", "model_name": "scripted-policy", "api_key": "x"}
    with (folder / "env.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.faults.faulty_env", "serve", *flags("env", env), *flags("openai", model)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "ATROPOS_TEST_JOURNAL": str(folder / "journal.jsonl")},
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await ended(process)


async def kill_containers(env: asyncio.subprocess.Process, killed: list[int], received: Counter[str]) -> None:
    """Kill one every few seconds, once a group has come since the last: on a busy machine none would ever be finished."""
    had = -1
    while True:
        await asyncio.sleep(CONTAINER_EVERY_S)
        found = containers(env.pid)
        if len(found) > 1 and received.total() > had:
            had = received.total()
            pid = found[len(killed) % len(found)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)


def check(group: dict, truth: Truth) -> None:
    assert group["scores"] == SCORES, "scored by a fault"
    for index in range(MEMBERS):
        runs = sampled(group, index)
        assert len(runs) == TURNS + 1
        assert all(run in truth for run in runs)


def item_of(group: dict) -> str:
    return re.search(r"item-\d+", group["messages"][0][0]["content"] + group["messages"][0][1]["content"])[0]


@pytest.mark.timeout(SECONDS + STRUCK_S + 240)
async def test_no_fault_scores_an_item(tmp_path):
    truth = Truth(tmp_path / "truth.jsonl")
    received: Counter[str] = Counter()
    killed: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        policy = await stack.enter_async_context(flaky_policy(tmp_path / "truth.jsonl"))
        api = await stack.enter_async_context(run_api())
        tool_server = await stack.enter_async_context(running("tool-server", *OWN))
        lossy_api = HttpFaults(api.url, rate=0.2, paths=("/scored_data",))
        lossy_tools = HttpFaults(tool_server.url, rate=0.2, paths=("/execute", "/batch"))
        api_url = await stack.enter_async_context(lossy_api.running())
        tools_url = await stack.enter_async_context(lossy_tools.running())
        trainer = await stack.enter_async_context(Trainer(api.url, batch_size=2 * MEMBERS))
        env = await stack.enter_async_context(env_process(tmp_path, policy, api_url, tools_url))
        killing = asyncio.create_task(kill_containers(env, killed, received))
        started = time.monotonic()

        async def take() -> bool:
            batch = await trainer.batch()
            for group in batch or ():
                check(group, truth)
                received[item_of(group)] += 1
            return batch is not None

        def struck() -> bool:
            return len(lossy_api.struck) == len(lossy_tools.struck) == 3 and bool(received and killed)

        while (elapsed := time.monotonic() - started) < SECONDS or (elapsed < SECONDS + STRUCK_S and not struck()):
            assert env.returncode is None, (tmp_path / "env.log").read_text()[-3000:]
            if not await take():
                await asyncio.sleep(0.2)
        killing.cancel()
        below = set(descendants(env.pid))
        env.terminate()
        async with asyncio.timeout(60):
            assert await env.wait() == 128 + signal.SIGTERM
            while await take():
                pass
        async with aiohttp.ClientSession() as session, session.get(f"{api.url}/status") as answer:
            queued = (await answer.json())["queue_size"]  # a batch is two groups: an odd one stays
    log = (tmp_path / "env.log").read_text()
    journal = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    given = [entry["given"] for entry in journal if "given" in entry]
    counted, sandboxes = next((entry["metrics"], entry["killed"]) for entry in journal if "metrics" in entry)
    dropped = set(re.findall(r"group (item-\d+) dropped", log))
    lost = log.count("group(s) lost")
    doubled = sum(received.values()) - len(received)
    print(
        f"\n{len(given)} items: {len(received)} with the trainer ({doubled} doubled), {queued} queued, {len(dropped)} dropped, "
        f"{lost} lost on the way; {sandboxes} sandboxes and {len(killed)} containers killed; run-api "
        f"{dict(lossy_api.struck)}, ToolServer {dict(lossy_tools.struck)}; {counted}"
    )
    assert sandboxes
    assert killed
    assert received
    assert len(lossy_api.struck) == len(lossy_tools.struck) == 3
    assert not [entry for entry in journal if "twice" in entry], "a call ran twice"
    assert doubled <= counted["env/groups_maybe_sent_twice"]
    rest = set(given) - set(received) - dropped  # was under way when the env was ended
    assert len(rest) <= queued + lost + counted["env/groups_cancelled"]
    await until(lambda: not alive(below), "the end of every process of it")
    assert left_by(env.pid) == []
