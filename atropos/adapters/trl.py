"""Slots and tasks as environments of TRL: `GRPOTrainer(environment_factory=AtroposTask)`. TRL itself isn't imported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from atropos.adapters.process_slots import lease_until_exit, release_and_wait
from atropos.adapters.sharing import HeldSlot, SandboxGoneError, SlotRequest, shell_code, time_limit
from atropos.errors import AcquireTimeout, ConfigError, SandboxError
from atropos.event_loop import event_loop, release
from atropos.slots import SlotPool, sync
from atropos.slots.slot.results import SlotFileError
from atropos.tasks.attempt import TaskRun
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.fit import Room, fit
from atropos.tasks.folder import load_task
from atropos.tasks.format.task import Task
from atropos.tasks.guide import guide
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tools.sandboxed.text import clip

_log = logging.getLogger(__name__)
TRIES = 3
"""How often a rollout is begun, where its slot is lost before it can work."""


class AtroposSlot:
    """An environment with a fresh slot for each rollout, and the tool `bash`. A subclass adds tools, or `get_reward`.

    Args:
        timeout_s: longest that a command may take.
        output_chars: about the most that is shown of a command's output.
        settings: fields of `SlotRequest`.
    """

    def __init__(self, *, timeout_s: float = 180.0, output_chars: int = 8000, **settings: Any) -> None:
        self._request = SlotRequest(**settings)
        self._timeout_s = timeout_s
        self._output_chars = output_chars
        self._pool: SlotPool | None = None
        self._life = object()
        """What the pool is held by."""
        self._held: HeldSlot | None = None
        self._lost = False

    def __del__(self) -> None:
        for held in (getattr(self, "_held", None), getattr(self, "_life", None)):
            release(held)

    @property
    def slot(self) -> sync.Slot:
        """The rollout's, for tools and rewards of one's own.

        Raises:
            SandboxGoneError: there is none.
        """
        return sync.Slot(self._leased().slot)

    @property
    def lost(self) -> bool:
        """Whether the rollout's slot was lost: nothing may be concluded about the model."""
        return self._lost or (self._held is not None and self._held.slot.lost is not None)

    def reset(self, **row: Any) -> str | None:
        """Begin a rollout, in a fresh slot.

        Args:
            row: of the data set.

        Returns:
            What is added to the prompt.

        Raises:
            SandboxGoneError: there is no slot.
            ConfigError, TaskBroken: a setting or the task is wrong.
        """
        return event_loop().run(self._begin(row))

    def bash(self, command: str) -> str:
        """Run a command line with bash in the sandbox. Files stay from call to call; variables and the folder don't.

        Args:
            command: The command line.

        Returns:
            What it printed, and its exit code unless that is 0.
        """
        return event_loop().run(self._bash(command))

    async def _bash(self, command: str) -> str:
        held = self._leased()
        with self._watched():
            result = await held.slot.exec(
                ["bash", "-c", command], timeout_s=self._timeout_s, workdir=held.folder, user=held.user
            )
        printed, _ = clip(result.output, self._output_chars)
        if result.timed_out:
            return f"{printed}\n[it took longer than {time_limit(result, self._timeout_s)}, and was killed]"
        if result.exit_code is None:
            return result.error or printed
        return printed if result.exit_code == 0 else f"{printed}\n[exit code {shell_code(result.exit_code)}]"

    def _leased(self) -> HeldSlot:
        if self._held is None:
            raise SandboxGoneError("the environment has no slot: it wasn't reset")
        return self._held

    @contextmanager
    def _watched(self) -> Generator[None]:
        """Around what needs the slot; a rollout in which it fails has no reward, whatever comes later."""
        try:
            yield
        except SandboxError as error:
            self._lost = True
            raise SandboxGoneError(f"{error.code}: {error}") from error

    async def _begin(self, row: dict[str, Any]) -> str | None:
        await self._end()
        self._lost = False
        with self._watched():
            if self._pool is None:  # held from now on: it isn't stopped between a batch and the next
                shared = self._request.shared()
                self._pool = await shared.enter()
                event_loop().hold(self._life, shared.leave)
            tries = 0
            while True:
                try:
                    self._held, observation = await self._lease(self._pool, row)
                    return observation
                except AcquireTimeout as error:
                    raise AcquireTimeout(f"{error}; a batch needs a slot for each of its rollouts") from error
                except SandboxError as error:
                    tries += 1
                    if tries == TRIES or not error.retryable:
                        raise
                    _log.info("a rollout is begun again: %s", error)

    async def _lease(self, pool: SlotPool, row: dict[str, Any]) -> tuple[HeldSlot, str | None]:  # noqa: ARG002
        """A rollout's slot, held until it is released or the process ends, and what is added to the prompt."""
        return await lease_until_exit(self._request, "trl"), None

    async def _end(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await release_and_wait(held)


class AtroposTask(AtroposSlot):
    """An environment whose rollouts are attempts at task folders, named by the column `task_dir` of the data set.

    Args:
        timeout_s, output_chars: as `AtroposSlot`'s.
        network: whether tasks that want a network get the pool's.
        pool: fields of `SlotPoolConfig`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 180.0,
        output_chars: int = 8000,
        network: bool = False,
        pool: dict[str, object] | None = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s, output_chars=output_chars, network=network, pool=pool or {})
        self._run: TaskRun | None = None

    def get_reward(self) -> float | None:
        """Run the task's tests, and give the slot back.

        Returns:
            None where the slot was lost or the task's tests are at fault: TRL leaves the rollout out of its group.
        """
        return event_loop().run(self._score())

    async def _lease(self, pool: SlotPool, row: dict[str, Any]) -> tuple[HeldSlot, str | None]:
        task = await asyncio.to_thread(_task, row, pool)
        self._run = run = TaskRun(TaskImages(pool), VerifierLayers(()), task, "nop", network=self._request.network)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(run.end)
            slot = await run.begin()
            instruction = task.instruction + await guide(slot, run.task)
            held = HeldSlot(slot, None, run.task.recipe.workdir, undo.pop_all())
        event_loop().hold(held, held.release)
        return held, instruction

    async def _score(self) -> float | None:
        run = self._run
        if self.lost or self._held is None or run is None:
            self._lost = True
            await self._end()
            return None
        try:
            return (await run.judge()).reward
        except VerifierFailed as failure:
            return await self._blamed(run, failure)
        except SandboxError as error:
            self._lost = True
            _log.warning("%s: a rollout has no reward: %s", run.task.name, error)
            return None
        finally:
            await self._end()

    async def _blamed(self, run: TaskRun, failure: VerifierFailed) -> float | None:
        """0 where the tests give a reward when nothing was done, so that what was done is the cause."""
        await run.end()
        untouched = TaskRun(run.images, run.layers, run.task, "nop", network=run.network)
        try:
            await untouched.play()
        except (VerifierFailed, TaskBroken, SlotFileError, SandboxError) as error:
            self._lost = True
            _log.warning("%s: a rollout has no reward: %s; untouched: %s", run.task.name, failure, error)
            return None
        finally:
            await untouched.end()
        _log.warning("%s: a rollout scores 0: %s", run.task.name, failure)
        return 0.0


def _task(row: dict[str, Any], pool: SlotPool) -> Task:
    """The task that a row names, with the sizes that it asks for.

    Raises:
        ConfigError: it names none, or one that slots of this pool or this trainer can't play.
    """
    if not isinstance(folder := row.get("task_dir"), str | Path):
        raise ConfigError("task_dir: the data set needs this column, with the task's folder")
    task = load_task(folder, architecture=pool.architecture)
    fitting = fit(task, Room.of(pool.config))
    if task.steps:
        raise ConfigError(f"{task.path}: a task with steps is no single rollout")
    if fitting.refused:
        raise ConfigError(f"{task.path}: {'; '.join(fitting.refused)}")
    return fitting.sized(task)
