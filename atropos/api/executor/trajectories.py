"""Trajectories of clients in other processes: open, call, renew, end; abandoned ones end after their TTL."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from atropos.aio import Tasks
from atropos.api.accounts.account import Account, Latest
from atropos.api.executor.images import checked_source
from atropos.api.executor.models import (
    CallAnswer,
    CallBody,
    ExecutorServerSettings,
    Opened,
    OpenTrajectory,
    TrajectoryInfo,
)
from atropos.api.gate import Body
from atropos.api.http import Refusal
from atropos.errors import (
    AcquireTimeout,
    ConfigError,
    ImageUnavailable,
    LeaseExpired,
    OutcomeUnknown,
    PoolFull,
    QuotaReached,
    SandboxError,
    SlotLost,
)
from atropos.slots.pool.stats import container_name
from atropos.tools.models import ToolCall, ToolResult, fingerprint

if TYPE_CHECKING:
    from atropos.slots import Slot
    from atropos.tools import ToolExecutor

_log = logging.getLogger(__name__)
_STATUS: dict[type[SandboxError], int] = {
    AcquireTimeout: 429,
    PoolFull: 429,
    QuotaReached: 429,
    SlotLost: 410,
    LeaseExpired: 410,
    OutcomeUnknown: 409,
    ImageUnavailable: 404,
}
_RELEASE_S = 30.0
_REMEMBERED_BYTES = 2_000_000
"""Longest that a trajectory's remembered results are together as JSON; the latest is kept whatever its length."""
_T = TypeVar("_T")


