"""Runs a trajectory's tool calls: leases, order, routing, and whose failure an error is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from atropos import tracing
from atropos.aio import Tasks, outlive, set_within
from atropos.errors import (
    AcquireTimeout,
    ConfigError,
    IsolationUnavailable,
    LeaseExpired,
    NotSupported,
    OutcomeUnknown,
    SandboxError,
    SlotLost,
)
from atropos.metrics import Family, gauge
from atropos.tools.arguments import BadArguments
from atropos.tools.base import ToolScope
from atropos.tools.models import ToolCall, ToolResult, new_call_id
from atropos.tools.registry import CheckedCall, ToolRegistry
from atropos.tools.running import run_tool
from atropos.tools.sandboxed.recording import write_recordings
from atropos.tools.settings import ToolExecutorConfig
from atropos.tools.stats import ExecutorStats, Meter
from atropos.tools.tool_server.client import Life, ToolServerClient
from atropos.tools.tool_server.offered import adopt_offered, own_external
from atropos.tools.trajectory import TrajectoryState
from atropos.wire import LeaseLimits, ViewInfo

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from atropos.slots import Share, Slot, SlotPool, Snapshot

MAX_WAITING = 256
"""Calls of one trajectory that may wait for their turn."""
INTERRUPT_S = 5.0
"""How long a release waits for interrupted calls before it releases their slot."""

_log = logging.getLogger(__name__)


class ToolExecutor:
    """Runs tool calls: those of one trajectory in the order given, those of different trajectories concurrently.

    A result is for the model. An exception is a failure of the infrastructure (`SandboxError`): the trajectory is then
    broken, every later call of it fails with the same error, and it must be released.
    """

    def __init__(
        self,
        pool: SlotPool,
        tools: ToolRegistry,
        config: ToolExecutorConfig | None = None,
        *,
        tool_server_app: Callable[[], Starlette] | None = None,
    ) -> None:
        self.pool = pool
        self.tools = tools
        self.config = config or ToolExecutorConfig()
        self._trajectories: dict[str, TrajectoryState] = {}
        self._tasks = Tasks("executor")
        self._releases: dict[TrajectoryState, asyncio.Task[None]] = {}
        self._isolated: set[str] = set()
        """Containers that have the isolation which the configuration requires."""
        self._meter = Meter()
        self._state = "new"
        self._server: ToolServerClient | None = None
        if self.config.tool_server_url is not None:
            self._server = ToolServerClient(
                self.config.tool_server_url,
                self.config.tool_server_token,
                app_factory=tool_server_app,
                tools=own_external(tools),
            )
        elif tools.external:
            names = ", ".join(tool.name for tool in tools.external)
            raise ConfigError(f"tool_server_url: {names} run on a ToolServer; set it to a URL or 'inprocess'")

    # ------------------------------------------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Open the executor. With a ToolServer, connect to it and adopt its tools.

        Raises:
            ToolServerUnavailable: the ToolServer can't be reached.
            ConfigError: it offers none of the tools of a toolset that was asked for.
        """
        if self._state != "new":
            raise RuntimeError(f"the executor is {self._state}; make a new one")
        if self.config.max_batch_size is not None:
            # Before any slot is leased.
            self.pool.bound_frames(self.config.max_batch_size)
        if self._server is not None:
            try:
                adopt_offered(self.tools, await self._server.start())
            except BaseException:
                await self._server.close()
                raise
        self._state = "open"

    async def close(self) -> None:
        """Release every trajectory and disconnect from the ToolServer. Outlives cancellation; idempotent."""
        if self._state == "closed":
            return
        self._state = "closed"
        await outlive(self._close())

    async def _close(self) -> None:
        for trajectory in list(self._trajectories.values()):
            self._begin_release(trajectory)
        await asyncio.gather(*self._releases.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------ calls

    async def execute(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        """Run one call, after the trajectory's earlier ones.

        Raises:
            SandboxError: the infrastructure failed, which says nothing about the model.
            LeaseExpired: the trajectory was released while the call ran or waited.
            RuntimeError: the executor is not open.
        """
        trajectory = self._trajectory(trajectory_id)
        started = time.perf_counter()
        # Before its turn: a mistake of the model's needs no slot, though its answer waits for the calls before it.
        checked = self._check(call)
        # Names that models invent would each become a time series.
        name = call.name if call.name in self.tools else "(unknown)"
        try:
            with self._span(trajectory_id, name, call) as span:
                async with self._call(trajectory):
                    if isinstance(checked, CheckedCall):
                        result = await self._run(trajectory, call, checked)
                    else:
                        result = ToolResult.failure(checked)
                if not result.success:
                    span.fail("tool_error")
        except SandboxError as error:
            self._meter.seconds.observe(time.perf_counter() - started, name, error.code)
            raise
        self._meter.count(name, result, time.perf_counter() - started)
        return result

    def _span(self, trajectory_id: str, name: str, call: ToolCall) -> tracing.Span:
        return tracing.span(
            f"execute_tool {name}",
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name=name,
            gen_ai__tool__type="function",
            gen_ai__tool__call__id=call.id,
            gen_ai__conversation__id=trajectory_id,
        )

    def _check(self, call: ToolCall) -> CheckedCall | str:
        try:
            return self.tools.check(call)
        except BadArguments as error:
            return str(error)

    def mistake_in(self, call: ToolCall) -> str | None:
        """What is wrong with a call before it runs: an unknown tool, wrong arguments; None: it can run."""
        checked = self._check(call)
        return checked if isinstance(checked, str) else None

    async def _run(self, trajectory: TrajectoryState, call: ToolCall, checked: CheckedCall) -> ToolResult:
        if checked.tool.sandboxed:
            return await self._in_slot(trajectory, call, checked, await self._leased(trajectory))
        return await self._on_server(trajectory, checked)

    async def _in_slot(
        self, trajectory: TrajectoryState, call: ToolCall, checked: CheckedCall, slot: Slot
    ) -> ToolResult:
        scope = ToolScope(trajectory.id, call.id, self.config.limits, trajectory.state, slot)
        try:
            return await run_tool(checked.tool, checked.arguments, scope)
        except SandboxError as error:
            # What the slot can't do says nothing against its next call.
            if not isinstance(error, NotSupported):
                trajectory.broken = error
            raise

    async def _on_server(self, trajectory: TrajectoryState, checked: CheckedCall) -> ToolResult:
        tool = checked.tool
        if self._server is None:
            raise ConfigError(f"tool {tool.name!r} is external; set tool_server_url")
        life = trajectory.life = trajectory.life or Life(trajectory.id)
        # A fresh id on the wire: models repeat theirs, and the server takes a repeated id for the same call.
        with trajectory.requesting("ToolServer"):
            return await self._server.execute(life, new_call_id(), tool.name, checked.raw_arguments)

    # ------------------------------------------------------------------------------------------------ leases

    async def slot(
        self,
        trajectory_id: str,
        *,
        network: bool | None = None,
        image: str | None = None,
        limits: LeaseLimits | None = None,
        share: Share | None = None,
    ) -> Slot:
        """The trajectory's slot, acquired if it has none: for set-up and verification around the model's calls.

        `network`, `image`, `limits` and `share` are for a slot that is acquired now, and as in `SlotPool.acquire`.

        Raises:
            AcquireTimeout: no slot came free in time.
            SandboxError: the trajectory is broken, or no slot could be leased.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            return await self._leased(trajectory, network=network, image=image, limits=limits, share=share)

    def held_slot(self, trajectory_id: str) -> Slot | None:
        """The slot that the trajectory has now, for a look at it beside its calls."""
        trajectory = self._trajectories.get(trajectory_id)
        return None if trajectory is None else trajectory.slot

    def has_slot(self, trajectory_id: str) -> bool:
        """Whether the trajectory has a slot."""
        return self.held_slot(trajectory_id) is not None

    def broken(self, trajectory_id: str) -> SandboxError | None:
        """The failure that broke the trajectory: until its release every call fails."""
        trajectory = self._trajectories.get(trajectory_id)
        return None if trajectory is None else trajectory.broken

    async def check_alive(self, trajectory_id: str) -> None:
        """Check why calls of a trajectory have no answer: a frozen or unreachable container is no fault of a model.

        Raises:
            SandboxError: the slot or the ToolServer does not answer, or no slot had come free.
        """
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            return
        if trajectory.slot is not None:
            await trajectory.slot.check_alive()
        elif "pool" in trajectory.unanswered:
            raise AcquireTimeout(f"trajectory {trajectory_id!r}: a call was cancelled before a slot came free")
        if "ToolServer" in trajectory.unanswered and self._server is not None:
            await self._server.check_alive()

    async def view(
        self,
        trajectory_id: str,
        folders: Sequence[str],
        *,
        optional: Sequence[str] = (),
        programs: Sequence[str] = (),
        home: str | None = None,
    ) -> ViewInfo:
        """Run the trajectory's later calls in a view of its slot; see `Slot.view`.

        Background processes and sessions of the slot keep running, but tools forget them.

        Raises:
            NotSupported: a folder can't be shown.
            SandboxError: the slot is lost.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            slot = await self._leased(trajectory)
            await trajectory.end_sessions(self.config.limits)
            return await slot.view(folders, optional=optional, programs=programs, home=home)

    async def start_from(self, trajectory_id: str, snapshot: Snapshot) -> Slot:
        """Lease the trajectory's slot as a fork of a snapshot.

        Raises:
            RuntimeError: the trajectory has a slot already.
            SandboxError: no slot could be leased.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            if trajectory.slot is not None:
                raise RuntimeError(f"trajectory {trajectory_id!r} has a slot already; release it first")
            return await self._leased(trajectory, snapshot)

    async def fork(self, trajectory_id: str, fork_id: str) -> Slot:
        """Lease trajectory `fork_id`'s slot as a fork of this trajectory's, which ends.

        If this trajectory makes another call, it gets a slot that starts from the same snapshot: it holds none while it
        waits for the fork's, else those of a full pool would wait for each other.

        Raises:
            SandboxError: the slot was lost, or none could be leased.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            slot = await self._leased(trajectory)
            await trajectory.end_sessions(self.config.limits)
            trajectory.parked = await slot.snapshot()
            trajectory.slot = None
            await slot.release()
            return await self.start_from(fork_id, trajectory.parked)

    async def _leased(
        self,
        trajectory: TrajectoryState,
        snapshot: Snapshot | None = None,
        *,
        network: bool | None = None,
        image: str | None = None,
        limits: LeaseLimits | None = None,
        share: Share | None = None,
    ) -> Slot:
        if trajectory.slot is not None:
            return trajectory.slot
        # The executor's setting is a bound: no caller can lift it.
        if self.config.allow_network is False:
            network = False
        asked = time.perf_counter()
        with trajectory.requesting("pool"):
            slot = await self.pool.acquire(
                trajectory.id,
                snapshot=snapshot or trajectory.parked,
                network=network,
                image=image,
                limits=limits,
                share=share,
            )
        trajectory.acquire_s += time.perf_counter() - asked
        if trajectory.released:  # the acquire ignored its cancellation
            await slot.release()
            raise LeaseExpired(f"trajectory {trajectory.id!r} was released while it waited for a slot")
        trajectory.slot = slot
        # The slot was made of it; a snapshot takes room in its container.
        await trajectory.drop_parked()
        try:
            await self._check_isolation(slot)
        except SandboxError as error:
            trajectory.broken = error
            raise
        return slot

    async def _check_isolation(self, slot: Slot) -> None:
        sandbox, stateful = self.config.require_sandbox, self.config.require_stateful_sandbox
        # Once for each container: it is the same for all of its slots.
        if not (sandbox or stateful) or slot.container in self._isolated:
            return
        refusal = (await slot.capabilities()).refusal(slot.container, sandbox=sandbox, stateful=stateful)
        if refusal:
            raise IsolationUnavailable(refusal)
        self._isolated.add(slot.container)

    def acquire_s(self, trajectory_id: str) -> float:
        """Seconds that the trajectory waited for its slot; 0 if it has none."""
        trajectory = self._trajectories.get(trajectory_id)
        return 0.0 if trajectory is None else trajectory.acquire_s

    async def release_trajectory(self, trajectory_id: str, reset_workspace: bool = True) -> None:
        """End a trajectory: cancel its calls, release its slot, which is reset.

        Calls that run or wait end with `LeaseExpired`. A later call is the first of a new trajectory of that name, in
        another slot. Releasing an unknown or released trajectory only waits for a release that is under way. Outlives
        cancellation.

        Args:
            trajectory_id: the trajectory.
            reset_workspace: whether to wait until the slot is back; it is reset in either case.
        """
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is not None:
            pending = [self._begin_release(trajectory)]
        else:
            pending = [task for one, task in self._releases.items() if one.id == trajectory_id]
        if pending and reset_workspace:
            await asyncio.shield(asyncio.gather(*pending))

    def _begin_release(self, trajectory: TrajectoryState) -> asyncio.Task[None]:
        # At once: a later call of this name begins a new trajectory, while the old one is released.
        self._trajectories.pop(trajectory.id, None)
        trajectory.released = True
        # `released` was set before, so that `_call` shows the cancellation as `LeaseExpired`.
        for call in trajectory.calls:
            call.cancel()
        task = self._tasks.spawn(self._release(trajectory), f"release {trajectory.id}")
        self._releases[trajectory] = task
        task.add_done_callback(lambda _: self._releases.pop(trajectory, None))
        return task

    async def _release(self, trajectory: TrajectoryState) -> None:
        if trajectory.calls:
            trajectory.idle.clear()
            # A tool that ignores its cancellation would still use the slot that is about to be reset.
            await set_within(trajectory.idle, INTERRUPT_S)
        # Each by itself: a failed recording or a lost slot must not keep the rest from being released.
        steps: list[Awaitable[object]] = [self._store_recordings(trajectory), trajectory.drop_parked()]
        if trajectory.slot is not None:
            steps.append(trajectory.slot.release())
        if trajectory.life is not None and self._server is not None:
            steps.append(self._server.end(trajectory.life))
        for step in steps:
            try:
                await step
            except SandboxError as error:
                # The slot was lost with its container: the pool knows, and there is nothing left to release.
                _log.info("release of %s: %s", trajectory.id, error)
            except Exception:
                _log.exception("release of trajectory %s failed", trajectory.id)

    async def _store_recordings(self, trajectory: TrajectoryState) -> None:
        """Finish the tools' states while the slot is still there, and write the recordings."""
        await trajectory.finish_states(self.config.limits)
        recordings = trajectory.recordings()
        if recordings and self.config.recordings_dir is not None:
            await asyncio.to_thread(write_recordings, self.config.recordings_dir, trajectory.id, recordings)

    # ------------------------------------------------------------------------------------------------ turns

    def _trajectory(self, trajectory_id: str) -> TrajectoryState:
        if self._state != "open":
            raise RuntimeError(f"the executor is {'not started' if self._state == 'new' else 'closed'}")
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            if not trajectory_id or len(trajectory_id) > 500:
                raise ConfigError("trajectory_id: 1 to 500 characters")
            trajectory = self._trajectories[trajectory_id] = TrajectoryState(trajectory_id)
        if len(trajectory.calls) >= MAX_WAITING:
            raise RuntimeError(f"trajectory {trajectory_id!r} has {MAX_WAITING} calls waiting; await some first")
        return trajectory

    @contextlib.asynccontextmanager
    async def _call(self, trajectory: TrajectoryState) -> AsyncGenerator[None]:
        """One call's turn. A release interrupts it, which shows as `LeaseExpired` and not as a cancellation."""
        task = asyncio.current_task()
        assert task is not None
        # Counted now, so that a cancellation by the caller is told from that by a release.
        cancelling = task.cancelling()
        trajectory.calls.add(task)
        try:
            # asyncio's lock is fair: calls run in the order in which they came.
            async with trajectory.turn:
                if trajectory.broken is not None:
                    # This call never started, whatever became of the one that broke the trajectory.
                    unknown = isinstance(trajectory.broken, OutcomeUnknown)
                    raise (SlotLost if unknown else type(trajectory.broken))(
                        f"trajectory {trajectory.id!r} is broken and must be released: {trajectory.broken}"
                    ) from trajectory.broken
                yield
            if trajectory.released:
                raise asyncio.CancelledError  # the tool swallowed it
        except BaseException:
            # `uncancel` takes the release's own request back. If one is left, the caller has cancelled as well, which
            # goes first.
            if trajectory.released and task.uncancel() <= cancelling:
                raise LeaseExpired(f"trajectory {trajectory.id!r} was released while the call ran") from None
            raise
        finally:
            trajectory.calls.discard(task)
            if not trajectory.calls:
                trajectory.idle.set()
                if trajectory.empty and self._trajectories.get(trajectory.id) is trajectory:
                    del self._trajectories[trajectory.id]  # it holds nothing to release

    # ------------------------------------------------------------------------------------------------ observation

    def recordings(self, trajectory_id: str) -> dict[str, str]:
        """The trajectory's recorded terminal sessions by name, as asciinema v2 text."""
        trajectory = self._trajectories.get(trajectory_id)
        return {} if trajectory is None else trajectory.recordings()

    def stats(self) -> ExecutorStats:
        """Counts and times since the start, and the present state."""
        return self._meter.stats(self._trajectories.values(), len(self._releases))

    def metrics(self) -> list[Family]:
        """The executor's metrics; `atropos.metrics.exposition` writes them for Prometheus."""
        return [
            self._meter.seconds.family(),
            gauge("atropos_tool_trajectories", "Trajectories that the executor holds.", len(self._trajectories)),
        ]

    def __repr__(self) -> str:
        return f"<ToolExecutor {self._state}, {len(self._trajectories)} trajectories, {len(self.tools)} tools>"
