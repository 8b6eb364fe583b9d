"""Whether tasks are sound here: each is prepared, its solution must score 1 and doing nothing less.

It needs no policy and no training library: a pool of slots is all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from atropos.config import ImageStoreSettings, SlotLimits
from atropos.errors import ConfigError, ImageUnavailable, SandboxError
from atropos.slots import Slot, SlotPool, SlotPoolConfig, Snapshot
from atropos.tasks import workspace
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.fit import STAND_INS, Policy, Room, TaskFit, fit
from atropos.tasks.folder import TaskSet
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import Progress, TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Choice, Mode, choose
from atropos.tasks.verifier.reward import Verdict, combined, passed
from atropos.wire import ImageState

_log = logging.getLogger(__name__)
Agent = Literal["oracle", "nop", "script"]
LEAST = Room(memory_mib=1024, disk_mib=512)
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
class Attempt:
    """What came of one agent in one task.

    Attributes:
        reward: None where there is none; `problem` says why.
        size_bytes: what the prepared workspace added to its base.
        log: tail of what the tests printed.
        ended: how the solution failed, and what it printed.
    """

    reward: float | None = None
    problem: str | None = None
    prepared_s: float | None = None
    verifier_s: float | None = None
    size_bytes: int | None = None
    log: str = ""
    ended: str = ""


@dataclass(frozen=True)
class TaskFinding:
    """What is known of one task.

    Attributes:
        status: `sound`; `unsound`: the rewards are wrong; `broken`: it can't be prepared; `refused`: nothing was run.
    """

    name: str
    status: Literal["sound", "unsound", "broken", "refused"]
    image: str | None = None
    attempts: dict[str, Attempt] | None = None
    clamped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    verifier: Choice | None = None

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
    found = [TaskFinding(name, "refused", problems=(reason,)) for name, reason in tasks.refused.items()]
    found += [_refused(task, fits[task.name]) for task in tasks.tasks if fits[task.name].refused]
    for finding in found:
        done(finding)
    runnable = [fits[task.name].sized(task) for task in tasks.tasks if not fits[task.name].refused]
    if runnable:
        async with _running(room, config, runnable) as (pool, turn):
            images, layers = TaskImages(pool, config.images), VerifierLayers(config.layers)

            async def attempt(task: Task, agent: Agent, mode: Literal["task"] | Mode) -> Attempt:
                async with turn:
                    return await _attempt(_Run(images, layers, task, agent, config, partial(progress, task), mode))

            async def one(task: Task) -> None:
                finding = await _checked(task, fits[task.name], config, partial(attempt, task))
                found.append(finding)
                done(finding)

            with contextlib.closing(layers):
                try:
                    await layers.prepare(images)
                except (TaskBroken, ImageUnavailable, ConfigError) as error:
                    raise ConfigError(f"--verifier-layer: {error}") from error
                async with asyncio.TaskGroup() as group:
                    for task in runnable:
                        group.create_task(one(task))
    return sorted(found, key=lambda finding: finding.name)


def _room(config: CheckConfig) -> Room:
    least = replace(LEAST, network=config.network)
    if config.memory_mib is not None:
        return replace(least, memory_mib=config.memory_mib, disk_mib=max(LEAST.disk_mib, config.memory_mib // 2))
    return replace(least, most_mib=max(LEAST.memory_mib, _machine_mib() * 3 // 4))


def _machine_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)


@asynccontextmanager
async def _running(
    room: Room, config: CheckConfig, tasks: Sequence[Task]
) -> AsyncGenerator[tuple[SlotPool, asyncio.Semaphore]]:
    at_once = min(config.slots, len(tasks) * len(config.agents))
    fitting = max(1, _machine_mib() * 3 // 4 // room.memory_mib)
    machines = [one for task in tasks for one in (task, *task.verifiers)]
    largest = max((one.limits.memory_mib or 0 for one in machines if one.limits), default=0)
    settings = SlotPoolConfig(
        backend=config.backend,
        base=config.base,
        slots_per_container=max(min(at_once, fitting), -(-largest // room.memory_mib)),
        min_containers=1,
        max_containers=1,
        acquire_timeout_s=config.attempt_s,
        allow_network=config.network,
        image_store=config.image_store,
        limits=SlotLimits(memory_mib=room.memory_mib, disk_mib=room.disk_mib),
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
    notes = (*found.notes, *task.warnings)
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
    )


def _problems(attempts: dict[str, Attempt]) -> list[str]:
    """What is wrong: a solution below 1, an untouched workspace that scores, an attempt that could not be made."""
    problems: list[str] = []
    for agent, one in attempts.items():
        if one.problem is not None and (agent != "nop" or one.prepared_s is None):
            problems.append(one.problem)
        elif agent == "oracle" and one.reward is not None and one.reward < 1:
            ended = f" ({one.ended})" if one.ended else ""
            problems.append(f"its solution scores {one.reward:g}{ended}: {one.log[-300:].strip()}")
        elif agent == "nop" and one.reward is not None and one.reward >= 1:
            problems.append(f"doing nothing scores {one.reward:g}")
    return problems


async def _attempt(run: _Run) -> Attempt:
    config = run.config
    try:
        async with asyncio.timeout(config.attempt_s):
            return await run.play()
    except TaskBroken as error:
        return replace(run.so_far, problem=str(error))
    except VerifierFailed as error:
        return replace(run.so_far, problem=f"no reward: {error}")
    except TimeoutError:
        return replace(run.so_far, problem=f"the attempt took longer than {config.attempt_s:g} s")
    except (SandboxError, ConfigError, OSError) as error:
        return replace(run.so_far, problem=f"{type(error).__name__}: {error}")
    except Exception as error:  # of ours: it costs one attempt, and the others go on
        _log.exception("%s: the attempt ended with an internal error", run.name)
        return replace(
            run.so_far, problem=f"a fault of atropos's own, please report it: {type(error).__name__}: {error}"
        )
    finally:
        await run.end()


@dataclass(eq=False)
class _Run:
    """One agent's attempt at one task: one slot at a time."""

    images: TaskImages
    layers: VerifierLayers
    task: Task
    agent: Agent
    config: CheckConfig
    progress: Progress
    mode: Literal["task"] | Mode
    image: str = ""
    kept: Snapshot | None = None
    slot: Slot | None = None
    so_far: Attempt = Attempt()

    @property
    def name(self) -> str:
        return f"{self.task.name}-{self.agent}"

    async def end(self) -> None:
        await self.release()
        if self.kept is not None:
            await self.kept.drop()

    async def release(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            await slot.release()

    async def _lease(self, machine: Task, image: str) -> Slot:
        """A slot with a prepared machine, in the place of the one before."""
        await self.release()
        network = self.config.network and not machine.offline
        slot = self.slot = await self.images.pool.acquire(
            self.name, image=image, network=network, limits=machine.limits
        )
        await workspace.enter(slot, machine)
        await workspace.start_main_process(slot, machine)
        return slot

    async def play(self) -> Attempt:
        started = time.perf_counter()
        prepared = await self.images.prepare(self.task, self.progress)
        self.task, self.image = prepared.task, prepared.image
        slot = await self._lease(self.task, self.image)
        await workspace.wait_until_healthy(slot, self.task)
        prepared_s = time.perf_counter() - started
        self.so_far = Attempt(prepared_s=round(prepared_s, 3), size_bytes=prepared.bytes)
        verdicts = [await self._judged(self.task)] if not self.task.steps else await self._steps()
        return replace(
            self.so_far,
            reward=combined(self.task, verdicts),
            verifier_s=round(sum(verdict.seconds for verdict in verdicts), 3),
            log=verdicts[-1].log,
        )

    async def _steps(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for step in self.task.steps:
            assert self.slot is not None
            await workspace.prepare_step(self.slot, step)
            verdicts.append(await self._judged(step, keep=step is not self.task.steps[-1]))
            if step.step is not None and not passed(step.step, verdicts[-1]):
                break
            await self._back()
            await workspace.clear(self.slot, step)
        return verdicts

    async def _back(self) -> None:
        """From a separate verifier's slot back to the agent's, where that one is needed again."""
        if self.kept is not None:
            await self.release()
            async with self.kept as kept:
                self.kept = None
                self.slot = await self.images.pool.acquire(self.name, snapshot=kept, limits=self.task.limits)
            await workspace.start_main_process(self.slot, self.task)

    async def _judged(self, task: Task, *, keep: bool = False) -> Verdict:
        slot = self.slot
        assert slot is not None
        await self._work(slot, task)

        async def fresh() -> Slot:
            if keep:
                self.kept = await slot.snapshot()
            if task.verifier is None:
                return await self._lease(self.task, self.image)
            return await self._lease(task.verifier, (await self.images.prepare(task.verifier)).image)

        return await workspace.verify(slot, task, mode=self.mode, fresh=fresh, layers=self.layers)

    async def _work(self, slot: Slot, task: Task) -> None:
        if self.agent == "oracle":
            result = await workspace.solve(slot, task)
            output = result.output[-300:].strip()
            if result.timed_out:
                raise TaskBroken(f"{task.name}: its solution took longer than its timeout: {output}")
            if result.exit_code != 0:
                self.so_far = replace(self.so_far, ended=f"it ended with {result.exit_code}: {output}")
        elif self.agent == "script":
            assert self.config.script is not None
            await slot.exec(self.config.script.read_text(encoding="utf-8"), timeout_s=task.config.agent.timeout_sec)
