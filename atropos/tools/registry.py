"""Which tools there are, which of them a model is offered, and whether a call fits one of them."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import cast

from pydantic import BaseModel

from atropos.errors import ConfigError
from atropos.tools.arguments import BadArguments, check, check_encodable, coerce, parse_object
from atropos.tools.base import Tool, check_tool
from atropos.tools.models import ToolCall
from atropos.tools.toolsets import EXTERNAL, TOOLSETS

ENTRY_POINTS = "atropos.tools"
"""The entry point group: a `Tool`, a list of them, or a function without arguments that returns either."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedCall:
    """A call's tool, and its arguments as the tool's model (None: an external tool) and as they were given."""

    tool: Tool
    arguments: BaseModel | None
    raw_arguments: dict[str, object]


class ToolRegistry:
    """The tools that a model is offered, by name, in a stable order."""

    def __init__(
        self, tools: Iterable[Tool] = (), *, enabled: Sequence[str] = (), disabled: Sequence[str] = ()
    ) -> None:
        self.enabled: tuple[str, ...] = tuple(enabled)
        self.disabled: tuple[str, ...] = tuple(disabled)
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool, *, replace: bool = False) -> None:
        """Offer one more tool.

        Raises:
            ConfigError: it can't be offered, or another has its name.
        """
        check_tool(tool)
        if not replace and self._tools.get(tool.name, tool) is not tool:
            raise ConfigError(f"tool {tool.name!r}: another tool has that name; choose another, or replace=True")
        self._tools[tool.name] = tool

    def remove(self, name: str) -> None:
        """Remove a tool; an unknown name changes nothing."""
        self._tools.pop(name, None)

    def get(self, name: str) -> Tool | None:
        """The tool of that name, if it is offered."""
        return self._tools.get(name)

    def check(self, call: ToolCall) -> CheckedCall:
        """Find a call's tool and check the arguments.

        Raises:
            BadArguments: no such tool is offered, or the arguments are wrong; the message says what would be right.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            raise BadArguments(self.unknown(call.name))
        arguments = coerce(parse_object(tool.name, call.arguments), tool.schema.parameters)
        if tool.sandboxed:
            return CheckedCall(tool, check(tool.name, tool.arguments, arguments), arguments)
        check_encodable(tool.name, arguments)  # the ToolServer checks the rest
        return CheckedCall(tool, None, arguments)

    def unknown(self, name: str) -> str:
        """The error text for a tool that isn't offered."""
        shown = name[:100].encode("utf-8", "backslashreplace").decode()
        close = difflib.get_close_matches(shown, self._tools, n=1, cutoff=0.6)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"there is no tool {shown!r}.{hint} The tools are: {', '.join(self._tools) or 'none'}"

    def wants(self, toolset: str) -> bool:
        """Whether a toolset that only the ToolServer knows (an MCP server's) is enabled."""
        names = {toolset, "mcp"} if toolset.startswith("mcp-") else {toolset}
        return bool(names & {*self.enabled} or "all" in self.enabled) and not names & {*self.disabled}

    def schemas(self) -> list[dict[str, object]]:
        """Every tool in OpenAI's function-calling form, as a request's `tools`."""
        return [tool.schema.to_openai() for tool in self]

    @property
    def names(self) -> list[str]:
        """The tools' names."""
        return list(self._tools)

    @property
    def toolsets(self) -> set[str]:
        """Every toolset that has one of these tools."""
        return {toolset for tool in self for toolset in toolsets_of(tool)}

    @property
    def external(self) -> list[Tool]:
        """The tools that run on a ToolServer."""
        return [tool for tool in self if not tool.sandboxed]

    def __iter__(self) -> Iterator[Tool]:
        return iter(list(self._tools.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"<ToolRegistry {', '.join(self._tools) or 'empty'}>"


def build_tool_registry(
    enabled_toolsets: Sequence[str] | None = None,
    disabled_toolsets: Sequence[str] | None = None,
    tool_server_url: str | None = None,
    *,
    tools: Iterable[Tool] = (),
) -> ToolRegistry:
    """The tools of the enabled toolsets.

    Args:
        enabled_toolsets: names of toolsets; None or empty means `default`; `all` means every tool.
        disabled_toolsets: tools of these are not offered, whatever else enables them.
        tool_server_url: where external tools run: a URL, or `inprocess`. None: no external tools.
        tools: the caller's own, offered unless a disabled toolset has them.

    Raises:
        ConfigError: an unknown toolset, one that needs a ToolServer where there is none, no tool is left, or one of the
            caller's is none.
    """
    for field, names in (("enabled_toolsets", enabled_toolsets), ("disabled_toolsets", disabled_toolsets)):
        if isinstance(names, str):
            raise ConfigError(f"{field}: write a list of names, not the text {names!r}")
    own = tools_of(list(tools), "tools")
    catalogue = _catalogue(own)
    enabled = list(enabled_toolsets or ["default"])
    disabled = list(disabled_toolsets or [])
    _check_toolsets(catalogue, enabled, disabled, tool_server_url)
    chosen = ToolRegistry(enabled=enabled, disabled=disabled)
    left_out: list[str] = []
    mine = {id(tool) for tool in own}
    for tool in catalogue:
        groups = toolsets_of(tool)
        if groups & {*disabled} or not (id(tool) in mine or groups & {*enabled}):
            continue
        if tool.sandboxed or tool_server_url is not None:
            chosen.register(tool)
        elif id(tool) in mine:
            raise ConfigError(
                f"tool {tool.name!r} is external; set tool_server_url to a ToolServer's URL or 'inprocess'"
            )
        else:
            left_out.append(tool.name)
    if left_out:
        _log.warning("external tools are not offered because tool_server_url is not set: %s", ", ".join(left_out))
    if not chosen and not any(chosen.wants(name) for name in enabled if name == "mcp" or name not in TOOLSETS):
        raise ConfigError(f"disabled_toolsets: {', '.join(disabled)} leaves no tool of {', '.join(enabled)}")
    return chosen


def toolsets_of(tool: Tool) -> set[str]:
    """Every toolset that has this tool, those that have others' included."""
    mcp = {"mcp"} if any(name.startswith("mcp-") for name in tool.toolsets) else set[str]()
    return {*tool.toolsets, "all"} | mcp


def _check_toolsets(
    catalogue: Sequence[Tool], enabled: Sequence[str], disabled: Sequence[str], tool_server_url: str | None
) -> None:
    known = {*TOOLSETS, *(name for tool in catalogue for name in tool.toolsets)}
    for field, names in (("enabled_toolsets", enabled), ("disabled_toolsets", disabled)):
        for name in names:
            # a ToolServer may have it: `adopt_offered` checks that for those that are enabled
            elsewhere = tool_server_url is not None and (names is enabled or name.startswith("mcp"))
            if name not in known and not elsewhere:
                raise ConfigError(f"{field}: unknown toolset {name!r}; known: {', '.join(sorted(known))}")
    lacking = [name for name in enabled if name in EXTERNAL]
    if lacking and tool_server_url is None:
        raise ConfigError(
            f"enabled_toolsets: {lacking[0]!r} runs on a ToolServer; set tool_server_url to its URL or 'inprocess'"
        )


def user_tools(*, sandboxed: bool | None = None) -> list[Tool]:
    """The tools that installed packages offer by the entry point group `atropos.tools`.

    Raises:
        ConfigError: an entry point can't be loaded or is no tool.
    """
    tools: list[Tool] = []
    for point in entry_points(group=ENTRY_POINTS):
        try:
            value = point.load()
        except Exception as error:
            raise ConfigError(f"entry point {point.name!r} of {ENTRY_POINTS} can't be loaded: {error}") from error
        tools += tools_of(value, f"entry point {point.name!r} of {ENTRY_POINTS}")
    return [tool for tool in tools if sandboxed is None or tool.sandboxed is sandboxed]


def tools_of(value: object, where: str) -> list[Tool]:
    """The tools in a `Tool`, a list of them, a `Tool` class, or a function that returns one of these.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, Tool):
        return [value]
    if callable(value) and _makes(value):
        return tools_of(cast("Callable[[], object]", value)(), where)
    if isinstance(value, list | tuple):
        return [tool for one in cast("Sequence[object]", value) for tool in tools_of(one, where)]
    raise ConfigError(
        f"{where}: expected a Tool (@tool makes one of a function), a list of them or a function that returns them, "
        f"not {value!r:.80}"
    )


def _makes(function: Callable[..., object]) -> bool:
    """Whether it may return tools, and is no tool that lacks its `@tool`."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return not inspect.iscoroutinefunction(function)


def _catalogue(own: list[Tool]) -> list[Tool]:
    from atropos.tools.sandboxed.builtin import sandbox_tools
    from atropos.tools.tool_server.external import external_tools

    names = {tool.name for tool in own}
    every = [*sandbox_tools(), *external_tools()]
    built_in = {tool.name for tool in every}
    for tool in own:
        if tool.name in built_in and not tool.replaces_built_in:
            raise ConfigError(
                f"tool {tool.name!r} has a built-in tool's name; choose another, or set replaces_built_in=True on it"
            )
    installed = user_tools()
    for tool in installed:
        if tool.name in built_in:
            raise ConfigError(f"tool {tool.name!r} of an entry point has a built-in tool's name; choose another")
    return [tool for tool in [*every, *installed] if tool.name not in names] + own
