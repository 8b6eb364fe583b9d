"""Whether tasks are sound here: each is prepared, its solution must score 1 and doing nothing less.

It needs no policy and no training library: a pool of slots is all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from atropos.config import ImageStoreSettings
from atropos.errors import ConfigError, ImageUnavailable, NotSupported, SandboxError
from atropos.resources import Resources
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks.attempt import Agent, Attempt, TaskRun
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.fit import STAND_INS, Note, Policy, Room, TaskFit, fit, largest_on_disk
from atropos.tasks.folder import TaskSet
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier import surroundings
from atropos.tasks.verifier.exposure import Exposure, exposure
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Choice, Mode, choose
from atropos.wire import ImageState, SlotLimits

_log = logging.getLogger(__name__)
LEAST = Room(Resources(memory_mib=1024, disk_mib=512))
"""Of a slot: the least, where no task asks for more."""
ROOMY_MIB = 2048
"""Memory that an attempt should have."""
SHARED = 'its solution scores 1 in the agent\'s slot: set environment_mode = "shared" or name artifacts'
AGAIN = ", which is too little: tried again with all of it"
_PULLED = re.compile(r"image (?P<name>\S+): pulling: ")


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class CheckConfig:
    """What is checked, and where.

    Attributes:
        agents: who works on each task, each in a slot of its own.
        script: what the agent `script` runs, with bash.
        slots: attempts at once; None: two a core, as far as this machine's memory goes.
        memory_mib: of every slot, however large the task; None: its share of this machine, or what a task asks for.
        volume: where slots keep their files.
        network: whether tasks that want a network get one.
        egress: the hosts that it reaches; empty: all public ones.
        layers: what is laid over the machine where tests run (`VerifierLayers`).
        image_store: where images are kept and how they are pulled.
        attempt_s: longest that one agent's attempt may take in all, or as long as the task's own times come to.
    """

    agents: tuple[Agent, ...] = ("oracle", "nop")
    script: Path | None = None
    backend: Literal["local", "docker", "nomad"] = "local"
    base: str | None = None
    slots: int | None = None
    memory_mib: int | None = None
    volume: Literal["auto", "memory", "disk"] = "auto"
    network: bool = False
    egress: tuple[str, ...] = ()
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
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()
    verifier: Choice | None = None
    runs: Exposure | None = None

    def json(self) -> dict[str, object]:
        """As plain data, notes as their texts."""
        return {**asdict(self), "notes": [note.text for note in self.notes]}


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
    at_once = min(config.slots or _fitting(), max(1, len(tasks.tasks) * len(config.agents)))
    slots = max((at_once, *(1 + len(task.beside) for task in tasks.tasks)))
    room = _room(config, slots)
    fits = {task.name: fit(task, room, images=config.images, policy=config.limits) for task in tasks.tasks}
    findings = [TaskFinding(name, "refused", problems=(reason,)) for name, reason in tasks.refused.items()]
    findings += [_refused(task, fits[task.name]) for task in tasks.tasks if fits[task.name].refused]
    for finding in findings:
        done(finding)
    runnable = [fits[task.name].sized(task) for task in tasks.tasks if not fits[task.name].refused]
    if runnable:
        whole = {task.name: _whole(task, room, config) for task in runnable if fits[task.name].clamped}
        sized = [*runnable, *(task for task in whole.values() if task is not None)]
        async with SlotPool(_pool_config(room, config, sized, slots)) as pool:
            images, layers = TaskImages(pool, config.images), VerifierLayers(config.layers)
            turn = asyncio.Semaphore(at_once)
            make_run = partial(TaskRun, images, layers, script=config.script, network=config.network)

            async def attempt(task: Task, agent: Agent, mode: Literal["task"] | Mode) -> Attempt:
                run = partial(make_run, agent=agent, progress=partial(progress, task), mode=mode)
                longest_s = _longest_s(task, config)
                first = await _attempt(run(task), longest_s)
                if first.short and (larger := whole.get(task.name)) is not None:
                    return replace(await _attempt(run(larger), longest_s), short=True)
                return first

            async def one(task: Task) -> None:
                finding = await _checked(task, fits[task.name], config, turn, partial(attempt, task))
                if whole.get(task.name) is not None and any(each.short for each in (finding.attempts or {}).values()):
                    finding = replace(finding, clamped=tuple(f"{text}{AGAIN}" for text in finding.clamped))
                findings.append(finding)
                done(finding)

            with contextlib.closing(layers):
                await _prepare(layers, images)
                async with asyncio.TaskGroup() as group:
                    for task in runnable:
                        group.create_task(one(task))
    return sorted(findings, key=lambda finding: finding.name)


def _whole(task: Task, room: Room, config: CheckConfig) -> Task | None:
    """The task with all that it asks for; None where no lease has that."""
    found = fit(task, room, images=config.images, policy="refuse")
    return None if found.refused else found.sized(task)


def _room(config: CheckConfig, slots: int) -> Room:
    """Of so many slots that share this machine; an engine's may be on others, and are as small as tasks allow."""
    share = _usable_mib() // slots if config.backend == "local" else 0
    memory = config.memory_mib or max(LEAST.slot.memory_mib, share)
    return Room(
        Resources(memory_mib=memory, disk_mib=max(LEAST.slot.disk_mib, memory // 2)),
        volume=config.volume,
        network=config.network,
        egress=config.egress or LEAST.egress,
        most_mib=None if config.memory_mib else max(memory, _usable_mib()),
    )


def _longest_s(task: Task, config: CheckConfig) -> float:
    """Tests that a busy host held up run twice."""
    return max(config.attempt_s, task.config.environment.build_timeout_sec + 2 * task.seconds)


def _usable_mib() -> int:
    """Memory of this machine that slots may have together."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20) * 3 // 4


def _fitting() -> int:
    """Attempts at once that this machine has cores and memory for."""
    return max(1, min(2 * len(os.sched_getaffinity(0)), _usable_mib() // ROOMY_MIB))


def _pool_config(room: Room, config: CheckConfig, tasks: Sequence[Task], slots: int) -> SlotPoolConfig:
    fitting = max(1, _usable_mib() // room.slot.memory_mib)
    machines = [one for task in tasks for one in (task, *task.verifiers)]
    largest = max((room.memory_of(one.limits) for one in machines), default=0)
    return SlotPoolConfig(
        backend=config.backend,
        base=config.base,
        slots_per_container=max(min(slots, fitting), -(-largest // room.slot.memory_mib)),
        min_containers=1,
        max_containers=1,
        acquire_timeout_s=max(_longest_s(task, config) for task in tasks),
        allow_network=config.network,
        egress_allow=room.egress,
        image_store=config.image_store,
        volume=room.volume,
        largest_disk_mib=largest_on_disk(tasks, room),
        limits=SlotLimits(memory_mib=room.slot.memory_mib, disk_mib=room.slot.disk_mib),
        job_id="atropos-tasks-check",
    )


async def _prepare(layers: VerifierLayers, images: TaskImages) -> None:
    try:
        await layers.prepare(images)
    except (TaskBroken, ImageUnavailable, ConfigError) as error:
        raise ConfigError(f"--verifier-layer: {error}") from error


def _refused(task: Task, fitting: TaskFit) -> TaskFinding:
    notes = (*fitting.notes, *map(Note, task.warnings))
    return TaskFinding(task.name, "refused", task.image, clamped=fitting.clamped, notes=notes, problems=fitting.refused)


async def _checked(
    task: Task,
    fitting: TaskFit,
    config: CheckConfig,
    turn: asyncio.Semaphore,
    attempt: Callable[[Agent, Literal["task"] | Mode], Awaitable[Attempt]],
) -> TaskFinding:
    notes = (*fitting.notes, *map(Note, (*task.warnings, *surroundings.notes(task))))
    try:
        chosen = choose(task)
    except OSError as error:
        return TaskFinding(task.name, "broken", task.image, None, fitting.clamped, notes, (str(error),))
    hints: list[str] = []

    async def one(agent: Agent) -> Attempt:
        async with turn:
            first = await attempt(agent, "task")
            unsolved = agent == "oracle" and first.prepared_s is not None and (first.reward or 0) < 1
            if unsolved and chosen.mode == "view" and not task.steps:
                other = await attempt(agent, "shared")
                if (other.reward or 0) >= 1:
                    hints.append(SHARED)
            return first

    results = await asyncio.gather(*map(one, config.agents))
    if any(each.prepared_s is not None for each in results):
        # What one could prepare the others can: a step that ran out of time beside them is kept by now.
        results = [
            each if each.prepared_s is not None else await one(agent)
            for agent, each in zip(config.agents, results, strict=True)
        ]
    attempts = dict(zip(map(str, config.agents), results, strict=True))
    problems = [*dict.fromkeys(_problems(attempts)), *hints]
    notes += tuple({Note(f"not enforced: {one.unbounded}"): None for one in results if one.unbounded})
    broken = all(one.prepared_s is None for one in results)
    return TaskFinding(
        task.name,
        "broken" if broken else "unsound" if problems else "sound",
        task.image,
        attempts,
        fitting.clamped,
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


def _cure(text: str) -> str:
    """What may help where an image of a registry can't be had."""
    if (match := _PULLED.search(text)) is None:
        return ""
    host, slash, _ = match["name"].removeprefix("docker://").partition("/")
    host = host if slash and (set(".:") & set(host) or host == "localhost") else "docker.io"
    return (
        f"; pass --mirror {host}=HOST[/PATH] where another registry has it, --insecure-registry HOST:PORT for one "
        "without TLS, or --image PATTERN to have the slots' base stand in for it"
    )


async def _attempt(run: TaskRun, longest_s: float) -> Attempt:
    try:
        async with asyncio.timeout(longest_s):
            return await run.play()
    except ImageUnavailable as error:
        return replace(run.so_far, problem=f"{error}{_cure(str(error))}")
    except TaskBroken as error:
        return replace(run.so_far, problem=str(error))
    except VerifierFailed as error:
        return replace(run.so_far, problem=f"no reward: {error}")
    except TimeoutError:
        return replace(run.so_far, problem=f"the attempt took longer than {longest_s:g} s")
    except (SandboxError, ConfigError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
        return replace(run.so_far, problem=problem, short=isinstance(error, NotSupported))
    except Exception as error:  # a bug of ours: it costs one attempt, and the others go on
        _log.exception("%s: the attempt ended with an internal error", run.name)
        return replace(
            run.so_far, problem=f"a fault of atropos's own, please report it: {type(error).__name__}: {error}"
        )
    finally:
        await run.end()
