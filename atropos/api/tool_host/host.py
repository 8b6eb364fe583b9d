"""Runs external tools for many trajectories: each call once, bounded, and isolated from the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from atropos.aio import Allowance, Tasks
from atropos.api.http import Refusal
from atropos.api.settings import ToolServerSettings
from atropos.api.tool_host.answers import bounded
from atropos.api.tool_host.bounds import Place, Turnstile
from atropos.api.tool_host.journal import ToolCallJournal
from atropos.errors import ConfigError, OutcomeUnknown, SandboxError, ToolServerUnavailable
from atropos.tools.arguments import BadArguments, check
from atropos.tools.base import Tool, ToolError, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.running import timed_out, tool_code
from atropos.tools.tool_server.external import external_tools
from atropos.tools.tool_server.messages import ExecuteAnswer, ExecuteRefusal, ExternalCall, Owner

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
"""Timeout of closing one piece of a trajectory's state."""
_QUEUE_S = 60.0
"""Longest that a call waits for its turn before it is refused with Retry-After."""


@dataclass(eq=False)
class HostedTrajectory:
    """The state of one trajectory between its calls."""

    turnstile: Turnstile
    state_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: dict[str, object] = field(default_factory=dict[str, object])
    running: int = 0
    last_used: float = field(default_factory=time.monotonic)


