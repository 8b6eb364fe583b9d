"""The external tools of a ToolServer, built from its settings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import AsyncGenerator, Iterable

from atropos.api.external.browser import BrowserHost, browser_available
from atropos.api.external.browser_tools import browser_tools
from atropos.api.external.extract import Extractor, WebExtract
from atropos.api.external.guard import Guard, guarded_client
from atropos.api.external.mcp import McpConnection, McpTool
from atropos.api.external.search import WebSearch, search_client
from atropos.api.settings import ToolServerSettings
from atropos.errors import ConfigError
from atropos.tools.base import Tool
from atropos.tools.registry import tools_of, user_tools

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def external_services(settings: ToolServerSettings) -> AsyncGenerator[list[Tool], None]:
    """The tools, open until the context ends.

    Raises:
        ConfigError: a setting is wrong, or a tool that was asked for by name can't be offered.
        ToolServerUnavailable: an MCP server can't be reached.
    """
    guard = Guard(settings.allow_hosts)
    async with contextlib.AsyncExitStack() as stack:
        tools: list[Tool] = [*own_tools(settings.tools), *user_tools(sandboxed=False)]
        missing: dict[str, str] = {}
        if settings.search is not None:
            tools.append(WebSearch(await stack.enter_async_context(search_client()), settings.search))
        else:
            missing["web_search"] = "no search provider is configured (search.provider, or SEARXNG_URL)"
        if importlib.util.find_spec("trafilatura") is not None and importlib.util.find_spec("pypdf") is not None:
            extractor = Extractor()
            stack.push_async_callback(extractor.aclose)
            web = await stack.enter_async_context(guarded_client(guard))
            tools.append(WebExtract(web, guard, extractor, max_bytes=settings.fetch_bytes))
        else:
            missing["web_extract"] = "trafilatura or pypdf is not installed (pip install 'atropos[web]')"
        if problem := browser_available(settings.browser):
            missing["browser"] = problem
        else:
            browser = BrowserHost(settings.browser, guard)
            stack.push_async_callback(browser.aclose)
            tools += browser_tools(browser)
        for server in settings.mcp:
            if importlib.util.find_spec("mcp") is None:
                raise ConfigError("mcp: the package mcp is not installed (pip install 'atropos[mcp]')")
            connection = McpConnection(server)
            stack.push_async_callback(connection.aclose)
            tools += [McpTool(connection, described) for described in await connection.tools()]
        yield _chosen(tools, settings, missing)


def _chosen(tools: list[Tool], settings: ToolServerSettings, missing: dict[str, str]) -> list[Tool]:
    """The tools that `only` names. One that can't be offered is an error if it is named, else a line in the log."""
    only = settings.only
    if only is None:
        for name, reason in missing.items():
            _log.warning("%s is not offered: %s", name, reason)
        return tools
    known = {name for tool in tools for name in (tool.name, *tool.toolsets)}
    for name in only:
        if name in missing:
            raise ConfigError(f"only: {name}: {missing[name]}")
        if name not in known:
            raise ConfigError(f"only: there is no external tool or toolset {name!r}; known: {', '.join(sorted(known))}")
    return [tool for tool in tools if {tool.name, *tool.toolsets} & {*only}]


def own_tools(names: Iterable[str]) -> list[Tool]:
    """Tools given as `module:attribute`; the attribute is what `tools_of` takes.

    Raises:
        ConfigError: it can't be imported or is no external tool.
    """
    tools: list[Tool] = []
    for name in names:
        module, colon, attribute = name.partition(":")
        if not colon:
            raise ConfigError(f"tools: {name!r}: write module:attribute")
        try:
            value: object = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"tools: {name!r} can't be imported: {error}") from None
        tools += tools_of(value, f"tools: {name!r}")
    return tools
