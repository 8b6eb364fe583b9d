"""Truth 4 in a whole env: sandboxes killed at random and a flaky inference server change no score and lose no group."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal

from aiohttp import web

from atropos.envs import AgentEnvConfig, APIServerConfig
from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer, Settings
from examples.policy.tokenizer import FOLDER
from tests.e2e.script_env import ScriptEnv
from tests.e2e.test_demo_endings import alive, children, name

GROUPS = 8


class SlowScriptEnv(ScriptEnv):
    """Two calls and a pause, so that a killer finds trajectories at work; the score depends on item and member."""

    def build_task(self, item):
        calls = [
            {"name": "terminal", "arguments": {"command": f"sleep 0.1; echo {item['name']} >> answer; cat answer"}}
        ]
        look = [{"name": "terminal", "arguments": {"command": "sleep 0.1; cat answer"}}]
        return f"```policy\n{json.dumps([{'calls': calls}, {'calls': look}, 'done'])}\n```"

    async def get_next_item(self):
        number = next(self.numbers)
        return {"name": f"item-{number}"} if number < GROUPS else None

    async def setup_agent_env(self):
        self.numbers = itertools.count()


@contextlib.asynccontextmanager
async def policy(log, **faults):
    server = PolicyServer(Policy(TASKS), Settings(**faults), log)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def run(tmp_path, label: str, *, killed: int, **faults):
    """The groups by item, the env and how many sandboxes were killed."""
    path, truth = tmp_path / f"{label}.jsonl", tmp_path / f"{label}.truth"
    async with policy(truth, **faults) as url:
        config = AgentEnvConfig(
            tool_pool_mode="local",
            tokenizer_name=str(FOLDER),
            slots_per_container=4,
            min_containers=2,
            max_containers=2,
            group_size=4,
            include_messages=True,
            ensure_scores_are_not_same=False,
            use_wandb=False,
            trajectory_retries=12,
            model_retries=4,
            model_timeout_s=60,
            slot_memory_mib=256,
            allow_network=False,
            data_path_to_save_groups=str(path),
        )
        env = SlowScriptEnv(config, [APIServerConfig(base_url=url, server_type="vllm", model_name="m", api_key="x")])
        killer = asyncio.create_task(kill_sandboxes(env, killed))
        try:
            await env.process_manager()
        finally:
            killer.cancel()
            count = (await asyncio.gather(killer, return_exceptions=True))[0]
    groups = {group["atropos"]["item"]: group for group in map(json.loads, path.read_text().splitlines())}
    entries = {
        (tuple(e["prompt"]), tuple(e["ids"]), tuple(e["logprobs"]))
        for e in map(json.loads, truth.read_text().splitlines())
    }
    return groups, entries, env, count


async def kill_sandboxes(env, count: int) -> int:
    """`count` times, at a moment when trajectories hold slots, one of the sandboxes, whoever has it."""
    rng = random.Random(4)
    done = 0
    while done < count:
        await asyncio.sleep(0.1)
        if env.pool is None or not env.pool.stats().leased:
            continue
        found = [pid for pid in children(os.getpid()) if name(pid).startswith("bwrap")]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
            done += 1
    return done


async def test_killed_sandboxes_and_a_flaky_server_change_no_score_and_lose_no_group(tmp_path):
    quiet, _, _, _ = await run(tmp_path, "quiet", killed=0)
    stormy, entries, env, killed = await run(tmp_path, "stormy", killed=8, fault="503", fault_rate=0.1)
    assert killed == 8
    assert set(stormy) == set(quiet) == {f"item-{n}" for n in range(GROUPS)}
    for item, group in stormy.items():
        assert group["scores"] == quiet[item]["scores"] == [1.0, 0.0, 1.0, 0.0]
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(logprobs)
            starts = [i for i in range(len(masks)) if masks[i] != -100 and (i == 0 or masks[i - 1] == -100)]
            for start in starts:
                end = next((i for i in range(start, len(masks)) if masks[i] == -100), len(masks))
                assert (tuple(tokens[:start]), tuple(tokens[start:end]), tuple(logprobs[start:end])) in entries
            assert len(starts) == 3
    assert not env.metrics.dropped
    await nothing_left()


async def nothing_left() -> None:
    """No sandbox of this process is left; what was just killed may need a moment to be reaped."""
    async with asyncio.timeout(15):
        while any(name(pid).startswith("bwrap") for pid in alive(children(os.getpid()))):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
