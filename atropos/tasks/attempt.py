"""One attempt at a task, by its own solution, by no one, or by a script: prepared, worked on, judged."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from atropos.slots import Slot, Snapshot
from atropos.tasks import services, workspace
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import Progress, TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Mode
from atropos.tasks.verifier.reward import Verdict, combined, passed

Agent = Literal["oracle", "nop", "script"]


@dataclass(frozen=True)
class Attempt:
    """What came of one agent in one task.

    Attributes:
        reward: None where there is none; `problem` says why.
        size_bytes: what the prepared workspace added to its base.
        unbounded: which limits its slot lacked, and why.
        short: whether it reached a limit that is lower than what the task asks for.
        log: tail of what the tests printed.
        ended: how the solution failed, and what it printed.
    """

    reward: float | None = None
    problem: str | None = None
    prepared_s: float | None = None
    verifier_s: float | None = None
    size_bytes: int | None = None
    unbounded: str | None = None
    short: bool = False
    log: str = ""
    ended: str = ""

    @property
    def unsolved(self) -> str | None:
        """Why a solution's reward is too low; None where it isn't, or where there is none."""
        if self.reward is None or self.reward >= 1:
            return None
        ended = f" ({self.ended})" if self.ended else ""
        return f"its solution scores {self.reward:g}{ended}: {self.log[-300:].strip()}"


@dataclass(eq=False)
class TaskRun:
    """One agent's attempt at one task: one slot at a time.

    Attributes:
        script: what the agent `script` runs, with bash.
        network: whether tasks that want a network get the pool's.
        so_far: what is known of the attempt; kept where `play` raises.
    """

    images: TaskImages
    layers: VerifierLayers
    task: Task
    agent: Agent
    script: Path | None = None
    network: bool = False
    progress: Progress = lambda _: None
    mode: Literal["task"] | Mode = "task"
    image: str = ""
    agents_work: Snapshot | None = None
    slot: Slot | None = None
    so_far: Attempt = Attempt()

    @property
    def name(self) -> str:
        """Of its leases."""
        return f"{self.task.name}-{self.agent}"

    async def end(self) -> None:
        """Give back what it holds."""
        await self._release()
        if self.agents_work is not None:
            await self.agents_work.drop()

    async def _release(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            await slot.release()

    async def _lease(self, machine: Task, image: str) -> Slot:
        """A slot with a prepared machine, in the place of the one before."""
        await self._release()
        network = self.network and not machine.offline
        slot = self.slot = await self.images.pool.acquire(
            self.name, image=image, network=network, limits=machine.limits
        )
        await workspace.enter(slot, machine)
        await services.start(slot, machine, self.images, network=self.network)
        return slot

    async def play(self) -> Attempt:
        """`begin`, and `judge`.

        Raises:
            TaskBroken: it can't be prepared, or its solution takes too long.
            VerifierFailed: the tests gave no reward.
            SandboxError, ConfigError, OSError: the infrastructure failed.
        """
        await self.begin()
        return await self.judge()

    async def begin(self) -> Slot:
        """Prepare the task, and lease the slot in which an agent works.

        Raises:
            TaskBroken: it can't be prepared.
            SandboxError, ConfigError, OSError: the infrastructure failed.
        """
        started = time.perf_counter()
        prepared = await self.images.prepare(self.task, self.progress)
        self.task, self.image = prepared.task, prepared.image
        slot = await self._lease(self.task, self.image)
        await workspace.wait_until_healthy(slot, self.task)
        self.so_far = Attempt(
            prepared_s=round(time.perf_counter() - started, 3),
            size_bytes=prepared.bytes,
            unbounded=slot.lease.limit_note,
        )
        return slot

    async def judge(self) -> Attempt:
        """Let `agent` work, and judge what is in the slot.

        Raises:
            TaskBroken: its solution takes too long, or a step can't be prepared.
            VerifierFailed: the tests gave no reward.
            SandboxError, ConfigError, OSError: the infrastructure failed.
        """
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
        if self.agents_work is not None:
            await self._release()
            async with self.agents_work as snapshot:
                self.agents_work = None
                self.slot = await self.images.pool.acquire(self.name, snapshot=snapshot, limits=self.task.limits)
            await workspace.start_main_process(self.slot, self.task)

    async def _judged(self, task: Task, *, keep: bool = False) -> Verdict:
        slot = self.slot
        assert slot is not None
        await self._work(slot, task)

        async def fresh() -> Slot:
            if keep:
                self.agents_work = await slot.snapshot()
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
            assert self.script is not None
            await slot.exec(self.script.read_text(encoding="utf-8"), timeout_s=task.config.agent.timeout_sec)
