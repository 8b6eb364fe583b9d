"""Runs a trajectory's tool calls: lease, order, routing, and whose failure an error is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict

from pydantic import BaseModel

from atropos import tracing
from atropos.aio import outlive
from atropos.errors import (
    AcquireTimeout,
    ConfigError,
    LeaseExpired,
    NotSupported,
    OutcomeUnknown,
    SandboxError,
    SlotLost,
)
from atropos.metrics import Family, gauge
from atropos.tools.arguments import BadArguments, check, check_encodable, coerce, parse_object
from atropos.tools.base import Tool, ToolError, ToolScope
from atropos.tools.isolation import IsolationCheck
from atropos.tools.models import ToolCall, ToolResult, new_call_id
from atropos.tools.registry import ToolRegistry
from atropos.tools.running import run_tool
from atropos.tools.sandboxed.recording import write_recordings
from atropos.tools.settings import ToolExecutorConfig
from atropos.tools.stats import ExecutorStats, Meter
from atropos.tools.tool_server.client import ToolServerClient
from atropos.tools.tool_server.offered import adopt_offered, own_external
from atropos.tools.trajectory import TrajectoryState, fingerprint
from atropos.wire import LeaseLimits

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from atropos.slots import Slot, SlotPool, Snapshot

MAX_WAITING = 256
"""Calls of one trajectory that may wait for their turn."""
INTERRUPT_S = 5.0
"""How long a release waits for interrupted calls before it takes their slot away."""
FINISH_S = 5.0
"""How long a release waits for tools to store their recordings."""

_log = logging.getLogger(__name__)

CheckedCall = tuple[Tool, BaseModel | None, dict[str, object]]
"""A call's tool, its arguments as that tool's model (None: they are checked where the tool runs), and as they came."""


class _LeaseOptions(TypedDict, total=False):
    """What `SlotPool.acquire` is asked for where it is not the pool's default."""

    snapshot: Snapshot
    network: bool
    image: str
    limits: LeaseLimits


