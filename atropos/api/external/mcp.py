"""The tools of MCP servers, offered as external tools. Each server's connection lives in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, cast

from pydantic import BaseModel, ConfigDict

from atropos.aio import Allowance, Tasks, cancel_and_wait, done_within, first_of
from atropos.api.settings import McpServerSettings
from atropos.errors import ConfigError, OutcomeUnknown, ToolServerUnavailable
from atropos.tools.base import Tool, ToolScope
from atropos.tools.models import ToolResult, ToolSchema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as Described

_log = logging.getLogger(__name__)
_CONNECT_S = 30.0
_MAX_TOOLS = 500
PING_S = 5.0
"""Timeout of the check whether a server hangs; one that does is reconnected."""
_CLOSE_S = 10.0
"""Timeout of closing a connection: the SDK takes up to 6.5 s to end a server that hangs, and cancelled before leaves it
running."""
_HTTP_ERROR = "Server returned an error response"
"""The SDK's message for an HTTP status of 400 and above that no MCP server wrote, as of a proxy before it."""


class AnyArguments(BaseModel):
    """Passed on as they are: the MCP server checks them against its own schema."""

    model_config = ConfigDict(frozen=True, extra="allow")


class McpConnection:
    """A connection to one server; reopened after a loss."""

    def __init__(self, server: McpServerSettings) -> None:
        self.server = server
        self._ready: asyncio.Future[Client] | None = None
        self._tasks = Tasks(f"MCP server {server.name}")
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock = asyncio.Lock()
        self._check: asyncio.Task[bool] | None = None
        self.answered = 0
        """Calls that it answered: a server that answers some is no hanging one, however late it is."""

    def __repr__(self) -> str:
        return f"<McpConnection {self.server.name} {'down' if self._task is None else 'up'}>"

    async def client(self, within_s: float = _CONNECT_S) -> Client:
        """The open connection.

        Args:
            within_s: longest wait; a connection that takes longer is there for later calls.

        Raises:
            ToolServerUnavailable: the server can't be started or reached.
        """
        try:
            async with asyncio.timeout(within_s):
                async with self._lock:
                    if self._ready is None or self._task is None or self._task.done():
                        self._ready, self._stop = asyncio.get_running_loop().create_future(), asyncio.Event()
                        self._task = self._tasks.spawn(self._hold(self._ready, self._stop), "connection")
                    ready = self._ready
                return await asyncio.shield(ready)
        except Exception as error:
            raise ToolServerUnavailable(f"MCP server {self.server.name!r}: {_reason(error)}") from error

    async def _hold(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        """Enter and leave the client in one task, as its cancel scopes need."""
        try:
            async with asyncio.timeout(_CONNECT_S) as opening, self._made() as client:
                opening.reschedule(None)
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else ConnectionError("cancelled"))
                ready.exception()  # retrieved here, so that asyncio logs nothing if no one waits
            elif isinstance(error, Exception):
                _log.warning("MCP server %s: the connection ended: %s", self.server.name, _reason(error))
            else:
                raise

    @contextlib.asynccontextmanager
    async def _made(self) -> AsyncGenerator[Client, None]:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import (
            create_mcp_http_client,  # pyright: ignore[reportPrivateImportUsage]
            streamable_http_client,
        )

        server = self.server
        async with contextlib.AsyncExitStack() as stack:
            if server.command is not None:
                inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
                parameters = StdioServerParameters(
                    command=server.command, args=list(server.args), env={**inherited, **server.env}
                )
                # The SDK takes the stderr of the moment it is imported; the operator's is the process's own.
                transport = stdio_client(parameters, cast("TextIO", sys.__stderr__ or subprocess.DEVNULL))
            else:
                headers = {name: value.get_secret_value() for name, value in server.headers.items()}
                http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
                transport = streamable_http_client(str(server.url), http_client=http)
            yield await stack.enter_async_context(Client(transport, read_timeout_seconds=server.timeout_s))

    async def lost(self, client: Client, error: Exception) -> None:
        """Drop a connection that failed, unless it was replaced already."""
        async with self._lock:
            ready = self._ready
            if ready is not None and ready.done() and ready.exception() is None and ready.result() is client:
                _log.warning("MCP server %s does not answer; reconnecting: %s", self.server.name, _reason(error))
                await self._close()

    def suspect(self, client: Client) -> None:
        """After a call timed out: check whether the whole server hangs, or only the tool."""
        if self._check is None or self._check.done():
            self._check = self._tasks.spawn(self.answers(client), "check")

    async def answers(self, client: Client) -> bool:
        """Whether the server answers this connection, which is dropped if not."""
        before = self.answered
        try:
            async with Allowance(PING_S).once():
                await client.list_tools(cache_mode="bypass")  # every server has it; `ping` is gone from the protocol
        except Exception as error:
            if isinstance(error, TimeoutError) and self.answered > before:
                return True
            await self.lost(client, error)
            return False
        return True

    async def _close(self) -> None:
        self._stop.set()
        task, ready, self._task, self._ready = self._task, self._ready, None, None
        if task is not None:
            if ready is not None and ready.done():  # otherwise it is being opened, and waits only for the server
                await done_within(task, _CLOSE_S)
            await cancel_and_wait([task], _CLOSE_S)

    async def aclose(self) -> None:
        """End the connection; a server started here ends with it."""
        await cancel_and_wait([self._check])
        async with self._lock:
            await self._close()

    async def tools(self) -> list[Described]:
        """The server's tools, or those that the settings select.

        Raises:
            ToolServerUnavailable: the server fails.
            ConfigError: a selected tool isn't there.
        """
        client = await self.client()
        described: list[Described] = []
        cursor: str | None = None
        try:
            while len(described) < _MAX_TOOLS:
                page = await client.list_tools(cursor=cursor)
                described += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        except Exception as error:
            raise ToolServerUnavailable(f"MCP server {self.server.name!r}: {_reason(error)}") from error
        selected = self.server.tools
        if selected is None:
            return described
        if missing := set(selected) - {tool.name for tool in described}:
            raise ConfigError(f"mcp server {self.server.name!r} has no tool {min(missing)!r}")
        return [tool for tool in described if tool.name in selected]


