"""Runs one tool once: every failure of the tool itself becomes a result."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial

from atropos.aio import Allowance, cancelled_from_outside, first_of
from atropos.errors import OutcomeUnknown, SandboxError
from atropos.tools.base import Tool, ToolError, ToolScope, as_result, tool_states
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed.text import clip_result

_NOTES = 2000
"""Characters beyond `max_output_bytes` that a tool which keeps to it may use for notes, such as where it left out
some."""

_log = logging.getLogger(__name__)


async def run_tool(tool: Tool, arguments: object, scope: ToolScope) -> ToolResult:
    """Run a tool on checked arguments, then the trajectory's `ToolState` hooks. Their own failures become a result.

    Raises:
        SandboxError: the infrastructure failed.
    """
    started = time.perf_counter()
    result = await _attempt(tool.name, partial(tool.run, arguments, scope), tool.timeout_s)
    if result.timed_out:
        await scope.slot.check_alive()  # a frozen or unreachable slot is not a slow tool
    if result.duration_s == 0:
        result = result.model_copy(update={"duration_s": time.perf_counter() - started})
    for state in tool_states(scope.state):
        result = await _attempt(f"{type(state).__name__}.after_call", partial(state.after_call, result, scope))
    return clip_result(result, scope.limits.max_output_bytes + _NOTES).encodable()


@contextlib.contextmanager
def tool_code() -> Generator[None]:
    """Around a tool's own code: a failure keeps its cause, whatever a task group or library wraps it in.

    Raises:
        SandboxError: the infrastructure failed, in a group of errors too.
        OutcomeUnknown: the tool awaited what others cancelled.
        ToolError: the tool raised it, in a group of errors too.
        RuntimeError: the tool exits, which would end the whole process.
    """
    try:
        with cancelled_from_outside(OutcomeUnknown):
            yield
    except SystemExit as error:
        raise RuntimeError(f"it exited with {error.code}") from error
    except ExceptionGroup as errors:
        failure = errors.subgroup(SandboxError) or errors.subgroup(ToolError)
        if failure is None:
            raise
        raise first_of(failure) from errors


async def _attempt(name: str, work: Callable[[], Awaitable[object]], timeout_s: float | None = None) -> ToolResult:
    bound = Allowance(timeout_s)
    try:
        async with bound.once():
            with tool_code():
                return as_result(await work())
    except ToolError as error:
        return ToolResult.failure(str(error), limit=error.limit)
    except SandboxError:
        raise
    except TimeoutError as error:
        return timed_out(name, error, timeout_s if bound.expired else None)
    except OSError as error:  # a slot's files raise as Python's own do
        where = f": {error.filename}" if error.filename else ""
        return ToolResult.failure(f"{error.strerror or error}{where}")
    except Exception as error:
        _log.exception("tool %s failed", name)
        return ToolResult.failure(f"the tool {name} failed: {type(error).__name__}: {error}"[:1000])


def timed_out(name: str, error: TimeoutError, timeout_s: float | None) -> ToolResult:
    """The result of a call that took longer than `timeout_s`; None: the tool itself raised the error."""
    late = "timed out" if timeout_s is None else f"took longer than {timeout_s:g} s"
    return ToolResult.failure(f"{name} {late}{f': {error}'[:500] if str(error) else ''}", timed_out=True)
