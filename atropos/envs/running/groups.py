"""Groups of trajectories: members run at once, with retries of infrastructure failures; groups end whole or dropped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from atropos import tracing
from atropos.agent import PromptTooLong, seed_for
from atropos.aio import Allowance, backoff_s
from atropos.envs.adapter import Item
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.running.backend import ToolBackend
from atropos.envs.running.hooks import ungrouped
from atropos.envs.running.lifecycle import Lifetime, task_group
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import (
    GroupDropped,
    GroupsDropped,
    HookError,
    ItemLeftOut,
    NoSlotYet,
    Rollout,
    ScoredGroup,
    VerifierError,
    WorkspaceLost,
    scored_group,
)
from atropos.errors import (
    BackendUnavailable,
    InferenceError,
    IsolationUnavailable,
    NotSupported,
    SandboxError,
    SlotLost,
)
from atropos.slots import Snapshot

NOT_RETRIED = (IsolationUnavailable, NotSupported)
"""Another slot would not help."""
DROPPED_IN_A_ROW = 20
"""Groups dropped in a row that end a run. From half of it on, the run slows down."""
HOPELESS_IN_A_ROW = 3
"""The same for failures that another slot would not cure."""
CUT = "cut"
"""Code of a group that a bound cut, where such groups are dropped."""
NOT_COUNTED = (VerifierError.code, CUT)
"""Codes of drops that an agent can cause; they never end a run."""

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something that happened, for observers. `kind`: trajectory, group, dropped, left_out, retry."""

    kind: str
    item: str
    rollout: Rollout | None = None
    rollouts: tuple[Rollout, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class GroupMember:
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
    snapshot: Snapshot | None = None


class TrajectoryRunner(Protocol):
    """What a collector asks of the env."""

    def item_name(self, item: Item) -> str:
        """A short name of an item."""
        ...

    async def prepare_group(self, item: Item, group: str) -> Snapshot | None:
        """What a group's trajectories start from; None: an empty workspace.

        Raises:
            ItemLeftOut: no trajectory on it could score.
        """
        ...

    async def run_trajectory(self, item: Item, trajectory_id: str, member: GroupMember) -> Rollout:
        """Run, verify and score one trajectory."""
        ...

    def check_logprobs(self, temperature: float) -> None:
        """Check that a trainer can use the logprobs of what is sampled with a temperature.

        Raises:
            ConfigError: it can't.
        """
        ...


class GroupCollector:
    """Collects groups of an env's trajectories; a hopeless run ends the command's lifetime.

    Attributes:
        observers: called with each `Event`.
        tasks: those in which groups are collected.
    """

    def __init__(
        self,
        env: TrajectoryRunner,
        config: SandboxEnvConfig,
        backend: ToolBackend,
        metrics: EnvMetrics,
        lifetime: Lifetime,
    ) -> None:
        self._env = env
        self._config = config
        self._backend = backend
        self._metrics = metrics
        self._lifetime = lifetime
        self._numbers = itertools.count(1)
        self.tasks: set[asyncio.Task[object]] = set()
        self._dropped_in_a_row = 0
        self._group_s: float | None = None
        self.observers: list[Callable[[Event], None]] = []

    def take_over(self, worker_timeout: float) -> float:
        """Bound groups from now on, -1: not; returns -1. atroposlib's own bound loses an item without naming it."""
        if worker_timeout > 0:
            self._group_s = worker_timeout
        return -1

    async def collect(self, item: object) -> ScoredGroup | None:
        """One whole scored group, or None when it can't be completed or its item is left out.

        Raises:
            Exception: the run can't continue, and is ended: a `ConfigError`, or what an env's own code raises outside
                of hooks.
        """
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            return await self._collect(item)
        except asyncio.CancelledError:
            self._metrics.cancelled_groups += 1
            raise
        # `ConfigError` and mistakes of the env itself: the next groups would fail in the same way.
        except Exception as error:  # atroposlib would log it, and go on without the group
            self._lifetime.abort(error)
            raise
        finally:
            self.tasks.discard(task)

    async def _collect(self, item: object) -> ScoredGroup | None:
        name = self._env.item_name(item)
        try:
            rollouts = await self._in_time(self.rollouts(item, self._config.group_size))
            # Before anything counts as scored: a trainer would learn from logprobs of another distribution.
            for temperature in {rollout.transcript.temperature for rollout in rollouts}:
                self._env.check_logprobs(temperature)
            self._check_cut(rollouts)
        except GroupDropped as dropped:
            self._metrics.dropped[dropped.code] += 1
            _log.warning("group %s dropped: %s", name, dropped)
            self._notify(Event("dropped", name, detail=str(dropped)))
            await self._after_drop(dropped)
            return None
        except ItemLeftOut as left_out:
            self._notify(Event("left_out", name, detail=str(left_out)))
            return None
        self._metrics.groups += 1
        self._metrics.scores.extend(rollout.score for rollout in rollouts)
        # In a row, not in all: a run of days may well lose twenty groups.
        self._dropped_in_a_row = 0
        _log.info("group %s: scores %s", name, " ".join(f"{rollout.score:.2f}" for rollout in rollouts))
        self._notify(Event("group", name, rollouts=tuple(rollouts)))
        # wandb shows the messages; they are sent only where they are included
        with_messages = self._config.include_messages or self._config.use_wandb
        mask_cut = self._config.cut_trajectories == "mask"
        return scored_group(rollouts, name=name, include_messages=with_messages, mask_cut=mask_cut)

    def _check_cut(self, rollouts: list[Rollout]) -> None:
        """By `cut_trajectories`, drop a group with members that a bound ended, or that has no other."""
        cut = [rollout for rollout in rollouts if rollout.cut]
        # `mask` needs one that is whole, whose score stands for the others' (`scored_group`).
        too_many = {"keep": len(rollouts) + 1, "mask": len(rollouts), "drop": 1}[self._config.cut_trajectories]
        if len(cut) >= too_many:
            reasons = ", ".join(sorted({rollout.stop_reason for rollout in cut}))
            text = f"{len(cut)} of {len(rollouts)} trajectories were cut ({reasons}); see cut_trajectories"
            raise GroupDropped(text, code=CUT)

    async def _in_time(self, rollouts: Awaitable[list[Rollout]]) -> list[Rollout]:
        # By `expired`, this bound is told from a TimeoutError of an env's own code, which is that code's fault.
        allowance = Allowance(self._group_s)
        try:
            async with allowance.once():
                return await rollouts
        except TimeoutError:
            if not allowance.expired:
                raise
            text = f"it took longer than worker_timeout ({self._group_s:g} s)"
            raise GroupDropped(text, code="worker_timeout") from None

    async def _after_drop(self, dropped: GroupDropped) -> None:
        """Slow down after several drops in a row, and end the run after many."""
        # An agent could otherwise end the run by spoiling its verifiers.
        if dropped.code in NOT_COUNTED:
            return
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= (HOPELESS_IN_A_ROW if dropped.hopeless else DROPPED_IN_A_ROW):
            self._lifetime.abort(
                GroupsDropped(f"{self._dropped_in_a_row} groups in a row were dropped; the last one: {dropped}")
            )
        over = self._dropped_in_a_row - DROPPED_IN_A_ROW // 2
        if over > 0:
            # In the group's own task, so that its place stays taken, and fewer groups are tried while each of them
            # fails.
            await asyncio.sleep(min(30.0, 0.25 * 2**over))

    async def rollouts(self, item: object, size: int) -> list[Rollout]:
        """All trajectories of a group at once; the first that can't be completed cancels the others.

        A group whose prepared workspace is lost with its container starts again as a whole, so that all its members
        start from the same workspace.

        Raises:
            GroupDropped: it can't be completed.
            ItemLeftOut: no trajectory on it could score.
        """
        name = self._env.item_name(item)
        # It becomes part of trajectory ids, which name workspaces; the number keeps two groups of one item apart.
        group = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}-{next(self._numbers)}"
        restarts = 0
        while True:
            prefix = f"{group}-w{restarts}" if restarts else group
            try:
                return await self._members(item, name, size, group, prefix)
            except WorkspaceLost as lost:
                if restarts == self._config.trajectory_retries:
                    raise GroupDropped(f"{group}: {lost}", code=lost.code) from lost
                self._metrics.retries[lost.code] += 1
                _log.warning("group %s is restarted with a newly prepared workspace: %s", group, lost)
                self._notify(Event("retry", name, detail=str(lost)))
                restarts += 1

    async def _members(self, item: object, name: str, size: int, group: str, prefix: str) -> list[Rollout]:
        # In this order: the members have ended, also those cancelled, before their snapshot is dropped.
        async with self._prepared(item, prefix) as snapshot, task_group() as tasks:
            members = [
                tasks.create_task(self._member(item, prefix, GroupMember(group, i, self._seed(name, i), snapshot)))
                for i in range(size)
            ]
        return [task.result() for task in members]

    def _seed(self, name: str, index: int) -> int | None:
        return None if self._config.seed is None else seed_for(self._config.seed, name, index)

    @contextlib.asynccontextmanager
    async def _prepared(self, item: object, prefix: str) -> AsyncGenerator[Snapshot | None]:
        """The group's snapshot, dropped when the group is over."""
        snapshot = await self._persist(
            prefix, lambda earlier: self._env.prepare_group(item, _name_of(f"{prefix}-setup", earlier))
        )
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                # A lost container has taken the snapshot with it.
                with contextlib.suppress(SandboxError):
                    await snapshot.drop()

    async def _member(self, item: object, prefix: str, member: GroupMember) -> Rollout:
        name = f"{prefix}-{member.index}"

        async def once(earlier: int) -> Rollout:
            rollout = await self._attempt(item, _name_of(name, earlier), member)
            rollout.attempts = earlier + 1
            return rollout

        rollout = await self._persist(name, once)
        # Only what is scored; an attempt that fails is counted as a retry.
        self._count(rollout)
        self._notify(Event("trajectory", self._env.item_name(item), rollout=rollout))
        return rollout

    async def _attempt(self, item: object, trajectory_id: str, member: GroupMember) -> Rollout:
        """One attempt, admitted within the pool's capacity; its slot is always released."""
        name = self._env.item_name(item)
        # Around the attempt, not the group: while one waits before its retry, another may have its place.
        async with self._backend.admission:
            with (
                self._metrics.activity.attempt(trajectory_id, name),
                tracing.span(
                    f"invoke_agent {self._config.wandb_name}",
                    gen_ai__operation__name="invoke_agent",
                    gen_ai__agent__name=self._config.wandb_name or "",
                    gen_ai__conversation__id=trajectory_id,
                    atropos__group=member.group,
                ) as span,
            ):
                rollout = await self._admitted(item, trajectory_id, member)
                span.set(
                    atropos__score=rollout.score,
                    atropos__stop_reason=rollout.stop_reason,
                    atropos__steps=rollout.steps,
                    atropos__calls=rollout.calls,
                )
                return rollout

    async def _admitted(self, item: object, trajectory_id: str, member: GroupMember) -> Rollout:
        started = time.perf_counter()
        acquire_s = 0.0
        try:
            with self._backend.awaiting_slot(trajectory_id):
                if member.snapshot is not None:
                    await self._fork(trajectory_id, member.snapshot)
                rollout = await self._env.run_trajectory(item, trajectory_id, member)
            rollout.seconds = time.perf_counter() - started
            acquire_s = self._backend.executor.acquire_s(trajectory_id)
        finally:
            # After success as after failure: the next attempt starts in a fresh slot.
            released = time.perf_counter()
            await self._backend.release(trajectory_id)
        rollout.phases |= {"acquire": acquire_s, "reset": time.perf_counter() - released}
        return rollout

    async def _fork(self, trajectory_id: str, snapshot: Snapshot) -> None:
        try:
            await self._backend.executor.start_from(trajectory_id, snapshot)
        except SlotLost as error:  # of a fork that has not started yet: the snapshot is
            raise WorkspaceLost(f"the group's prepared workspace is lost: {error}") from error

    async def _persist(self, what: str, once: Callable[[int], Awaitable[Value]]) -> Value:
        """Call `once` with the number of earlier attempts: again in a fresh slot after each infrastructure failure.

        Failures while Nomad or Docker is away with all containers are not counted: the engine is awaited (`outage_s`).
        Nor is a wait for slots that are all at work.

        Raises:
            GroupDropped: it can't be completed.
            WorkspaceLost: there is nothing left to start from.
        """
        earlier = failures = 0
        while True:
            # Before each attempt: while the engine is away, each would fail at once and use up the retries.
            await self._wait_for_engine(what)
            try:
                with ungrouped():
                    return await once(earlier)
            except (HookError, PromptTooLong) as error:
                raise GroupDropped(f"{what}: {error}", code=error.code) from error
            except (SandboxError, InferenceError) as error:
                # Counted for the name alone: even an attempt that counts as no failure has used its trajectory id.
                earlier += 1
                if isinstance(error, NoSlotYet) or (isinstance(error, SandboxError) and self._backend.outage()):
                    self._metrics.retries[error.code] += 1
                    _log.info("%s waits on: %s", what, error)
                    continue
                hopeless = isinstance(error, NOT_RETRIED)
                # The same request would be refused again.
                refused = isinstance(error, InferenceError) and not error.retryable
                if hopeless or refused or failures == self._config.trajectory_retries:
                    text = f"{what}: {type(error).__name__}: {error}"
                    raise GroupDropped(text, code=error.code, hopeless=hopeless) from error
                self._metrics.retries[error.code] += 1
                _log.warning("%s is retried after %s: %s", what, type(error).__name__, error)
                self._notify(Event("retry", what, detail=str(error)))
                await asyncio.sleep(backoff_s(failures, first_s=0.1, longest_s=2.0))
                failures += 1

    async def _wait_for_engine(self, what: str) -> None:
        """Wait while the engine is away with all containers; if it stays away, end the run."""
        outage = self._backend.outage()
        if not outage:
            return
        _log.info("%s waits for the engine to answer: %s", what, outage)
        try:
            await self._backend.wait_for_engine()
        except BackendUnavailable as error:
            self._lifetime.abort(error)
            # Not the engine's own error: the other members are cancelled, and the group counts as dropped.
            raise GroupDropped(f"{what}: {error}", code=error.code, hopeless=True) from error

    def _count(self, rollout: Rollout) -> None:
        self._metrics.trajectories += 1
        self._metrics.trajectory_seconds.observe(rollout.seconds)
        self._metrics.stop_reasons[rollout.stop_reason] += 1
        for phase, seconds in rollout.phases.items():
            self._metrics.phases[phase] += seconds

    def _notify(self, event: Event) -> None:
        """Call the observers; an observer that raises loses no trajectory."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer failed")


def _name_of(name: str, earlier: int) -> str:
    """The name of an attempt: each has a workspace, and with it a trajectory id, of its own."""
    return f"{name}-r{earlier}" if earlier else name
