"""256 trajectories at once in one env process: what the event loop suffers, and where the time goes.

A whole `process` run on real slots: the scripted policy is another process and takes `MODEL_S` for each answer, tools
are terminal calls. Two clocks watch the loop: how late a timer fires (on a machine with more work than cores that is
the machine's lateness as well), and how much CPU the loop's thread spent between two turns of the timer (which is ours
alone).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from examples.serve.processes import free_port, policy, program

from .stats import Row, row

TRAJECTORIES, GROUP, TURNS = 256, 4, 6
MODEL_S = 4.0
"""Seconds of a model's answer on average, short for one."""
SPREADS = {"answers take 2 to 6 s": 0.5, "all answers at the same moment": 0.0}
"""By which part of `MODEL_S` answers differ. Models' answers differ in length; that none does is the worst case."""
TICK_S = 0.005
TOKEN = "benchmark"
LOOKING = """
import http.client, sys, time, urllib.request
url, token = sys.argv[1:]
while True:
    try:
        request = urllib.request.Request(url + "/live", headers={"Authorization": "Bearer " + token})
        urllib.request.urlopen(request).read()
    except (OSError, http.client.HTTPException):
        pass  # the env starts, or ends
    time.sleep(2)
"""
"""What an open live page asks for, every two seconds."""


class Watch:
    """A timer in the loop, and what it saw: lateness, and CPU seconds of the loop's thread in between."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.busy: list[float] = []
        self.cpu = self.wall = 0.0

    async def run(self) -> None:
        began, began_cpu = time.perf_counter(), time.thread_time()
        while True:
            due, cpu = time.perf_counter() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.late.append(max(0.0, time.perf_counter() - due))
            self.busy.append(time.thread_time() - cpu)
            self.cpu, self.wall = time.thread_time() - began_cpu, time.perf_counter() - began


def make(url: str, path: Path, trajectories: int, **settings: Any) -> Any:
    """An env whose model makes a terminal call a turn, and then answers."""
    from atropos.envs import AgentEnv, AgentEnvConfig, APIServerConfig
    from examples.policy.tokenizer import FOLDER

    calls = [{"calls": [{"name": "terminal", "arguments": {"command": f"echo {n}; ls -la /"}}]} for n in range(TURNS)]

    class Env(AgentEnv):
        name = "load"

        async def get_next_item(self) -> Any:
            self.begun = getattr(self, "begun", 0) + 1
            return {"name": f"item-{self.begun}"}

        def build_task(self, item: Any) -> str:  # noqa: ARG002 - every item is alike
            return f"```policy\n{json.dumps([*calls, 'done'])}\n```"

        async def score_trajectory(self, item: Any, final_response: str) -> float:  # noqa: ARG002 - as above
            return 1.0

    config = AgentEnvConfig(
        tool_pool_mode="local",
        tokenizer_name=str(FOLDER),
        group_size=GROUP,
        total_steps=trajectories // GROUP,
        slots_per_container=trajectories // 4,
        min_containers=4,
        max_containers=4,
        acquire_timeout_s=120,
        slot_memory_mib=64,
        allow_network=False,
        include_messages=True,
        ensure_scores_are_not_same=False,
        use_wandb=False,
        data_path_to_save_groups=str(path),
        **settings,
    )
    return Env(config, [APIServerConfig(base_url=url, server_type="vllm", model_name="m", api_key="x")])


@contextlib.asynccontextmanager
async def looked_at() -> AsyncIterator[dict[str, Any]]:
    """Settings of an env with a dashboard, whose live page somebody has open: another process asks as the page does."""
    port = free_port()
    async with program("-c", LOOKING, f"http://127.0.0.1:{port}", TOKEN):
        yield {"dashboard_port": port, "dashboard_token": TOKEN}


async def measure(
    trajectories: int = TRAJECTORIES, spread: float = 0.5, **settings: Any
) -> tuple[Watch, dict[str, float]]:
    """One run; the watch, and seconds of all trajectories together by where they went."""
    watch, seconds = Watch(), {"all": 0.0, "model": 0.0, "tools": 0.0, "own": 0.0}

    def see(event: Any) -> None:
        if event.kind == "trajectory":
            rollout = event.rollout
            seconds["all"] += rollout.seconds
            for name in ("model", "tools"):
                seconds[name] += rollout.phases[name]
            seconds["own"] += rollout.seconds - rollout.phases["model"] - rollout.phases["tools"]

    with tempfile.TemporaryDirectory() as folder:
        async with policy(f"--delay={MODEL_S}", f"--delay-spread={spread}") as server:
            env = make(server.ready["base_url"], Path(folder) / "groups.jsonl", trajectories, **settings)
            env.observers.append(see)
            started = env.setup_agent_env

            async def set_up() -> None:
                await started()
                tasks.append(asyncio.create_task(watch.run()))

            tasks: list[asyncio.Task[None]] = []
            env.setup_agent_env = set_up
            try:
                await env.process_manager()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return watch, seconds


async def rows(trajectories: int) -> AsyncIterator[Row]:
    """Lateness of the loop, CPU between two turns of it, and the shares."""
    for told, spread in SPREADS.items():
        watch, seconds = await measure(trajectories, spread)
        case = f"event loop, {trajectories} trajectories, {told}"
        share = seconds["own"] / seconds["all"]
        note = f"outside model and tools: {share:.1%} of {seconds['all']:.0f} s; loop busy {watch.cpu / watch.wall:.0%}"
        extra = {"seconds": seconds, "share_outside": share, "loop_cpu_s": watch.cpu, "wall_s": watch.wall}
        yield row(case, "atropos, a timer's lateness", watch.late, base=True, note=note, extra=extra)
        yield row(case, "atropos, the loop's own CPU", watch.busy, base=True)  # no peer of the timer's lateness


async def dashboard_rows(trajectories: int, rounds: int) -> AsyncIterator[Row]:
    """The loop's share of a core with the dashboard open and without it, in turns, and CPU of the same work."""
    shares: dict[str, list[float]] = {"no dashboard": [], "dashboard, live page open": []}
    spent: dict[str, list[float]] = {name: [] for name in shares}
    for _ in range(rounds):
        for name, share in shares.items():
            async with looked_at() if "open" in name else contextlib.nullcontext({}) as settings:
                watch, _ = await measure(trajectories, **settings)
            share.append(watch.cpu / watch.wall)
            spent[name].append(watch.cpu)
    plain, watched = (statistics.median(values) for values in shares.values())
    case = f"dashboard, {trajectories} trajectories"
    for name, values in spent.items():
        note = (
            ""
            if name == "no dashboard"
            else f"the loop's share of a core {plain:.1%} -> {watched:.1%}: {watched - plain:+.2%}"
        )
        extra = {"shares": shares[name], "loop_cpu_s": values}
        yield row(case, f"{name}: CPU of the loop", values, base=name == "no dashboard", note=note, extra=extra)
