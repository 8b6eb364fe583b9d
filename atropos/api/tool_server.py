"""The ToolServer: external tools over HTTP, outside every sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated

from fastapi import FastAPI, Path, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import SecretStr
from starlette.convertors import PathConvertor, register_url_convertor

from atropos.aio import Tasks
from atropos.api.external import external_services
from atropos.api.gate import Gate
from atropos.api.http import Refusal, add_error_handlers, describe_auth, door_of, problems
from atropos.api.settings import ToolServerSettings, search_from_environment
from atropos.api.tool_host.host import ToolHost
from atropos.tools.base import Tool
from atropos.tools.tool_server.messages import (
    MAX_REQUEST_BYTES,
    VERSION,
    BatchRequest,
    ExecuteAnswer,
    ExecuteRefusal,
    ExternalCall,
    ToolInfo,
    ToolList,
    ToolServerHealth,
    TrajectoryEnded,
)

_ERRORS = problems(401, 409, 410, 413, 422, 429, 503)


class _AnythingConvertor(PathConvertor):
    """The rest of a path, line breaks included: a trajectory's id may contain any character."""

    regex = "(?s:.*)"


register_url_convertor("anything", _AnythingConvertor())
_DESCRIPTION = (
    "Runs external tools (web, browser, MCP servers, your own) for agents. Send `Authorization: Bearer TOKEN` with "
    "every request but /health. 429 and 503 say in Retry-After when to ask again. A call is run once: send it again "
    "under the same call_id to get its answer."
)


def create_app(
    settings: ToolServerSettings | None = None, *, token: SecretStr | None = None, tools: Sequence[Tool] = ()
) -> FastAPI:
    """The ToolServer as an ASGI app; it works between its lifespan's start and end.

    Args:
        settings: None: defaults, and the search provider that the environment names (for use in one process).
        token: overrides the settings' token; without either, no token is required.
        tools: further external tools.

    Raises:
        ConfigError: a tool can't be offered, or a setting is wrong.
    """
    chosen = settings or ToolServerSettings(search=search_from_environment())
    host = ToolHost(chosen)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        async with external_services(chosen) as offered:
            for tool in (*offered, *tools):
                host.offer(tool)
            host.check_overrides()
            try:
                async with Tasks("ToolServer") as tasks:
                    tasks.spawn(host.reap(), "idle trajectories")
                    yield
            finally:
                await host.aclose()

    app = FastAPI(
        title="atropos ToolServer", version=str(VERSION), description=_DESCRIPTION, lifespan=lifespan, redoc_url=None
    )
    app.state.host = host
    add_error_handlers(app)
    describe_auth(app)
    secret = token or chosen.token
    app.add_middleware(
        Gate, door=door_of(None if secret is None else secret.get_secret_value()), max_body_bytes=MAX_REQUEST_BYTES
    )
    _add_routes(app, host)
    return app


def _add_routes(app: FastAPI, host: ToolHost) -> None:
    @app.get("/health")
    async def health() -> ToolServerHealth:
        """Whether the server takes calls."""
        return ToolServerHealth(status="draining" if host.draining else "ok", boot_id=host.boot_id)

    @app.get("/tools", responses=problems(401), response_model_by_alias=True)
    async def tools() -> ToolList:
        """The tools, with their OpenAI function-calling schemas."""
        return ToolList(boot_id=host.boot_id, tools=tuple(_info(host, tool) for tool in host.tools.values()))

    @app.get("/stats", responses=problems(401))
    async def stats() -> dict[str, str | int | bool]:
        """Counts of calls, trajectories and journal entries."""
        return host.stats()

    @app.post("/execute", responses=_ERRORS, response_model=ExecuteAnswer)
    async def execute(call: ExternalCall) -> Response:
        """Run one call and answer its result. A tool's own failure is a result too."""
        answer = await host.wait(call, host.submit(call))
        return Response(answer.model_dump_json(), media_type="application/json")  # checked once is enough

    @app.post(
        "/batch",
        responses={**_ERRORS, 200: {"content": {"application/x-ndjson": {}}, "description": "one line a call"}},
        response_class=StreamingResponse,
    )
    async def batch(request: BatchRequest) -> StreamingResponse:
        """Run many calls. Each answer is a line of JSON, sent as soon as its call has ended."""
        return StreamingResponse(_lines(host, request.calls), media_type="application/x-ndjson")

    @app.delete("/trajectories/{trajectory_id:anything}", responses=problems(401, 422))
    async def end(
        trajectory_id: Annotated[str, Path(min_length=1, max_length=500)],
        life: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    ) -> TrajectoryEnded:
        """End a trajectory: its running calls are cancelled, its browser context and other state closed.

        With the `life` that its calls named, calls of it that are still in transit are refused with 410.
        """
        return TrajectoryEnded(ended=await host.end(trajectory_id, life))


def _info(host: ToolHost, tool: Tool) -> ToolInfo:
    return ToolInfo(
        name=tool.name,
        toolset=tool.toolsets[0] if tool.toolsets else "custom",
        schema=tool.schema.to_openai(),
        timeout_s=tool.timeout_s or host.settings.timeout_s,
        read_only=tool.read_only,
    )


async def _answer(host: ToolHost, call: ExternalCall) -> ExecuteAnswer | ExecuteRefusal:
    """A call of a batch. Submitted in the task's first step, so that a batch's calls take their turns in its order."""
    try:
        return await host.wait(call, host.submit(call))
    except Refusal as refusal:
        return host.refused(call, refusal)


async def _lines(host: ToolHost, calls: Sequence[ExternalCall]) -> AsyncIterator[str]:
    async with Tasks("batch") as tasks:
        answers = [tasks.spawn(_answer(host, call), call.call_id, awaited=True) for call in calls]
        for finished in asyncio.as_completed(answers):
            yield (await finished).model_dump_json() + "\n"
