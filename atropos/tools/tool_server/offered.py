"""What a ToolServer offers, and what a registry adopts of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atropos.errors import ConfigError
from atropos.tools.base import Tool
from atropos.tools.registry import ToolRegistry, user_tools
from atropos.tools.tool_server.external import ExternalTool
from atropos.tools.tool_server.messages import ToolInfo
from atropos.tools.toolsets import EXTERNAL, TOOLSETS

_log = logging.getLogger(__name__)


def adopt_offered(tools: ToolRegistry, offered: Sequence[ToolInfo]) -> None:
    """Make a registry's external tools those that a ToolServer offers, with its schemas.

    Raises:
        ConfigError: it offers no tool of a toolset that is enabled by name.
    """
    by_name = {info.name: info for info in offered}
    missing = [tool for tool in tools.external if tool.name not in by_name]
    for info in offered:
        mine = tools.get(info.name)
        if mine is not None and mine.sandboxed:
            _log.warning("the ToolServer's tool %r is not offered: a sandboxed tool has that name", info.name)
        elif mine is not None or tools.wants(info.toolset):
            function = info.schema_.get("function", info.schema_)
            offered_tool = ExternalTool(
                info.name,
                str(function.get("description") or info.name),
                info.toolset,
                parameters=function.get("parameters") or {"type": "object", "properties": {}},
                read_only=info.read_only,
                timeout_s=info.timeout_s,
            )
            tools.register(offered_tool, replace=True)
    for tool in missing:
        _log.warning("tool %r is not offered to the model because the ToolServer does not have it", tool.name)
        tools.remove(tool.name)
    asked = {name for name in tools.enabled if tools.wants(name)} - ({*TOOLSETS} - EXTERNAL)
    for toolset in sorted(asked - tools.toolsets):
        known = ", ".join(sorted({info.toolset for info in offered})) or "none"
        raise ConfigError(f"enabled_toolsets: the ToolServer offers no tool of {toolset!r}; its toolsets: {known}")


def own_external(tools: ToolRegistry) -> list[Tool]:
    """The caller's own external tools, which a ToolServer in this process is given."""
    installed = {tool.name for tool in user_tools(sandboxed=False)}
    return [tool for tool in tools.external if not isinstance(tool, ExternalTool) and tool.name not in installed]