class McpTool(Tool):
    """One tool of an MCP server."""

    sandboxed = False
    arguments = AnyArguments

    def __init__(self, connection: McpConnection, described: Described) -> None:
        server = connection.server
        self._connection = connection
        self._described = described
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server.name}_{described.name}")[:64]
        self.description = described.description or described.title or f"{described.name} of {server.name}"
        self.toolsets = (f"mcp-{server.name}",)
        self.timeout_s = server.timeout_s
        hints = described.annotations
        self.read_only = bool(hints is not None and hints.read_only_hint)

    @cached_property
    def schema(self) -> ToolSchema:
        """The server's own schema, with the `properties` that inference servers require of a tool without arguments."""
        schema = self._described.input_schema
        parameters = {**schema, "properties": schema.get("properties") or {}}
        return ToolSchema(name=self.name, description=self.description, parameters=parameters)

    async def run(self, arguments: Any, scope: ToolScope) -> ToolResult:
        """Pass the call on.

        Raises:
            ToolServerUnavailable: the server can't be reached; the call did not run.
            OutcomeUnknown: the connection, or the server's session, was lost while it ran.
        """
        del scope
        from mcp import MCPError, types

        timeout_s = self._connection.server.timeout_s
        # less than the call has: a missing server is not its tool's failure
        client = await self._connection.client(min(_CONNECT_S, timeout_s / 2))
        asked = time.monotonic()
        try:
            answer = await client.call_tool(self._described.name, arguments.model_dump())
        except MCPError as error:
            # servers use the SDK's own codes for errors of theirs, so a code alone says nothing of the connection
            if error.code == types.REQUEST_TIMEOUT and time.monotonic() - asked >= timeout_s:
                self._connection.suspect(client)
                return ToolResult.failure(f"{self.name} did not finish within {timeout_s:g} s", timed_out=True)
            if not await self._connection.answers(client) or error.message == _HTTP_ERROR:
                raise self._broken(error) from error
            return ToolResult.failure(f"{self.name}: {error.message}")
        except asyncio.CancelledError:
            self._connection.suspect(client)
            raise
        except OSError as error:  # RuntimeError is the SDK's of an answer that the tool's own schema forbids
            await self._connection.lost(client, error)
            raise self._broken(error) from error
        self._connection.answered += 1
        output = "\n".join(_text(part) for part in answer.content)
        data = answer.structured_content if isinstance(answer.structured_content, dict) else None
        if answer.is_error:
            return ToolResult.failure(output or f"{self.name} failed", data=data)
        return ToolResult(success=True, output=output or json.dumps(data, ensure_ascii=False), data=data)

    def _broken(self, error: Exception) -> Exception:
        message = f"MCP server {self._connection.server.name!r}: {_reason(error)}"
        return ToolServerUnavailable(message) if self.read_only else OutcomeUnknown(message)


def _text(part: Any) -> str:
    kind = getattr(part, "type", "")
    if kind == "text":
        return str(part.text)
    if kind in {"image", "audio"}:
        return f"[{kind}, {part.mime_type}, {len(part.data) * 3 // 4:,} bytes]"
    resource = getattr(part, "resource", part)
    return str(getattr(resource, "text", None) or f"[{kind or 'content'} {getattr(resource, 'uri', '')}]")


def _reason(error: BaseException) -> str:
    error = first_of(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {str(error)[:300]}"