def refusal_of(error: SandboxError) -> Refusal:
    """The HTTP answer for an infrastructure failure."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 503)
    return Refusal(status, error.code, str(error), retry_after_s=1 if status in {429, 503} else None)


async def _result(task: asyncio.Task[_T], doing: str) -> _T:
    """Wait for a task of a trajectory. Cancelling the wait does not cancel the task.

    Raises:
        Refusal: it failed, or the trajectory was ended.
    """
    await asyncio.wait([task])
    if task.cancelled():
        raise Refusal(410, "lease_expired", f"the trajectory was ended while {doing}")
    error = task.exception()
    if isinstance(error, SandboxError):
        raise refusal_of(error)
    if isinstance(error, ConfigError):
        raise Refusal(422, "invalid", str(error))
    return task.result()


@dataclass
class OpenCall:
    """A call under its idempotency key, which is its id."""

    id: str
    trajectory_id: str
    fingerprint: bytes
    task: asyncio.Task[ToolResult]
    size: int = 0

    @property
    def again(self) -> bool:
        """Whether it failed without having run, so that it is run when it is sent again."""
        if not self.task.done() or self.task.cancelled():
            return False
        error = self.task.exception()
        return isinstance(error, SandboxError) and not isinstance(error, OutcomeUnknown)

    def pending(self) -> CallAnswer:
        """What there is to say of it while it runs."""
        return CallAnswer(call_id=self.id, trajectory_id=self.trajectory_id, state="running")

    async def answer(self) -> CallAnswer:
        """Wait for its result. Cancelling the wait does not cancel the call.

        Raises:
            Refusal: the infrastructure failed, or the trajectory was ended.
        """
        result = await _result(self.task, "the call ran")
        return CallAnswer(call_id=self.id, trajectory_id=self.trajectory_id, state="done", result=result)


@dataclass(eq=False)
class Trajectory:
    """One open trajectory.

    Attributes:
        key: its id in the executor, unique even when a client reuses an id.
        how: it ends, as the audit log says.
    """

    id: str
    key: str
    ttl_s: float
    opening: asyncio.Task[None]
    image: str | None = None
    touched: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    calls: OrderedDict[str, OpenCall] = field(default_factory=OrderedDict[str, OpenCall])
    finished: int = 0
    broken: SandboxError | None = None
    how: str = "ended"
    latest: Latest = field(default_factory=Latest)

    @property
    def running(self) -> int:
        """Calls that have no result yet."""
        return sum(1 for call in self.calls.values() if not call.task.done())

    def info(self) -> TrajectoryInfo:
        """The trajectory as clients see it."""
        # While a call runs, nothing expires.
        remaining_s = self.ttl_s if self.running else self.ttl_s - (time.monotonic() - self.touched)
        return TrajectoryInfo(
            trajectory_id=self.id,
            state="open" if self.broken is None else "broken",
            ttl_s=self.ttl_s,
            expires_in_s=max(0.0, remaining_s),
            calls=self.finished,
            running=self.running,
            detail="" if self.broken is None else str(self.broken),
        )


class Trajectories:
    """All open trajectories of a key. A lease ends with its trajectory, and a trajectory at the latest with its TTL."""

    def __init__(self, executor: ToolExecutor, settings: ExecutorServerSettings, account: Account) -> None:
        self._executor = executor
        self._account = account
        self._settings = settings
        self._open: dict[str, Trajectory] = {}
        self._tasks = Tasks("trajectories")
        self._releases = Tasks("trajectories")
        self.draining = False

    def __repr__(self) -> str:
        return f"<Trajectories open={len(self._open)} ending={len(self._releases)}>"

    def __len__(self) -> int:
        return len(self._open)

    def opened(self) -> list[Opened]:
        """All open ones, as an admin sees them."""
        now = time.monotonic()
        return [
            Opened(
                key=self._account.name,
                id=each.id,
                image=each.image,
                state="open" if each.broken is None else "broken",
                age_s=now - each.began,
                calls=each.running,
                container=container_name(self._executor.pool.links, self._executor.held_slot(each.key)),
                latest=each.latest.line,
                latest_s=each.latest.age_s,
            )
            for each in self._open.values()
        ]

    def list(self) -> list[TrajectoryInfo]:
        """All open ones."""
        return [trajectory.info() for trajectory in self._open.values()]

    def get(self, trajectory_id: str) -> Trajectory:
        """An open one; asking for it renews it.

        Raises:
            Refusal: 404, there is none.
        """
        trajectory = self._open.get(trajectory_id)
        if trajectory is None:
            raise Refusal(
                404, "not_found", f"there is no trajectory {trajectory_id[:200]!r}; it has ended, or never existed"
            )
        trajectory.touched = time.monotonic()
        return trajectory

    def slot_of(self, trajectory_id: str) -> Slot | None:
        """The slot of an open one; None: there is none. Prolongs nothing."""
        trajectory = self._open.get(trajectory_id)
        return None if trajectory is None else self._executor.held_slot(trajectory.key)

    async def open(self, wanted: OpenTrajectory) -> tuple[Trajectory, bool]:
        """Open a trajectory with a slot of its own; with the id of an open one, that one.

        Returns:
            The trajectory, and whether it is new.

        Raises:
            Refusal: 429, no slot came free in time; 503, the server is shutting down or its backend failed; 404, the
                image is unavailable; 422, it may not be named; 409, the trajectory is open on another image.
        """
        known = self._open.get(wanted.trajectory_id or "")
        with self._account.noting_refusals("trajectory", wanted.trajectory_id or "", image=wanted.image):
            if known is None:
                if self.draining:
                    raise Refusal(503, "draining", "the server is shutting down; ask another", retry_after_s=5)
                if len(self._open) >= self._settings.max_trajectories:
                    raise Refusal(429, "full", f"{len(self._open)} trajectories are open", retry_after_s=2)
            elif known.image != wanted.image:
                raise Refusal(409, "trajectory_id_reused", f"the trajectory is open on another image: {known.image}")
            trajectory = known or self._new(wanted)
        await _result(trajectory.opening, "it was opened")
        trajectory.touched = time.monotonic()
        return trajectory, known is None

    def _new(self, wanted: OpenTrajectory) -> Trajectory:
        image = None if wanted.image is None else checked_source(wanted.image)
        trajectory_id = wanted.trajectory_id or f"t-{uuid.uuid4().hex}"
        # A client may open an id anew while the last one of that name is still given back.
        key = f"{trajectory_id}#{uuid.uuid4().hex[:12]}"
        # a task of its own: a client that goes away during the acquire may ask again under its id
        opening = self._tasks.spawn(self._lease(trajectory_id, key, image), f"open {key}", awaited=True)
        trajectory = Trajectory(trajectory_id, key, wanted.ttl_s or self._settings.ttl_s, opening, image)
        self._open[trajectory_id] = trajectory

        def opened(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), SandboxError):
                self._account.note("trajectory.refused", trajectory_id, image=image, outcome=error.code)
            if (task.cancelled() or task.exception() is not None) and self._open.get(trajectory_id) is trajectory:
                del self._open[trajectory_id]
                self._release(trajectory)

        opening.add_done_callback(opened)
        return trajectory

    async def _lease(self, trajectory_id: str, key: str, image: str | None) -> None:
        account = self._account
        if image is not None:
            # Before it is pulled: what is over the quota must not cost a pull.
            account.share.use_image(image)
            # has its own timeout, before that of the slot
            await self._executor.pool.prepare(image, everywhere=False)
        try:
            async with asyncio.timeout(self._settings.acquire_s):
                await self._executor.slot(key, image=image, limits=account.key.limits, share=account.share)
        except TimeoutError:
            raise AcquireTimeout(f"no slot came free within {self._settings.acquire_s:g} s") from None
        account.note("trajectory.open", trajectory_id, image=image)

    # ----------------------------------------------------------------------------------------------------- calls

    def submit(self, trajectory: Trajectory, body: CallBody, key: str | None, counted: Body | None = None) -> OpenCall:
        """Start a call, or find the one that has this id. `counted`: the request's body, which a new call keeps.

        Raises:
            Refusal: 409, the id belongs to another call; 429, too many wait; 410, the trajectory is broken.
        """
        if body.id is not None and key is not None and body.id != key:
            raise Refusal(409, "ids_differ", "id and the header Idempotency-Key differ: give one of them")
        call_id = body.id or key or f"c-{uuid.uuid4().hex}"
        content = fingerprint(body.name, body.arguments)
        known = trajectory.calls.get(call_id)
        if known is not None and known.fingerprint != content:
            raise Refusal(409, "call_id_reused", f"id {call_id!r} belongs to another call of this trajectory")
        # Also one that still runs: a request that is sent again waits for the same result.
        if known is not None and not known.again:
            return known
        if trajectory.broken is not None:
            raise Refusal(410, "slot_lost", f"the trajectory is broken; end it and start over: {trajectory.broken}")
        if self.draining:
            raise Refusal(503, "draining", "the server is shutting down", retry_after_s=5)
        if trajectory.running >= self._settings.max_pending:
            raise Refusal(429, "busy", f"{trajectory.running} calls of this trajectory wait", retry_after_s=1)
        asked = ToolCall(name=body.name, arguments=body.arguments)
        trajectory.latest = Latest(asked.line())
        work = self._run(trajectory, asked)
        task = self._tasks.spawn(work, f"call {call_id}", awaited=True)
        if counted is not None:
            counted.count_until(task)
        call = trajectory.calls[call_id] = OpenCall(call_id, trajectory.id, content, task)
        # A call that is run again keeps its place in an OrderedDict otherwise, and would be forgotten first.
        trajectory.calls.move_to_end(call_id)
        task.add_done_callback(lambda _: self._ended(trajectory, call))
        return call

    async def _run(self, trajectory: Trajectory, call: ToolCall) -> ToolResult:
        await asyncio.wait([trajectory.opening])
        trajectory.opening.result()  # a trajectory that could not be opened runs nothing
        outcome = "cancelled"
        try:
            result = await self._executor.execute(trajectory.key, call)
            outcome = "ok" if result.success else "error"
            return result
        except SandboxError as error:
            outcome = error.code
            trajectory.broken = self._executor.broken(trajectory.key)
            raise
        finally:
            # Names that models invent don't belong into an audit log.
            tool = call.name if call.name in self._executor.tools else "(unknown)"
            self._account.note("call", trajectory.id, tool=tool, outcome=outcome)

    def _ended(self, trajectory: Trajectory, call: OpenCall) -> None:
        if not call.task.cancelled() and call.task.exception() is None:
            call.size = call.task.result().size_bytes()
        trajectory.finished += 1
        trajectory.touched = time.monotonic()
        done = [one for one in trajectory.calls.values() if one.task.done()]
        surplus, size = len(done) - self._settings.remembered, sum(one.size for one in done)
        # The latest stays in any case: its client may not have read it yet.
        for one in done[:-1]:
            if surplus <= 0 and size <= _REMEMBERED_BYTES:
                return
            del trajectory.calls[one.id]
            surplus, size = surplus - 1, size - one.size

    # ------------------------------------------------------------------------------------------------------ ends

    async def end(self, trajectory_id: str) -> bool:
        """End a trajectory and wait until its slot is back. Whether there was one."""
        trajectory = self._open.pop(trajectory_id, None)
        if trajectory is None:
            return False
        await asyncio.shield(self._release(trajectory))
        return True

    def _release(self, trajectory: Trajectory) -> asyncio.Task[None]:
        return self._releases.spawn(self._give_back(trajectory), f"release {trajectory.key}")

    async def _give_back(self, trajectory: Trajectory) -> None:
        trajectory.opening.cancel()
        try:
            async with asyncio.timeout(_RELEASE_S):
                await asyncio.wait([trajectory.opening])
                await self._executor.release_trajectory(trajectory.key)
        except Exception:
            _log.exception("releasing trajectory %s failed", trajectory.id)
        for call in trajectory.calls.values():
            call.task.cancel()
        if not trajectory.opening.cancelled() and trajectory.opening.exception() is None:
            how = trajectory.how if trajectory.broken is None else trajectory.broken.code
            self._account.note(
                "trajectory.end", trajectory.id, image=trajectory.image, outcome=how, calls=trajectory.finished
            )

    async def reap(self) -> None:
        """End trajectories that were neither called nor renewed within their TTL. Runs until cancelled."""
        while True:
            shortest = min((one.ttl_s for one in self._open.values()), default=self._settings.ttl_s)
            await asyncio.sleep(min(5.0, shortest / 4))
            now = time.monotonic()
            for trajectory in list(self._open.values()):
                if not trajectory.running and trajectory.opening.done() and trajectory.touched + trajectory.ttl_s < now:
                    trajectory.how = "expired"
                    self._open.pop(trajectory.id, None)
                    self._release(trajectory)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new trajectories and calls, and wait for running calls, up to the timeout."""
        self.draining = True
        running = [call.task for one in self._open.values() for call in one.calls.values() if not call.task.done()]
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    async def aclose(self) -> None:
        """End all trajectories."""
        self.draining = True
        for trajectory in self._open.values():
            trajectory.how = "server ended"
        await asyncio.gather(*(self.end(one) for one in list(self._open)), return_exceptions=True)
        await self._releases.settle(None)
