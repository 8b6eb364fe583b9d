"""Runs one tool once: every failure of the tool itself becomes a result."""

from __future__ import annotations

import asyncio
import logging
import time

from atropos.errors import SandboxError
from atropos.tools.base import Tool, ToolError, ToolScope, as_result
from atropos.tools.models import ToolResult

_log = logging.getLogger(__name__)


async def run_tool(tool: Tool, arguments: object, scope: ToolScope) -> ToolResult:
    """Run a tool on checked arguments; every failure of the tool itself becomes a result.

    Raises:
        SandboxError: the infrastructure failed.
    """
    started = time.perf_counter()
    try:
        if tool.timeout_s is None:
            result = as_result(await tool.run(arguments, scope))
        else:
            async with asyncio.timeout(tool.timeout_s):
                result = as_result(await tool.run(arguments, scope))
    except ToolError as error:
        result = ToolResult.failure(str(error), limit=error.limit)
    except SandboxError:
        raise
    except TimeoutError as error:
        late = "timed out" if tool.timeout_s is None else f"took longer than {tool.timeout_s:g} s"
        result = ToolResult.failure(f"{tool.name} {late}{f': {error}' if str(error) else ''}", timed_out=True)
    except OSError as error:  # a slot's files raise as Python's own do
        where = f": {error.filename}" if error.filename else ""
        result = ToolResult.failure(f"{error.strerror or error}{where}")
    except Exception as error:
        _log.exception("tool %s failed", tool.name)
        result = ToolResult.failure(f"the tool {tool.name} failed: {type(error).__name__}: {error}"[:1000])
    if result.duration_s == 0:
        result = result.model_copy(update={"duration_s": time.perf_counter() - started})
    return result.encodable()