class ToolHost:
    """The ToolServer without HTTP.

    Attributes:
        boot_id: identifies this process; a call that was sent to another one before is not run.
        draining: whether new calls are refused.
    """

    def __init__(self, settings: ToolServerSettings) -> None:
        self.settings = settings
        self.boot_id = uuid.uuid4().hex
        self.draining = False
        self.tools: dict[str, Tool] = {}
        self._gates: dict[str, Turnstile] = {}
        self._trajectories: dict[Owner, HostedTrajectory] = {}
        self._journal = ToolCallJournal(
            calls=settings.journal_calls, max_bytes=settings.journal_bytes, ttl_s=settings.journal_ttl_s
        )
        self._tasks = Tasks("ToolServer")
        self._endings = Tasks("ToolServer")
        self._failures: Counter[tuple[str, str]] = Counter()
        self.calls = 0

    def __repr__(self) -> str:
        return (
            f"<ToolHost tools={len(self.tools)} trajectories={len(self._trajectories)} {self._journal!r}"
            f"{' draining' if self.draining else ''}>"
        )

    def offer(self, tool: Tool) -> None:
        """Add a tool.

        Raises:
            ConfigError: it is a sandboxed one, or another has its name.
        """
        if tool.sandboxed:
            raise ConfigError(f"tool {tool.name!r} works in a slot; declare it with sandboxed=False to run it here")
        if tool.name in self.tools:
            raise ConfigError(f"tool {tool.name!r}: two tools have this name")
        self.tools[tool.name] = tool
        bounds = self.settings.tool_overrides.get(tool.name, self.settings.tool_bounds)
        self._gates[tool.name] = Turnstile(f"tool {tool.name}", bounds)

    def check_overrides(self) -> None:
        """Check that `tool_overrides` names tools: those offered, or the usual ones, which may be missing here.

        Raises:
            ConfigError: a name is no tool's.
        """
        known = {*self.tools, *(tool.name for tool in external_tools())}
        if unknown := sorted(self.settings.tool_overrides.keys() - known):
            raise ConfigError(f"tool_overrides: there is no tool {unknown[0]!r}; known: {', '.join(sorted(known))}")

    def stats(self) -> dict[str, str | int | bool]:
        """Counts for people and tests."""
        return {
            "boot_id": self.boot_id,
            "calls": self.calls,
            "running": len(self._journal.running()),
            "journal": len(self._journal),
            "trajectories": len(self._trajectories),
            "with_state": sum(1 for one in self._trajectories.values() if one.state),
            "draining": self.draining,
        }

    # ----------------------------------------------------------------------------------------------------- calls

    def submit(self, call: ExternalCall) -> asyncio.Future[ToolResult]:
        """Start a call, or find it where it was sent before. Synchronous: the order of arrival is the order of turns.

        Returns:
            The call's answer. Await it shielded: a client that goes away may come back for the answer.

        Raises:
            Refusal: the call is not run.
        """
        known = self._journal.find(call)
        if known is not None:
            return known
        if self.draining:
            raise Refusal(503, "draining", "the server is shutting down; ask another", retry_after_s=5)
        trajectory = self._trajectories.get(call.owner)
        if call.state_id is not None and (trajectory is None or trajectory.state_id != call.state_id):
            raise Refusal(
                409,
                "state_lost",
                "the state of this trajectory (such as its browser) is gone: the server restarted, or no call came "
                f"for {self.settings.trajectory_ttl_s:g} s",
            )
        tool = self.tools.get(call.name)
        resent = call.boot_id is not None
        if resent and not (tool is not None and tool.read_only):
            if call.boot_id != self.boot_id:
                raise Refusal(409, "outcome_unknown", "the server restarted; whether the call ran is not known")
            if self._journal.lossy():
                raise Refusal(409, "outcome_unknown", "the server no longer knows whether this call ran")
        if tool is None:
            known_names = ", ".join(sorted(self.tools)) or "none"
            return self._finished(
                call, ToolResult.failure(f"there is no tool {call.name[:100]!r} here; the tools are: {known_names}")
            )
        try:
            arguments = check(tool.name, tool.arguments, call.arguments)
        except BadArguments as error:
            return self._finished(call, ToolResult.failure(str(error)))
        return self._start(call, tool, arguments)

    def _finished(self, call: ExternalCall, result: ToolResult) -> asyncio.Future[ToolResult]:
        answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        answer.set_result(result)
        # Mistakes, too: a call that is sent again must get the same answer.
        self._journal.add(call, answer)
        return answer

    def _start(self, call: ExternalCall, tool: Tool, arguments: object) -> asyncio.Task[ToolResult]:
        trajectory = self._trajectory(call.owner)
        # Now and not in the task: turns are given in the order of arrival.
        turn = trajectory.turnstile.enter()
        trajectory.running += 1
        self.calls += 1
        task = self._tasks.spawn(self._in_turn(call, tool, arguments, trajectory, turn), tool.name, awaited=True)

        def ended(_: asyncio.Task[ToolResult]) -> None:
            # here and not in the task: a task cancelled before its first step never reaches its `finally`
            trajectory.turnstile.leave(turn)
            trajectory.running -= 1
            trajectory.last_used = time.monotonic()

        task.add_done_callback(ended)
        self._journal.add(call, task)
        return task

    def _trajectory(self, owner: Owner) -> HostedTrajectory:
        trajectory = self._trajectories.get(owner)
        if trajectory is None:
            if len(self._trajectories) >= self.settings.max_trajectories and not self._forget_one():
                raise Refusal(
                    429,
                    "busy",
                    f"{len(self._trajectories)} trajectories are open; end one with DELETE /trajectories/ID",
                    retry_after_s=5,
                )
            trajectory = HostedTrajectory(Turnstile("this trajectory", self.settings.trajectory_bounds))
            self._trajectories[owner] = trajectory
        trajectory.last_used = time.monotonic()
        return trajectory

    def _forget_one(self) -> bool:
        """Forget a trajectory without state. Whether there was one."""
        for owner, trajectory in self._trajectories.items():
            # One without state is the same as none: its next call begins it anew.
            if not trajectory.running and not trajectory.state and trajectory.turnstile.idle:
                del self._trajectories[owner]
                return True
        return False

    async def _in_turn(
        self, call: ExternalCall, tool: Tool, arguments: object, trajectory: HostedTrajectory, turn: Place
    ) -> ToolResult:
        """Run a call in its trajectory's order, then the tool's; while it waits for the first, it holds no place."""
        with contextlib.ExitStack() as places:
            try:
                async with asyncio.timeout(_QUEUE_S):
                    # Shielded, as the turnstile owns the future: `leave` takes the place back.
                    await asyncio.shield(turn)
                    gate = self._gates[tool.name]
                    place = gate.enter()
                    places.callback(gate.leave, place)
                    await asyncio.shield(place)
            except TimeoutError:
                message = f"no turn within {_QUEUE_S:g} s: the calls before it still run; retry later"
                raise Refusal(429, "busy", message, retry_after_s=5) from None
            scope = ToolScope(trajectory_id=call.trajectory_id, call_id=call.call_id, state=trajectory.state)
            return await self._run(tool, arguments, scope, call.timeout_s)

    async def _run(self, tool: Tool, arguments: object, scope: ToolScope, wanted_s: float | None) -> ToolResult:
        own = tool.timeout_s or self.settings.timeout_s
        # A tool whose own time is longer than the server's bound keeps it.
        timeout_s = min(wanted_s or own, max(own, self.settings.max_timeout_s))
        began = time.monotonic()
        most = self.settings.result_bytes
        bound = Allowance(timeout_s)
        try:
            async with bound.once():
                with tool_code():
                    value = await tool.run(arguments, scope)
                result = await bounded(value, result_bytes=most, data_bytes=self.settings.data_bytes)
        except TimeoutError as error:
            result = timed_out(tool.name, error, timeout_s if bound.expired else None)
        except ToolError as error:
            result = ToolResult.failure(str(error)[:most])
        except Refusal:
            raise
        except SandboxError as error:
            # one failure of a group doesn't tell what the others did
            sure = isinstance(error, ToolServerUnavailable) and not isinstance(error.__cause__, ExceptionGroup)
            if tool.read_only or sure or isinstance(error, OutcomeUnknown):
                raise
            raise OutcomeUnknown(f"{tool.name}: {error}") from error
        except Exception as error:
            self._log_failure(tool.name, error)
            result = ToolResult.failure(f"{tool.name} failed: {type(error).__name__}: {str(error)[:500]}")
        return result.encodable().model_copy(update={"duration_s": time.monotonic() - began})

    def _log_failure(self, name: str, error: Exception) -> None:
        """Log the first failure of a kind with its traceback, then every hundredth in a line."""
        kind = (name, type(error).__name__)
        self._failures[kind] += 1
        if self._failures[kind] == 1:
            _log.error("tool %s failed", name, exc_info=error)
        elif self._failures[kind] % 100 == 0:
            _log.error("tool %s failed %d times with %s", name, self._failures[kind], kind[1])

    def refused(self, call: ExternalCall, refusal: Refusal) -> ExecuteRefusal:
        """A refusal as a line of a batch."""
        return ExecuteRefusal(
            call_id=call.call_id,
            boot_id=self.boot_id,
            status=refusal.status,
            code=refusal.code,
            message=refusal.message,
            retry_after_s=refusal.retry_after_s,
        )

    async def wait(self, call: ExternalCall, answer: asyncio.Future[ToolResult]) -> ExecuteAnswer:
        """The answer of a submitted call. Cancelling the wait does not cancel the call.

        Raises:
            Refusal: the call has no result.
        """
        await asyncio.wait([answer])
        if answer.cancelled():
            raise Refusal(409, "trajectory_ended", "the trajectory was ended while the call ran")
        error = answer.exception()
        if isinstance(error, OutcomeUnknown):
            raise Refusal(409, error.code, str(error))
        if isinstance(error, SandboxError):
            raise Refusal(503, error.code, str(error), retry_after_s=1 if error.retryable else None)
        if error is not None:
            raise error
        trajectory = self._trajectories.get(call.owner)
        state_id = trajectory.state_id if trajectory is not None and trajectory.state else None
        return ExecuteAnswer(call_id=call.call_id, boot_id=self.boot_id, state_id=state_id, result=answer.result())

    # ---------------------------------------------------------------------------------------------- trajectories

    async def end(self, trajectory_id: str, life: str | None = None) -> bool:
        """End a trajectory at its client's request. Whether there was anything to end.

        Calls of a `life` that arrive after its end are refused. Without a `life`, a later call starts a new trajectory
        of that name.
        """
        if life is not None:
            self._journal.close((trajectory_id, life))
        return await self._end((trajectory_id, life))

    async def _end(self, owner: Owner) -> bool:
        """Cancel a trajectory's calls and close its state. Whether there was anything to end."""
        trajectory = self._trajectories.pop(owner, None)
        running = self._journal.forget(owner)
        if trajectory is None:
            return False
        ending = self._endings.spawn(self._close(trajectory, running), "end of a trajectory")
        await asyncio.shield(ending)  # continues when the client has disconnected
        return True

    async def _close(self, trajectory: HostedTrajectory, running: list[asyncio.Future[ToolResult]]) -> None:
        for task in running:
            task.cancel()
        # Their state is closed afterwards: a browser must not be closed under a call that uses it.
        if running:
            await asyncio.wait(running, timeout=_CLOSE_S)
        for name, value in list(trajectory.state.items()):
            close = getattr(value, "aclose", None)
            if close is not None:
                try:
                    async with asyncio.timeout(_CLOSE_S):
                        with tool_code():
                            await close()
                except Exception:
                    _log.exception("closing %s of a trajectory failed", name)
        trajectory.state.clear()

    async def reap(self) -> None:
        """End trajectories that were idle for their TTL. Runs until cancelled."""
        ttl = self.settings.trajectory_ttl_s
        while True:
            await asyncio.sleep(min(30.0, ttl / 4))
            oldest = time.monotonic() - ttl
            for owner in list(self._trajectories):
                trajectory = self._trajectories.get(owner)  # looked up again, since closing the earlier one took time
                if trajectory is not None and not trajectory.running and trajectory.last_used < oldest:
                    await self._end(owner)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls, wait for running ones up to the timeout, then end the rest; clients get an answer."""
        self.draining = True
        if running := self._journal.running():
            await asyncio.wait(running, timeout=timeout_s)
        await self.aclose()

    async def aclose(self) -> None:
        """End every trajectory with its running calls."""
        self.draining = True
        for task in self._journal.running():
            task.cancel()
        await asyncio.gather(*(self._end(one) for one in list(self._trajectories)), return_exceptions=True)
        await self._endings.settle(None)
