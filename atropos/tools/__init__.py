"""Tools, their registry and the executor that routes calls to slots."""

from atropos.tools.base import Arguments, Tool, ToolError, ToolLimits, ToolScope, tool
from atropos.tools.executor import ToolExecutor
from atropos.tools.models import ToolCall, ToolResult, ToolSchema
from atropos.tools.registry import ToolRegistry, build_tool_registry
from atropos.tools.settings import ToolExecutorConfig
from atropos.tools.toolsets import Distribution, get_distribution, register_distribution

__all__ = [
    "Arguments",
    "Distribution",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolExecutor",
    "ToolExecutorConfig",
    "ToolLimits",
    "ToolRegistry",
    "ToolResult",
    "ToolSchema",
    "ToolScope",
    "build_tool_registry",
    "get_distribution",
    "register_distribution",
    "tool",
]