class ToolExecutor:
    """Runs tool calls: each trajectory's in the order given, different trajectories' at once.

    A result is what the model reads. An exception is the infrastructure's failure (`SandboxError`): the trajectory is
    then broken, every further call of it fails alike, and it must be released.
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
        self._releases: dict[TrajectoryState, asyncio.Task[None]] = {}
        self._isolation = IsolationCheck(
            sandbox=self.config.require_sandbox, stateful=self.config.require_stateful_sandbox
        )
        self._meter = Meter()
        self._state = "new"
        self._server: ToolServerClient | None = None
        if self.config.tool_server_url is not None:
            self._server = ToolServerClient(
                self.config.tool_server_url,
                self.config.tool_server_token,
                timeout_s=self.config.tool_server_timeout_s,
                app_factory=tool_server_app,
                tools=own_external(tools),
            )
        elif tools.external:
            names = ", ".join(tool.name for tool in tools.external)
            raise ConfigError(f"tool_server_url: {names} run on a ToolServer; set it to a URL or 'inprocess'")

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Get ready; with a ToolServer, learn its tools.

        Raises:
            ToolServerUnavailable: the ToolServer can't be reached.
            ConfigError: it offers none of the tools of a toolset that was asked for.
        """
        if self._state != "new":
            raise RuntimeError(f"the executor is {self._state}; make a new one")
        if self.config.max_batch_size is not None:
            self.pool.bound_frames(self.config.max_batch_size)
        if self._server is not None:
            adopt_offered(self.tools, await self._server.start())
        self._state = "open"

    async def close(self) -> None:
        """Release every trajectory and close the way to the ToolServer. Outlives cancellation; idempotent."""
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

        A call with the id, name and arguments of a recent one is not run again: it gets that one's result.

        Raises:
            SandboxError: the infrastructure failed; nothing may be concluded about the model.
            LeaseExpired: the trajectory was released while the call ran or waited.
            RuntimeError: the executor is not open.
        """
        trajectory = self._trajectory(trajectory_id)
        started = time.perf_counter()
        checked = self._check(call)
        name = call.name if call.name in self.tools else "(unknown)"
        try:
            with self._span(trajectory_id, name, call) as span:
                async with self._call(trajectory):
                    result = await self._run(trajectory, call, checked)
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

    def _check(self, call: ToolCall) -> CheckedCall | ToolResult:
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult.failure(self.tools.unknown(call.name))
        try:
            given = coerce(parse_object(tool.name, call.arguments), tool.schema.parameters)
            if tool.sandboxed:
                return tool, check(tool.name, tool.arguments, given), given
            check_encodable(tool.name, given)  # the rest is checked where the tool runs
        except BadArguments as error:
            return ToolResult.failure(str(error))
        return tool, None, given

    def mistake_in(self, call: ToolCall) -> str | None:
        """What is wrong with a call before it runs: an unknown tool, its arguments; None: it can run."""
        checked = self._check(call)
        return checked.error if isinstance(checked, ToolResult) else None

    async def _run(self, trajectory: TrajectoryState, call: ToolCall, checked: CheckedCall | ToolResult) -> ToolResult:
        if isinstance(checked, ToolResult):
            return checked
        known = trajectory.answered.get(call.id)
        if known is not None and known[0] == fingerprint(call):
            if known[1] is None:
                raise OutcomeUnknown(
                    f"call {call.id} of {trajectory.id} was given up while it ran; it is not run again"
                )
            return known[1]
        tool, arguments, given = checked
        slot = await self._leased(trajectory) if tool.sandboxed else None
        answer: ToolResult | None = None
        remember = True
        try:
            if slot is not None:
                result = await self._in_slot(trajectory, call, tool, arguments, slot)
            else:
                result = await self._on_server(trajectory, tool, given)
            answer = result
        except SandboxError as error:
            remember = isinstance(error, OutcomeUnknown)
            raise
        finally:
            if remember:
                trajectory.remember(call, answer)
        return result

    async def _in_slot(
        self, trajectory: TrajectoryState, call: ToolCall, tool: Tool, arguments: object, slot: Slot
    ) -> ToolResult:
        scope = ToolScope(trajectory.id, call.id, self.config.limits, trajectory.state, slot)
        try:
            result = await run_tool(tool, arguments, scope)
            for kept in trajectory.kept():
                result = await kept.after_call(result, scope)
        except SandboxError as error:
            if not isinstance(error, NotSupported):
                trajectory.broken = error
            raise
        return result

    async def _on_server(self, trajectory: TrajectoryState, tool: Tool, given: dict[str, object]) -> ToolResult:
        if self._server is None:
            raise ConfigError(f"tool {tool.name!r} is external; set tool_server_url")
        trajectory.external = True
        # A fresh id on the wire: models repeat theirs, and to the server the same id is the same call.
        with trajectory.asking("ToolServer"):
            return await self._server.execute(trajectory.id, new_call_id(), tool.name, given, timeout_s=tool.timeout_s)

    # ------------------------------------------------------------------------------------------------ leases

    async def slot(
        self,
        trajectory_id: str,
        *,
        network: bool | None = None,
        image: str | None = None,
        limits: LeaseLimits | None = None,
    ) -> Slot:
        """The trajectory's slot, acquired where it has none: for set-up and verification around the model's calls.

        Args:
            trajectory_id: whose it is.
            network: False gives a slot that is acquired now no egress, whatever is configured.
            image: what a slot that is acquired now stands on; None: the pool's base.
            limits: what a slot that is acquired now has instead of the pool's.

        Raises:
            AcquireTimeout: no slot came free in time.
            SandboxError: the trajectory is broken, or no slot could be had.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            return await self._leased(trajectory, network=network, image=image, limits=limits)

    def holds(self, trajectory_id: str) -> bool:
        """Whether the trajectory has a slot."""
        trajectory = self._trajectories.get(trajectory_id)
        return trajectory is not None and trajectory.slot is not None

    async def check_alive(self, trajectory_id: str) -> None:
        """Where calls of a trajectory were given up before they were answered, check that their answers could come.

        The silence of a container that is frozen or cut off says nothing about what a model did.

        Raises:
            SandboxError: the slot or the ToolServer gives no sign of life, or no slot had come free.
        """
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            return
        if trajectory.slot is not None:
            await trajectory.slot.check_alive()
        elif "pool" in trajectory.silent:
            raise AcquireTimeout(f"trajectory {trajectory_id!r}: a call was given up before a slot came free")
        if "ToolServer" in trajectory.silent and self._server is not None:
            await self._server.check_alive()

    async def view(self, trajectory_id: str, folders: Sequence[str]) -> None:
        """Run the trajectory's later calls in a view of its slot; see `Slot.view`.

        Background processes and sessions of the slot go on, but tools know of them no more.

        Raises:
            NotSupported: a folder can't be shown.
            SandboxError: the slot is lost.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            slot = await self._leased(trajectory)
            await self._finish_kept(trajectory)
            trajectory.recorded = trajectory.recordings()
            trajectory.state.clear()
            await slot.view(folders)

    async def start_from(self, trajectory_id: str, snapshot: Snapshot) -> Slot:
        """Lease the trajectory's slot as a fork of a snapshot.

        Raises:
            RuntimeError: the trajectory has a slot already.
            SandboxError: no slot could be had.
        """
        trajectory = self._trajectory(trajectory_id)
        async with self._call(trajectory):
            if trajectory.slot is not None:
                raise RuntimeError(f"trajectory {trajectory_id!r} has a slot already; release it first")
            return await self._leased(trajectory, snapshot)

    async def _leased(
        self,
        trajectory: TrajectoryState,
        snapshot: Snapshot | None = None,
        *,
        network: bool | None = None,
        image: str | None = None,
        limits: LeaseLimits | None = None,
    ) -> Slot:
        if trajectory.slot is None:
            options: _LeaseOptions = {} if snapshot is None else {"snapshot": snapshot}
            if image is not None:
                options["image"] = image
            if self.config.allow_network is False or network is False:
                options["network"] = False
            if limits is not None:
                options["limits"] = limits
            asked = time.perf_counter()
            with trajectory.asking("pool"):
                slot = await self.pool.acquire(trajectory.id, **options)
            trajectory.acquire_s += time.perf_counter() - asked
            if trajectory.released:  # the acquire did not heed its interruption
                await slot.release()
                raise LeaseExpired(f"trajectory {trajectory.id!r} was released while it waited for a slot")
            trajectory.slot = slot
            if self._isolation.required:
                try:
                    await self._isolation.check(slot)
                except SandboxError as error:
                    trajectory.broken = error
                    raise
            return slot
        return trajectory.slot

    def acquire_s(self, trajectory_id: str) -> float:
        """Seconds that the trajectory has waited for its slot; 0 where it has none."""
        trajectory = self._trajectories.get(trajectory_id)
        return 0.0 if trajectory is None else trajectory.acquire_s

    async def release_trajectory(self, trajectory_id: str, reset_workspace: bool = True) -> None:
        """End a trajectory: its calls are interrupted, its slot goes back and is reset.

        Calls that run or wait end with `LeaseExpired`. A call made after this is the first of a new trajectory of that
        name, in another slot. Releasing an unknown or released trajectory does nothing but wait for a release that is
        under way. Outlives cancellation.

        Args:
            trajectory_id: whose it was.
            reset_workspace: whether to wait until the slot is back. The slot never keeps anything either way.
        """
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is not None:
            pending = [self._begin_release(trajectory)]
        else:
            pending = [task for one, task in self._releases.items() if one.id == trajectory_id]
        if pending and reset_workspace:
            await asyncio.shield(asyncio.gather(*pending))

    def _begin_release(self, trajectory: TrajectoryState) -> asyncio.Task[None]:
        self._trajectories.pop(trajectory.id, None)
        trajectory.released = True
        task = asyncio.get_running_loop().create_task(self._release(trajectory), name=f"release {trajectory.id}")
        self._releases[trajectory] = task
        task.add_done_callback(lambda _: self._releases.pop(trajectory, None))
        return task

    async def _release(self, trajectory: TrajectoryState) -> None:
        for task in list(trajectory.calls):
            trajectory.interrupted.add(task)
            task.cancel()
        if trajectory.calls:
            trajectory.idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_S):
                    await trajectory.idle.wait()
        # Each on its own: a recording that can't be written or a slot that is gone keeps nothing else from being given back.
        steps: list[Awaitable[object]] = [self._put_away(trajectory)]
        if trajectory.slot is not None:
            steps.append(trajectory.slot.release())
        if trajectory.external and self._server is not None:
            steps.append(self._server.end_trajectory(trajectory.id))
        for step in steps:
            try:
                await step
            except SandboxError as error:
                # The slot went with its container: the pool knows, and there is nothing left to give back.
                _log.info("release of %s: %s", trajectory.id, error)
            except Exception:
                _log.exception("release of trajectory %s failed", trajectory.id)

    async def _put_away(self, trajectory: TrajectoryState) -> None:
        """Let tools finish what they kept, while the slot is still there, and write the recordings."""
        await self._finish_kept(trajectory)
        recordings = trajectory.recordings()
        if recordings and self.config.recordings_dir is not None:
            await asyncio.to_thread(write_recordings, self.config.recordings_dir, trajectory.id, recordings)

    async def _finish_kept(self, trajectory: TrajectoryState) -> None:
        scope = ToolScope(trajectory.id, "release", self.config.limits, trajectory.state, trajectory.slot)
        for kept in trajectory.kept() if trajectory.broken is None else ():
            try:
                async with asyncio.timeout(FINISH_S):
                    await kept.finish(scope)
            except (SandboxError, ToolError, TimeoutError) as error:
                _log.info("release of %s: a tool could not finish: %s", trajectory.id, error)
            except Exception:
                _log.exception("release of %s: what a tool kept could not be finished", trajectory.id)

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
        cancelling = task.cancelling()
        trajectory.calls[task] = trajectory.calls.get(task, 0) + 1
        try:
            async with trajectory.turn:
                if trajectory.broken is not None:
                    # This call never started, whatever became of the one that found out.
                    unknown = isinstance(trajectory.broken, OutcomeUnknown)
                    raise (SlotLost if unknown else type(trajectory.broken))(
                        f"trajectory {trajectory.id!r} is broken and must be released: {trajectory.broken}"
                    ) from trajectory.broken
                yield
            if task in trajectory.interrupted:
                raise asyncio.CancelledError  # the tool swallowed it
        except BaseException:
            if task in trajectory.interrupted and task.uncancel() <= cancelling:
                raise LeaseExpired(f"trajectory {trajectory.id!r} was released while the call ran") from None
            raise
        finally:
            del trajectory.calls[task]
            trajectory.interrupted.discard(task)
            if not trajectory.calls:
                trajectory.idle.set()
                if trajectory.empty and self._trajectories.get(trajectory.id) is trajectory:
                    del self._trajectories[trajectory.id]  # it holds nothing that a release would give back

    # ------------------------------------------------------------------------------------------------ sight

    def recordings(self, trajectory_id: str) -> dict[str, str]:
        """The trajectory's terminal sessions that were recorded, by name, as asciinema v2 text."""
        trajectory = self._trajectories.get(trajectory_id)
        return {} if trajectory is None else trajectory.recordings()

    def stats(self) -> ExecutorStats:
        """Counts and times since the start, and what is going on now."""
        return self._meter.stats(
            trajectories=len(self._trajectories),
            leased=sum(one.slot is not None for one in self._trajectories.values()),
            broken=sum(one.broken is not None for one in self._trajectories.values()),
            running=sum(len(one.calls) for one in self._trajectories.values()),
            releasing=len(self._releases),
        )

    def metrics(self) -> list[Family]:
        """The executor's metrics; `atropos.metrics.exposition` writes them for Prometheus."""
        return [
            self._meter.seconds.family(),
            gauge("atropos_tool_trajectories", "Trajectories that the executor holds.", len(self._trajectories)),
        ]

    def __repr__(self) -> str:
        return f"<ToolExecutor {self._state}, {len(self._trajectories)} trajectories, {len(self.tools)} tools>"
