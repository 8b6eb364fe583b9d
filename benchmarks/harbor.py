"""The same tasks by the published `harbor`, whose oracle agent runs their solutions: on Docker, and on slots.

Needs `scripts/peers.sh` and Docker: `scripts/engines.py docker python -m benchmarks --only harbor`. Docker's images are
built ahead, outside of the time; ours are built within it. Where `docker compose` is missing, `plain_docker` stands in
and is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import re
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import docker_peer, ours
from .context import Context
from .stats import Row, row

ROOT = Path(__file__).resolve().parent.parent
HARBOR = ROOT / ".peers" / "bin" / "harbor"
TASKS, ROUNDS = 20, int(os.environ.get("ATROPOS_BENCH_ROUNDS", "3"))
BASE, IMAGE_PREFIX = "atropos-bench-root", "atropos-bench-task-"
SAMPLE_S = 0.5
"""How often memory is looked at."""

DOCKERFILE = f"""\
FROM {BASE}
WORKDIR /workspace
COPY . .
RUN if [ -f setup.sh ]; then cp setup.sh /tmp/setup.sh && rm setup.sh && bash /tmp/setup.sh && rm /tmp/setup.sh; fi
"""


@dataclass
class Job:
    """One `harbor run`.

    Attributes:
        trials: whose reward is 1.
        wall_s: from the first trial's start to the last one's end.
        outside_s: of each trial: its seconds less those of its agent.
        peak_bytes: proportional set size of all that it started, at its height.
        phases_s: medians of what Harbor times of a trial.
    """

    trials: int
    wall_s: float
    outside_s: list[float]
    peak_bytes: int
    phases_s: dict[str, float] = field(default_factory=dict[str, float])


def make_tasks(folder: Path, count: int, *, docker: bool) -> Path:
    """Copies of the example tasks that need no registry, with the verifier in the agent's environment and a network.

    With `docker` each names an image that `build` makes of its environment.
    """
    chosen = [
        task for task in sorted((ROOT / "examples/tasks").iterdir()) if not (task / "environment/Dockerfile").exists()
    ]
    for task in chosen[:count]:
        copy = folder / task.name
        shutil.copytree(task, copy)
        text = (copy / "task.toml").read_text()
        unwanted = "environment_mode|allow_internet" + ("|docker_image" if docker else "")
        text = re.sub(rf"^({unwanted}).*\n", "", text, flags=re.MULTILINE)
        if docker:
            (copy / "environment/Dockerfile").write_text(DOCKERFILE)
            text = text.replace("[environment]\n", f'[environment]\ndocker_image = "{IMAGE_PREFIX}{task.name}"\n')
        (copy / "task.toml").write_text(text)
    return folder


async def build(tasks: Path) -> None:
    """Build each task's image, on the root that slots have in the sandbox image."""
    packed = f"docker run --rm --entrypoint tar {docker_peer.IMAGE} -C /rootfs --owner=0 --group=0 -c ."
    process = await asyncio.create_subprocess_exec(
        *("bash", "-o", "pipefail", "-c", f"{packed} | docker import --change 'ENV LANG=C.UTF-8' - {BASE}"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    if await process.wait() != 0:
        raise RuntimeError("the root of the sandbox image could not be imported")
    for task in sorted(tasks.iterdir()):
        await docker_peer.run("build", "--quiet", "--tag", f"{IMAGE_PREFIX}{task.name}", str(task / "environment"))


def docker_processes() -> set[int]:
    """The engine, the shims of its containers, and all below them."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and any(
            name in ours.command_line(int(entry.name)).partition(" ")[0] for name in ("dockerd", "containerd")
        ):
            found |= {int(entry.name), *ours.children(int(entry.name))}
    return found


async def watch_memory(pid: int, peaks: list[int], *, docker: bool) -> None:
    """Keep the most memory that a job and, with `docker`, its engine take beyond what the engine took before."""

    def total() -> int:
        pids = {pid, *ours.children(pid)} | (docker_processes() if docker else set())
        return sum(map(ours.pss_bytes, pids))

    before = await asyncio.to_thread(lambda: sum(map(ours.pss_bytes, docker_processes()))) if docker else 0
    while True:
        peaks.append(await asyncio.to_thread(total) - before)
        await asyncio.sleep(SAMPLE_S)


def _seconds(timing: dict[str, str]) -> tuple[float, float]:
    started, ended = (dt.datetime.fromisoformat(timing[name]).timestamp() for name in ("started_at", "finished_at"))
    return started, ended


def read(jobs: Path) -> Job:
    """What Harbor wrote of its trials.

    Raises:
        RuntimeError: a trial has another reward than 1.
    """
    job, times = Job(0, 0, [], 0), list[float]()
    phases: defaultdict[str, list[float]] = defaultdict(list)
    for file in jobs.glob("*/*/result.json"):
        result: dict[str, Any] = json.loads(file.read_text())
        if ((result.get("verifier_result") or {}).get("rewards") or {}).get("reward") != 1:
            raise RuntimeError(f"{file.parent.name}: {(result.get('exception_info') or {}).get('exception_message')}")
        began, ended = _seconds(result)
        agent = _seconds(result["agent_execution"])
        times += [began, ended]
        job.outside_s.append(ended - began - (agent[1] - agent[0]))
        job.trials += 1
        for name in ("environment_setup", "agent_setup", "agent_execution", "verifier"):
            started, over = _seconds(result[name])
            phases[name].append(over - started)
    job.phases_s = {name: statistics.median(seconds) for name, seconds in phases.items()}
    job.wall_s = max(times) - min(times)
    return job


async def run(tasks: Path, options: list[str], at_once: int, *, docker: bool) -> Job:
    """Run all tasks.

    Raises:
        RuntimeError: harbor failed, or a trial did.
    """
    with tempfile.TemporaryDirectory(prefix="atropos-bench-harbor-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(str(HARBOR), "run", "-p", str(tasks), "-a", "oracle", "-q", "-y", "-o", f"{folder}/jobs"),
            *("-n", str(at_once), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        peaks: list[int] = []
        watching = asyncio.create_task(watch_memory(process.pid, peaks, docker=docker))
        try:
            said, _ = await process.communicate()
        finally:
            watching.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"harbor run: {said.decode(errors='replace').strip()[-500:]}")
        job = read(Path(folder, "jobs"))
        if job.trials == 0:
            raise RuntimeError(f"harbor run has no trials: {said.decode(errors='replace').strip()[-500:]}")
        job.peak_bytes = max(peaks)
        return job


async def harbor(ctx: Context) -> AsyncIterator[Row]:
    """Docker's runs and ours take turns."""
    if not HARBOR.exists():
        raise RuntimeError("no harbor: scripts/peers.sh installs it")
    if not await docker_peer.answers():
        raise RuntimeError("no engine: python scripts/engines.py docker python -m benchmarks --only harbor")
    compose = await docker_peer.has_compose()
    docker_name = "harbor on Docker" if compose else "harbor, a plain docker run a trial"
    docker_env = ["--env", "docker" if compose else "benchmarks.plain_docker:PlainDocker"]
    count = ctx.n(TASKS, least=4)
    with tempfile.TemporaryDirectory(prefix="atropos-bench-tasks-") as folder:
        plain = make_tasks(Path(folder, "ours"), count, docker=False)
        imaged = make_tasks(Path(folder, "docker"), count, docker=True)
        ctx.say("harbor: building the tasks' images for Docker")
        await build(imaged)
        for at_once in (8, 32):
            slots = ["--ek", "backend=local", "--ek", f"slots_per_container={at_once}", "--ek", "max_containers=1"]
            own_env = ["--env", "atropos.adapters.harbor:AtroposEnvironment", *slots]
            jobs: dict[str, list[Job]] = {"harbor on atropos": [], docker_name: []}
            for number in range(rounds := ctx.n(ROUNDS, least=1)):
                for subject, done in jobs.items():
                    ctx.say(f"{subject}, {at_once} at once, round {number + 1} of {rounds}")
                    own = subject == "harbor on atropos"
                    done.append(
                        await run(plain if own else imaged, own_env if own else docker_env, at_once, docker=not own)
                    )
            for made in rows(f"{at_once} at once", jobs):
                yield made


def rows(case: str, jobs: dict[str, list[Job]]) -> list[Row]:
    """Seconds outside the agent, with trials a minute; and memory at the peak."""
    made: list[Row] = []
    for index, (subject, done) in enumerate(jobs.items()):
        a_minute = statistics.median(60 * job.trials / job.wall_s for job in done)
        outside = [seconds for job in done for seconds in job.outside_s]
        note = f"{a_minute:.0f} trials a minute; {sum(job.trials for job in done)} trials, all with reward 1"
        extra = {"trials_a_minute": a_minute, "jobs": [asdict(job) for job in done]}
        made.append(
            row(f"harbor, outside the agent, {case}", subject, outside, unit="s", base=not index,
                throughput=a_minute / 60, note=note, extra=extra)
        )  # fmt: skip
    for index, (subject, done) in enumerate(jobs.items()):
        peaks = [job.peak_bytes / 1e6 for job in done]
        made.append(row(f"harbor, memory at the peak, {case}", subject, peaks, unit="MB", base=not index))
    return made
