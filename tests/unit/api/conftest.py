"""A ToolServer with small tools that do what tests need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from atropos.api.settings import Bounds, ToolServerSettings
from atropos.api.tool_server import create_app
from atropos.errors import OutcomeUnknown, SandboxError, ToolServerUnavailable
from atropos.tools.base import Tool, ToolError, tool
from atropos.tools.models import ToolResult

from .site import Site

TOKEN = "right-token"


class Jar:
    """A piece of a trajectory's state that tells whether it was closed."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True


class Workbench:
    """Tools, and what they saw."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.hold = asyncio.Event()
        self.started = asyncio.Event()
        self.running = 0
        self.most = 0
        self.jar = Jar
        self.jars: list[Jar] = []

    def tools(self) -> list[Tool]:
        @tool(sandboxed=False, toolsets=("test",))
        async def note(text: str) -> str:
            """Write something down."""
            self.ran.append(text)
            return f"noted {text}"

        @tool(sandboxed=False, toolsets=("test",))
        async def hang(text: str = "") -> str:
            """Wait until it is let go."""
            self.running += 1
            self.most = max(self.most, self.running)
            self.started.set()
            try:
                await self.hold.wait()
            finally:
                self.running -= 1
            self.ran.append(text)
            return f"held {text}"

        @tool(sandboxed=False, toolsets=("test",))
        async def fail(how: str, text: str = "") -> str:
            """Fail."""
            self.ran.append(how)
            if how == "tool":
                raise ToolError("write it differently")
            if how == "infrastructure":
                raise ToolServerUnavailable("the provider is down")
            if how == "unknown":
                raise OutcomeUnknown("the connection was lost while it ran")
            if how == "afterwards":
                raise SandboxError("the order was written, then the database was lost")
            if how == "late":
                raise TimeoutError("the shop did not answer")
            if how == "exit":
                raise SystemExit(2)  # as argparse does
            if how == "stray":
                raise asyncio.CancelledError
            if how == "grouped":
                raise ExceptionGroup("parts", [ToolServerUnavailable("one provider of two was lost")])
            if how == "half":
                raise ToolError("half of a pair: \ud83d")
            raise RuntimeError("a bug")

        @tool(sandboxed=False, toolsets=("test",), timeout_s=30)
        async def slow() -> str:
            """Take 0.1 s of 30."""
            await asyncio.sleep(0.1)
            return "done"

        @tool(sandboxed=False, toolsets=("test",), read_only=True)
        async def look() -> str:
            """Fail without having changed anything."""
            self.ran.append("look")
            raise SandboxError("the shop's database is away")

        @tool(sandboxed=False, toolsets=("test",))
        async def big(size: int) -> dict[str, Any]:
            """Answer much."""
            return {"text": "x" * size}

        @tool(sandboxed=False, toolsets=("test",))
        async def halves() -> ToolResult:
            """Answer half of a surrogate pair everywhere, as pypdf does."""
            return ToolResult(success=True, output="\ud83d hello", data={"pages": ["\ud83d"], "\udc00": 1})

        @tool(sandboxed=False, toolsets=("test",))
        async def keep(item: str, scope: Any) -> str:
            """Keep something in the trajectory."""
            jar = scope.state.get("jar")
            if jar is None:
                jar = scope.state["jar"] = self.jar()
                self.jars.append(jar)
            jar.items.append(item)
            return ",".join(jar.items)

        return [note, hang, fail, slow, look, big, halves, keep]


@pytest.fixture
def bench() -> Workbench:
    return Workbench()


@contextlib.asynccontextmanager
async def served(bench: Workbench, **settings: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    """The app with its lifespan, and a client that has the token. `client.host` is its ToolHost."""
    app = create_app(ToolServerSettings(token=SecretStr(TOKEN), **settings), tools=bench.tools())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            client.host = app.state.host
            yield client
            bench.hold.set()


def call(name: str, trajectory: str = "t1", call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {"trajectory_id": trajectory, "call_id": call_id, "name": name, "arguments": arguments}


ONE_AT_A_TIME = Bounds(concurrency=1, queue=1)


@pytest.fixture
async def site() -> AsyncGenerator[Site, None]:
    running = Site()
    await running.start()
    yield running
    await running.stop()
