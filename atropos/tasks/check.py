"""Whether tasks are sound here: each is prepared, its solution must score 1 and doing nothing less.

It needs no policy and no training library: a pool of slots is all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from atropos.config import ImageStoreSettings, SlotLimits
from atropos.errors import ConfigError, ImageUnavailable, SandboxError
from atropos.resources import Resources
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks.attempt import Agent, Attempt, TaskRun
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.fit import STAND_INS, Policy, Room, TaskFit, fit, largest_on_disk
from atropos.tasks.folder import TaskSet
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier import surroundings
from atropos.tasks.verifier.exposure import Exposure, exposure
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Choice, Mode, choose
from atropos.wire import ImageState

_log = logging.getLogger(__name__)
LEAST = Room(Resources(memory_mib=1024, disk_mib=512))
"""Of a slot, where no task asks for more."""


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class CheckConfig:
    """What is checked, and where.

    Attributes:
        agents: who works on each task, each in a slot of its own.
        script: what the agent `script` runs, with bash.
        slots: at once; fewer where the tasks' memory wouldn't fit on the machine.
        memory_mib: of every slot, however large the task; None: leases of each task's own size.
        layers: what is laid over the machine where tests run (`VerifierLayers`).
        image_store: where images are kept and how they are pulled.
        attempt_s: longest that one agent's attempt may take in all.
    """

    agents: tuple[Agent, ...] = ("oracle", "nop")
    script: Path | None = None
    backend: Literal["local", "docker", "nomad"] = "local"
    base: str | None = None
    slots: int = 4
    memory_mib: int | None = None
    network: bool = False
    images: tuple[str, ...] = STAND_INS
    limits: Policy = "old"
    layers: tuple[str, ...] = ()
    image_store: ImageStoreSettings = field(default_factory=ImageStoreSettings)
    attempt_s: float = 3600.0


@dataclass(frozen=True)
class TaskFinding:
    """What is known of one task.

    Attributes:
        status: `sound`; `unsound`: the rewards are wrong; `broken`: it can't be prepared; `refused`: nothing was run.
        verifier: where its tests run.
        runs: what of the agent's they run, and as whom; None: nothing that their text shows.
    """

    name: str
    status: Literal["sound", "unsound", "broken", "refused"]
    image: str | None = None
    attempts: dict[str, Attempt] | None = None
    clamped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    verifier: Choice | None = None
    runs: Exposure | None = None

    def json(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


async def check(
    tasks: TaskSet,
    config: CheckConfig,
    *,
    done: Callable[[TaskFinding], None] = _nothing,
    progress: Callable[[Task, ImageState], None] = _nothing,
) -> list[TaskFinding]:
    """Check all tasks of a set, several at once.

    Args:
        tasks: what was read, refusals included.
        config: where and how.
        done: called with each task's finding as soon as it is there.
        progress: called with how far a task is prepared.

    Raises:
        ConfigError: the settings can't be used.
        SandboxError: no container could be started.
    """
    if "script" in config.agents and config.script is None:
        raise ConfigError("--agent script: needs --script FILE")
    room = _room(config)
    fits = {task.name: fit(task, room, images=config.images, policy=config.limits) for task in tasks.tasks}
    findings = [TaskFinding(name, "refused", problems=(reason,)) for name, reason in tasks.refused.items()]
    findings += [_refused(task, fits[task.name]) for task in tasks.tasks if fits[task.name].refused]
    for finding in findings:
        done(finding)
    runnable = [fits[task.name].sized(task) for task in tasks.tasks if not fits[task.name].refused]
    if runnable:
        async with _running(room, config, runnable) as (pool, turn):
            images, layers = TaskImages(pool, config.images), VerifierLayers(config.layers)

            async def attempt(task: Task, agent: Agent, mode: Literal["task"] | Mode) -> Attempt:
                async with turn:
                    run = TaskRun(
                        images,
                        layers,
                        task,
                        agent,
                        script=config.script,
                        network=config.network,
                        progress=partial(progress, task),
                        mode=mode,
                    )
                    return await _attempt(run, config.attempt_s)

            async def one(task: Task) -> None:
                finding = await _checked(task, fits[task.name], config, partial(attempt, task))
                findings.append(finding)
                done(finding)

            with contextlib.closing(layers):
                try:
                    await layers.prepare(images)
                except (TaskBroken, ImageUnavailable, ConfigError) as error:
                    raise ConfigError(f"--verifier-layer: {error}") from error
                async with asyncio.TaskGroup() as group:
                    for task in runnable:
                        group.create_task(one(task))
    return sorted(findings, key=lambda finding: finding.name)


def _room(config: CheckConfig) -> Room:
    least = replace(LEAST, network=config.network)
    if config.memory_mib is not None:
        disk_mib = max(LEAST.slot.disk_mib, config.memory_mib // 2)
        return replace(least, slot=Resources(memory_mib=config.memory_mib, disk_mib=disk_mib))
    return replace(least, most_mib=max(LEAST.slot.memory_mib, _machine_mib() * 3 // 4))


def _machine_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)


@asynccontextmanager
async def _running(
    room: Room, config: CheckConfig, tasks: Sequence[Task]
) -> AsyncGenerator[tuple[SlotPool, asyncio.Semaphore]]:
    at_once = min(config.slots, len(tasks) * len(config.agents))
    fitting = max(1, _machine_mib() * 3 // 4 // room.slot.memory_mib)
    machines = [one for task in tasks for one in (task, *task.verifiers)]
    largest = max((one.limits.memory_mib or 0 for one in machines if one.limits), default=0)
    settings = SlotPoolConfig(
        backend=config.backend,
        base=config.base,
        slots_per_container=max(min(at_once, fitting), -(-largest // room.slot.memory_mib)),
        min_containers=1,
        max_containers=1,
        acquire_timeout_s=config.attempt_s,
        allow_network=config.network,
        image_store=config.image_store,
        volume=room.volume,
        largest_disk_mib=largest_on_disk(tasks, room),
        limits=SlotLimits(memory_mib=room.slot.memory_mib, disk_mib=room.slot.disk_mib),
        job_id="atropos-tasks-check",
    )
    async with SlotPool(settings) as pool:
        yield pool, asyncio.Semaphore(at_once)


def _refused(task: Task, found: TaskFit) -> TaskFinding:
    notes = (*found.notes, *task.warnings)
    return TaskFinding(task.name, "refused", task.image, clamped=found.clamped, notes=notes, problems=found.refused)


async def _checked(
    task: Task,
    found: TaskFit,
    config: CheckConfig,
    attempt: Callable[[Agent, Literal["task"] | Mode], Awaitable[Attempt]],
) -> TaskFinding:
    notes = (*found.notes, *task.warnings, *surroundings.notes(task))
    try:
        chosen = choose(task)
    except OSError as error:
        return TaskFinding(task.name, "broken", task.image, None, found.clamped, notes, (str(error),))
    results = await asyncio.gather(*(attempt(agent, "task") for agent in config.agents))
    attempts = dict(zip(map(str, config.agents), results, strict=True))
    problems = list(dict.fromkeys(_problems(attempts)))
    solved = attempts.get("oracle", Attempt())
    if chosen.mode == "view" and not task.steps and solved.prepared_s is not None and (solved.reward or 0) < 1:
        other = await attempt("oracle", "shared")
        if (other.reward or 0) >= 1:
            problems.append(
                'its solution scores 1 in the agent\'s slot: set environment_mode = "shared" or name artifacts'
            )
    broken = all(one.prepared_s is None for one in results)
    return TaskFinding(
        task.name,
        "broken" if broken else "unsound" if problems else "sound",
        task.image,
        attempts,
        found.clamped,
        notes,
        tuple(problems),
        chosen,
        exposure(task),
    )


def _problems(attempts: dict[str, Attempt]) -> list[str]:
    """What is wrong: a solution below 1, an untouched workspace that scores, an attempt that could not be made."""
    problems: list[str] = []
    for agent, one in attempts.items():
        if one.problem is not None and (agent != "nop" or one.prepared_s is None):
            problems.append(one.problem)
        elif agent == "oracle" and one.unsolved is not None:
            problems.append(one.unsolved)
        elif agent == "nop" and one.reward is not None and one.reward >= 1:
            problems.append(f"doing nothing scores {one.reward:g}")
    return problems


async def _attempt(run: TaskRun, longest_s: float) -> Attempt:
    try:
        async with asyncio.timeout(longest_s):
            return await run.play()
    except TaskBroken as error:
        return replace(run.so_far, problem=str(error))
    except VerifierFailed as error:
        return replace(run.so_far, problem=f"no reward: {error}")
    except TimeoutError:
        return replace(run.so_far, problem=f"the attempt took longer than {longest_s:g} s")
    except (SandboxError, ConfigError, OSError) as error:
        return replace(run.so_far, problem=f"{type(error).__name__}: {error}")
    except Exception as error:  # a bug of ours: it costs one attempt, and the others go on
        _log.exception("%s: the attempt ended with an internal error", run.name)
        return replace(
            run.so_far, problem=f"a fault of atropos's own, please report it: {type(error).__name__}: {error}"
        )
    finally:
        await run.end()
