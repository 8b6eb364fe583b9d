"""`python -m benchmarks.honest TASKS… --humaneval FILE`: how honest work scores on an idle, a busy and a stalling host.

Each program is a right solution: those of task folders, verified as these say, and HumanEval's own. All run in each
condition, several at once; one that scores less than 1, or that no score is found for, is named, and the exit code says
whether there were any. `idle` is as the host is; `busy` has 15 programs a core beside it that compute without end, on
an emulated machine (ATROPOS_SLOWNESS) as many as are that load for a slower one; in `storms` processes of the server
and its slots are stopped at random moments, for up to two seconds each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atropos.envs.humaneval_problems import HumanEvalProblem, judge, load_problems
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks.attempt import TaskRun
from atropos.tasks.check import LEAST
from atropos.tasks.fit import fit, largest_on_disk
from atropos.tasks.folder import load_task
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.testing.waiting import SLOWNESS
from atropos.wire import SlotLimits

from . import machine

HOGS = math.ceil(15 / SLOWNESS) * (os.cpu_count() or 1)
STORMS, LONGEST_S = 3, 2.0
LIMITS = SlotLimits(memory_mib=LEAST.slot.memory_mib, disk_mib=LEAST.slot.disk_mib)
EXAMPLES = Path(__file__).resolve().parent.parent / "examples/tasks"
Program = Callable[[], Awaitable[float | None]]
"""Does honest work and has it judged."""


class Condition(StrEnum):
    """What the host does meanwhile."""

    IDLE = "idle"
    BUSY = "busy"
    STORMS = "storms"


def below(pid: int) -> list[int]:
    """Processes that this one started, and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                found += [child, *below(child)]
    return found


async def storm() -> None:
    """Stop processes of the pool's, one after the other."""
    while True:
        stopped = random.choice(below(os.getpid()) or [0])
        with contextlib.suppress(ProcessLookupError):
            if stopped:
                os.kill(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(random.uniform(0.05, LONGEST_S))
        finally:
            with contextlib.suppress(ProcessLookupError):
                if stopped:
                    os.kill(stopped, signal.SIGCONT)


@contextlib.asynccontextmanager
async def host(condition: Condition) -> AsyncGenerator[None]:
    """The host in a condition."""
    computing = "import time\nwhile time.process_time() < 600: pass"  # not for ever, should this one be killed
    start = asyncio.create_subprocess_exec
    hogs = [await start(sys.executable, "-c", computing) for _ in range(HOGS * (condition == "busy"))]
    storms = [asyncio.create_task(storm()) for _ in range(STORMS * (condition == "storms"))]
    try:
        yield
    finally:
        for each in storms:
            each.cancel()
        await asyncio.gather(*storms, return_exceptions=True)
        for hog in hogs:
            hog.kill()
            await hog.wait()


def of_task(pool: SlotPool, task: Task) -> Program:
    """A task's own solution, verified where the task says."""

    async def play() -> float | None:
        run = TaskRun(TaskImages(pool), VerifierLayers(()), task, "oracle")
        try:
            return (await run.play()).reward
        finally:
            await run.end()

    return play


def of_problem(pool: SlotPool, problem: HumanEvalProblem) -> Program:
    """HumanEval's own solution of a problem."""

    async def play() -> float | None:
        async with pool.lease(problem.name) as slot:
            passed, _ = await judge(slot, problem, problem.prompt + problem.canonical_solution, timeout_s=60)
            return float(passed)

    return play


async def scored(programs: dict[str, Program], at_once: int) -> tuple[dict[str, float | None], dict[str, str]]:
    """Which programs are scored less than 1, and which are not scored, and why."""
    turn = asyncio.Semaphore(at_once)
    zeros: dict[str, float | None] = {}
    dropped: dict[str, str] = {}

    async def one(name: str, program: Program) -> None:
        async with turn:
            try:
                reward = await program()
            except Exception as error:  # whatever it is, an env would have no score
                dropped[name] = f"{type(error).__name__}: {error}"[:300]
            else:
                if reward is None or reward < 1:
                    zeros[name] = reward

    await asyncio.gather(*(one(*each) for each in programs.items()))
    return zeros, dropped


async def measure(
    tasks: list[Task], problems: list[HumanEvalProblem], conditions: list[Condition], at_once: int
) -> dict[str, dict[str, object]]:
    """Of each condition: how many programs were scored, what was not scored 1 and why, and the seconds in all."""
    found: dict[str, dict[str, object]] = {}
    config = SlotPoolConfig(
        backend="local",
        slots_per_container=at_once,
        max_containers=1,
        acquire_timeout_s=600,
        start_timeout_s=600,  # an emulated machine is slow
        limits=LIMITS,
        largest_disk_mib=largest_on_disk(tasks, LEAST),
    )
    async with SlotPool(config) as pool:
        programs = {task.name: of_task(pool, task) for task in tasks}
        programs |= {problem.name: of_problem(pool, problem) for problem in problems}
        for condition in conditions:
            started = time.monotonic()
            async with host(condition):
                zeros, dropped = await scored(programs, at_once)
            seconds = round(time.monotonic() - started, 1)
            found[condition] = {"programs": len(programs), "false_zeros": zeros, "dropped": dropped, "seconds": seconds}
            typer.echo(
                f"{condition:8} {len(programs)} programs: {len(zeros)} false zeros, {len(dropped)} dropped in "
                f"{seconds} s"
            )
            for name, why in (zeros | dropped).items():
                typer.echo(f"         {name}: {why}")
    return found


def fitting_tasks(paths: Sequence[Path], at_once: int) -> list[Task]:
    """The tasks in folders, each with the size that it asks for; one too large for this machine is left out by name."""
    folders = sorted(toml.parent for path in paths for each in ("task.toml", "*/task.toml") for toml in path.glob(each))
    room = replace(LEAST, most_mib=at_once * LIMITS.memory_mib)
    found: list[Task] = []
    for task in map(load_task, folders):
        size = fit(task, room)
        if size.refused:
            typer.echo(f"{task.name} is left out: {size.refused[0]}")
        else:
            found.append(size.sized(task))
    return found


def main(
    tasks: Annotated[
        list[Path] | None, typer.Argument(exists=True, help="folders of tasks, or with tasks in them; the examples")
    ] = None,
    humaneval: Annotated[Path | None, typer.Option(exists=True, help="HumanEval.jsonl.gz")] = None,
    condition: Annotated[list[Condition] | None, typer.Option(help="what the host does meanwhile; all of them")] = None,
    at_once: Annotated[int, typer.Option(help="programs at a time")] = 8,
    most: Annotated[int | None, typer.Option(help="programs of each kind")] = None,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
) -> None:
    """Print false zeros and drops of each condition."""
    fitting = fitting_tasks(tasks or [EXAMPLES], at_once)[:most]
    problems = load_problems(humaneval) if humaneval is not None else []
    measured = asyncio.run(measure(fitting, problems[:most], condition or list(Condition), at_once))
    if out is not None:
        out.write_text(json.dumps({"machine": machine.describe(), "conditions": measured}, indent=2))
    raise typer.Exit(any(each["false_zeros"] or each["dropped"] for each in measured.values()))


if __name__ == "__main__":
    typer.run(main)
