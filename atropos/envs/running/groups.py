"""Groups of trajectories: all members at once, a member tried again after an infrastructure failure, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from atropos.agent import PromptTooLong, seed_for
from atropos.aio import backoff_s
from atropos.envs.adapter import BaseEnv
from atropos.envs.running.hooks import Hooks, first_of, ungrouped
from atropos.envs.running.lifecycle import Lifetime
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import GroupDropped, GroupsDropped, HookError, Rollout, scored_group
from atropos.errors import (
    BackendUnavailable,
    ConfigError,
    InferenceError,
    IsolationUnavailable,
    NotSupported,
    SandboxError,
)
from atropos.slots import SlotPool
from atropos.tools import ToolExecutor

NOT_RETRIED = (IsolationUnavailable, NotSupported)
"""Another slot would not help."""

DROPPED_IN_A_ROW = 20
"""Groups dropped one after the other, none completed between, that end a run; from half of it on it slows down."""
HOPELESS_IN_A_ROW = 3
"""The same for what another slot can't cure."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something that happened, for a progress display. `kind`: trajectory, group, dropped, retry."""

    kind: str
    item: str
    rollout: Rollout | None = None
    rollouts: tuple[Rollout, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Member:
    """One place in a group.

    Attributes:
        group: unique name of the group in this process.
        index: place in the group, from 0.
        seed: for the model's requests; None: none is sent.
        snapshot: what the slot starts from; None: an empty workspace.
    """

    group: str
    index: int
    seed: int | None = None
    snapshot: Any = None


class Groups(BaseEnv):
    """The part of `SandboxEnv` that collects groups."""

    config: Any
    metrics: EnvMetrics
    observers: list[Callable[[Event], None]]
    lifetime: Lifetime
    pool: SlotPool | None
    _executor: ToolExecutor | None
    _admission: asyncio.Semaphore

    def _begin(self, capacity: int) -> None:
        """What collecting needs, once, when the env is made."""
        self.metrics = EnvMetrics()
        self.hooks = Hooks(type(self).__name__, self.metrics, self.config.hook_timeout_s)
        self.observers = []
        self.lifetime = Lifetime()
        self._admission = asyncio.Semaphore(capacity)
        self._groups_begun = 0
        self._collecting: set[asyncio.Task[Any]] = set()
        self._dropped_in_a_row = 0

    @property
    def executor(self) -> ToolExecutor:
        """The tool executor; there from `setup` to shutdown."""
        if self._executor is None:
            raise RuntimeError("the tool backend is not running; call start_tool_backend() first")
        return self._executor

    @abstractmethod
    async def run_trajectory(self, item: Any, trajectory_id: str, member: Member) -> Rollout:
        """Run, verify and score one trajectory; its slot is released afterwards by the frame.

        Raises:
            SandboxError, InferenceError: the infrastructure failed; it is tried again.
            HookError: an env's own code failed; the group is dropped.
        """

    async def prepare_group(self, item: Any, group: str) -> Any:
        """What a group's trajectories start from: a snapshot, or None for an empty workspace."""
        return None

    async def _frozen(self, trajectory_id: str) -> Any:
        """A snapshot of a trajectory's workspace, whose slot is given back. Cancelled on the way, it leaves neither."""
        slot = await self.executor.slot(trajectory_id)
        snapshot = await slot.snapshot()
        try:
            await self.executor.release_trajectory(trajectory_id)
        except BaseException:
            await snapshot.drop()
            raise
        return snapshot

    def item_name(self, item: Any) -> str:
        """A short name of an item for people, file names and seeds."""
        if isinstance(item, dict):
            for key in ("name", "id", "task_id", "task"):
                value = cast("dict[str, Any]", item).get(key)
                if isinstance(value, str | int):
                    return str(value)[:80]
        named = getattr(item, "name", None)
        return named[:80] if isinstance(named, str) else str(item)[:40]

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """One whole group, or None when it can't be completed; see `SandboxEnv`."""
        task = asyncio.current_task()
        assert task is not None
        self._collecting.add(task)
        try:
            return await self._collect(item), []
        except asyncio.CancelledError:
            self.metrics.cancelled_groups += 1
            raise
        except ConfigError as error:
            self.lifetime.abort(error)
            raise
        finally:
            self._collecting.discard(task)

    async def _collect(self, item: Any) -> dict[str, Any] | None:
        name = self.item_name(item)
        try:
            rollouts = await self._members(item, name, self.config.group_size)
        except GroupDropped as dropped:
            self.metrics.dropped[dropped.code] += 1
            _log.warning("group %s dropped: %s", name, dropped)
            self.tell(Event("dropped", name, detail=str(dropped)))
            await self._after_drop(dropped)
            return None
        self.metrics.groups += 1
        self._dropped_in_a_row = 0
        _log.info("group %s: scores %s", name, " ".join(f"{rollout.score:.2f}" for rollout in rollouts))
        self.tell(Event("group", name, rollouts=tuple(rollouts)))
        wanted = (
            self.config.include_messages or self.config.use_wandb
        )  # wandb shows them; they are sent only if included
        return scored_group(rollouts, name=name, include_messages=wanted)

    async def _after_drop(self, dropped: GroupDropped) -> None:
        """Slow down while nothing works, and end the run when it looks as if nothing ever will."""
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= (HOPELESS_IN_A_ROW if dropped.hopeless else DROPPED_IN_A_ROW):
            self.lifetime.abort(
                GroupsDropped(f"{self._dropped_in_a_row} groups in a row were dropped; the last one: {dropped}")
            )
        over = self._dropped_in_a_row - DROPPED_IN_A_ROW // 2
        if over > 0:
            await asyncio.sleep(min(30.0, 0.25 * 2**over))

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        """One trajectory by itself, as atroposlib's `ScoredDataItem`.

        Raises:
            GroupDropped: it could not be completed.
        """
        [rollout] = await self._members(item, self.item_name(item), 1)
        group = scored_group([rollout], name=self.item_name(item), include_messages=True)
        single = {key: group[key][0] for key in ("tokens", "masks", "scores", "messages", "inference_logprobs")}
        return {**single, "group_overrides": group["group_overrides"], "overrides": None}, []

    async def _members(self, item: Any, name: str, size: int) -> list[Rollout]:
        """All trajectories of a group at once; the first that can't be completed ends the others."""
        self._groups_begun += 1
        group = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}-{self._groups_begun}"
        try:
            async with self._prepared(item, group) as snapshot, asyncio.TaskGroup() as tasks:
                members = [
                    tasks.create_task(self._member(item, name, Member(group, i, self._seed(name, i), snapshot)))
                    for i in range(size)
                ]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        return [task.result() for task in members]

    def _seed(self, name: str, index: int) -> int | None:
        return None if self.config.seed is None else seed_for(self.config.seed, name, index)

    @contextlib.asynccontextmanager
    async def _prepared(self, item: Any, group: str) -> AsyncGenerator[Any]:
        """The group's snapshot, dropped when the group is over."""
        snapshot = await self._persist(group, lambda attempt: self.prepare_group(item, f"{group}-setup{attempt}"))
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                with contextlib.suppress(SandboxError):
                    await snapshot.drop()

    async def _member(self, item: Any, name: str, member: Member) -> Rollout:
        attempts = 0

        async def once(attempt: str) -> Rollout:
            nonlocal attempts
            attempts += 1
            return await self._attempt(item, f"{member.group}-{member.index}{attempt}", member)

        rollout = await self._persist(f"{member.group}-{member.index}", once)
        rollout.attempts = attempts
        self._count(rollout)
        self.tell(Event("trajectory", name, rollout=rollout))
        return rollout

    async def _attempt(self, item: Any, trajectory_id: str, member: Member) -> Rollout:
        """One attempt, admitted when the env's own slots allow it, released in every ending."""
        async with self._admission:
            started = time.perf_counter()
            acquire_s = 0.0
            try:
                if member.snapshot is not None:
                    await self.executor.start_from(trajectory_id, member.snapshot)
                rollout = await self.run_trajectory(item, trajectory_id, member)
                rollout.seconds = time.perf_counter() - started
                acquire_s = self.executor.acquire_s(trajectory_id)
            finally:
                released = time.perf_counter()
                if self._executor is not None:
                    await self._executor.release_trajectory(trajectory_id, reset_workspace=True)
            rollout.phases |= {"acquire": acquire_s, "reset": time.perf_counter() - released}
            return rollout

    async def _persist(self, what: str, once: Callable[[str], Awaitable[Any]]) -> Any:
        """Try again after infrastructure failures, in a fresh slot each time, then give the group up.

        What fails while Nomad or Docker is away with all containers is not counted: it is waited for (`outage_s`).

        Raises:
            GroupDropped: it can't be completed.
        """
        attempt = 0
        for number in itertools.count():
            await self._outlast(what)
            try:
                with ungrouped():
                    return await once(f"-r{number}" if number else "")
            except (HookError, PromptTooLong) as error:
                raise GroupDropped(f"{what}: {error}", code=error.code) from error
            except (SandboxError, InferenceError) as error:
                if isinstance(error, SandboxError) and self._engine_away():
                    self.metrics.retries[error.code] += 1
                    continue
                hopeless = isinstance(error, NOT_RETRIED) or (isinstance(error, InferenceError) and not error.retryable)
                if hopeless or attempt == self.config.trajectory_retries:
                    text = f"{what}: {type(error).__name__}: {error}"
                    raise GroupDropped(text, code=error.code, hopeless=isinstance(error, NOT_RETRIED)) from error
                self.metrics.retries[error.code] += 1
                _log.warning("%s is tried again after %s: %s", what, type(error).__name__, error)
                self.tell(Event("retry", what, detail=str(error)))
                await asyncio.sleep(backoff_s(attempt, first_s=0.1, longest_s=2.0))
                attempt += 1
        raise AssertionError("unreachable")

    def _engine_away(self) -> bool:
        """Whether Nomad or Docker doesn't answer, and no container is left."""
        return self.pool is not None and bool(self.pool.outage())

    async def _outlast(self, what: str) -> None:
        """Wait while the engine is away with all containers; one that stays away ends the run."""
        if self.pool is None or not self._engine_away():
            return
        _log.info("%s waits for the engine to answer: %s", what, self.pool.outage())
        try:
            await self.pool.outlast()
        except BackendUnavailable as error:
            self.lifetime.abort(error)
            raise GroupDropped(f"{what}: {error}", code=error.code, hopeless=True) from error

    def _count(self, rollout: Rollout) -> None:
        self.metrics.trajectories += 1
        self.metrics.scores.append(rollout.score)
        self.metrics.stop_reasons[rollout.stop_reason] += 1
        for phase, seconds in rollout.phases.items():
            self.metrics.phases[phase] += seconds  # type: ignore[assignment]

    def tell(self, event: Event) -> None:
        """Tell the observers; a display's own error is no reason to lose a trajectory."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer failed")
