"""The executor API: trajectories as resources, for agents in other processes or languages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Header, Path, Request, Response
from fastapi.responses import StreamingResponse

from atropos import tracing
from atropos.aio import Tasks
from atropos.api.e2b.app import ROOT_PATH, create_e2b_app
from atropos.api.e2b.ports import HostRoutes, SandboxHosts
from atropos.api.executor.models import (
    MAX_REQUEST_BYTES,
    CallAnswer,
    CallBody,
    EndTrajectoryReply,
    ExecutorHealth,
    ExecutorServerSettings,
    OpenTrajectory,
    PrepareImage,
    ServerStatus,
    ToolSchemas,
    TrajectoryInfo,
    TrajectoryList,
    UsageReport,
)
from atropos.api.executor.trajectories import OpenCall, Trajectories
from atropos.api.gate import Gate, counted_body
from atropos.api.http import Refusal, add_error_handlers, describe_auth, problems
from atropos.api.shells import add_shells
from atropos.api.tenants import Tenants, admin_of, tenant_of
from atropos.metrics import CONTENT_TYPE, build_info, exposition
from atropos.wire import ImageState

if TYPE_CHECKING:
    from atropos.tools import ToolExecutor

_ERRORS = problems(401, 404, 409, 410, 413, 422, 429, 503)
_DESCRIPTION = (
    "Runs tool calls of agents in isolated slots. Open a trajectory, send its calls, end it. Send "
    "`Authorization: Bearer KEY` with every request but /health. 429 and 503 say in Retry-After when to ask again. "
    "A call sent again under its id (or `Idempotency-Key`) is not run again. With `Accept: text/event-stream` a call "
    "answers events: `waiting` every few seconds, then `result` or `error`. A trajectory without a call or renewal for "
    "its ttl_s ends."
)
WAITING_S = 5.0
"""Interval of the `waiting` events of a long call: proxies cut silent connections."""
_MAX_ID = 200

Id = Annotated[str, Path(min_length=1, max_length=_MAX_ID)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=_MAX_ID)]


def create_executor_app(settings: ExecutorServerSettings, *, executor: ToolExecutor | None = None) -> FastAPI:
    """The executor API as an ASGI app; pool and executor live as long as its lifespan.

    Args:
        settings: what the pool is, which tools there are, and the bounds.
        executor: an open `ToolExecutor` of the caller's own, which is not closed here. None: one is made.

    Raises:
        ConfigError: a setting is wrong.
    """
    app = FastAPI(title="atropos executor", version="1", description=_DESCRIPTION, redoc_url=None)
    tenants = app.state.tenants = Tenants(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        async with contextlib.AsyncExitStack() as stack:
            if settings.otlp_endpoint is not None:
                traces = tracing.start(settings.otlp_endpoint, "atropos executor")
                stack.push_async_callback(asyncio.to_thread, traces.close)
            ready = executor or await stack.enter_async_context(_made(settings))
            app.state.executor = ready
            tenants.open(ready)
            try:
                async with Tasks("executor API") as tasks:
                    tasks.spawn(tenants.reload(), "keys file")
                    yield
            finally:
                await asyncio.gather(app.state.shells.aclose(), app.state.hosts.aclose())
                await tenants.aclose()

    app.router.lifespan_context = lifespan
    add_error_handlers(app)
    describe_auth(app)
    app.add_middleware(Gate, door=tenants.enter, max_body_bytes=MAX_REQUEST_BYTES, own_gate=(f"{ROOT_PATH}/",))
    app.state.e2b = create_e2b_app(tenants.enter, settings.e2b_domain)
    app.state.hosts = SandboxHosts(settings.e2b_domain, lambda: (each.sandboxes for each in tenants.all()))
    if settings.e2b_domain is not None:
        app.add_middleware(HostRoutes, hosts=app.state.hosts, root_path=ROOT_PATH)
    app.mount(ROOT_PATH, app.state.e2b)
    _add_service(app)
    _add_trajectories(app)
    _add_calls(app)
    add_shells(app)
    return app


async def drain(app: FastAPI, timeout_s: float) -> None:
    """As `Tenants.drain`, of the app's tenants."""
    await app.state.tenants.drain(timeout_s)


@contextlib.asynccontextmanager
async def _made(settings: ExecutorServerSettings) -> AsyncGenerator[ToolExecutor, None]:
    from atropos.slots import SlotPool
    from atropos.tools import ToolExecutor, ToolExecutorConfig, build_tool_registry

    tools = build_tool_registry(
        list(settings.enabled_toolsets), list(settings.disabled_toolsets), settings.tool_server_url
    )
    config = ToolExecutorConfig(tool_server_url=settings.tool_server_url, tool_server_token=settings.tool_server_token)
    async with SlotPool(settings.pool) as pool, ToolExecutor(pool=pool, tools=tools, config=config) as executor:
        yield executor


def _of(request: Request) -> Trajectories:
    return tenant_of(request).trajectories


def _add_service(app: FastAPI) -> None:
    @app.get("/health")
    async def health(request: Request) -> ExecutorHealth:
        """Whether the server takes trajectories."""
        return ExecutorHealth(status="draining" if request.app.state.tenants.draining else "ok")

    @app.get("/metrics", responses={**problems(401, 403), 200: {"content": {"text/plain": {}}}}, response_model=None)
    async def metrics(request: Request) -> Response:
        """The pool's, the tools' and the keys' metrics, for Prometheus. For admin keys."""
        admin_of(request)
        executor, tenants = request.app.state.executor, request.app.state.tenants
        families = [build_info(), *executor.metrics(), *executor.pool.metrics(), *tenants.metrics()]
        return Response(exposition(families), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/usage", responses=problems(401))
    async def usage(request: Request) -> UsageReport:
        """What the key has used since the server's start, by image, and its quotas; for an admin key, those of all."""
        tenant = tenant_of(request)
        return request.app.state.tenants.usage(None if tenant.account.key.admin else tenant)

    @app.get("/status", responses=problems(401, 403))
    async def status(request: Request) -> ServerStatus:
        """The pool, and what all keys have open. For admin keys."""
        admin_of(request)
        return request.app.state.tenants.status()

    @app.get("/tools", responses=problems(401))
    async def tools(request: Request) -> ToolSchemas:
        """The tools as OpenAI function-calling schemas."""
        return ToolSchemas(tools=tuple(request.app.state.executor.tools.schemas()))

    @app.post("/prepare", responses=_ERRORS)
    async def prepared(request: Request, body: PrepareImage) -> ImageState:
        """Pull and unpack an image where slots run. The answer is its progress: `ready`, `failed` or the current phase.

        Trajectories that name a ready image open at once. Ask again to wait longer, or to try again after a failure.
        """
        return await tenant_of(request).images.prepare(body.image, body.wait_s)


def _add_trajectories(app: FastAPI) -> None:
    @app.get("/trajectories", responses=problems(401))
    async def every(request: Request) -> TrajectoryList:
        """All open trajectories."""
        return TrajectoryList(trajectories=tuple(_of(request).list()))

    @app.post("/trajectories", status_code=201, responses={**_ERRORS, 200: {"model": TrajectoryInfo}})
    async def opened(
        request: Request, response: Response, body: OpenTrajectory, idempotency_key: Key = None
    ) -> TrajectoryInfo:
        """Open a trajectory with a slot of its own. 200 instead of 201: it was already open under this id or key.

        With `image` the slot starts from that image, which is prepared first if it isn't, within the pool's own
        timeout.
        """
        if body.trajectory_id is None and idempotency_key is not None:
            named = f"k-{hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]}"
            body = body.model_copy(update={"trajectory_id": named})
        trajectory, new = await _of(request).open(body)
        if body.trajectory_id is None and await request.is_disconnected():
            await _of(request).end(trajectory.id)  # nobody knows its id
        response.status_code = 201 if new else 200
        response.headers["Location"] = f"/trajectories/{trajectory.id}"
        return trajectory.info()

    @app.get("/trajectories/{trajectory_id}", responses=_ERRORS)
    async def one(request: Request, trajectory_id: Id) -> TrajectoryInfo:
        """A trajectory. Asking for it renews it."""
        return _of(request).get(trajectory_id).info()

    @app.delete("/trajectories/{trajectory_id}", responses=_ERRORS)
    async def ended(request: Request, trajectory_id: Id) -> EndTrajectoryReply:
        """End a trajectory: its calls are interrupted, its slot is released. Idempotent."""
        return EndTrajectoryReply(ended=await _of(request).end(trajectory_id))


def _add_calls(app: FastAPI) -> None:
    @app.post(
        "/trajectories/{trajectory_id}/calls",
        responses={**_ERRORS, 200: {"model": CallAnswer, "content": {"text/event-stream": {}}}},
        response_model=None,
    )
    async def call(
        request: Request,
        trajectory_id: Id,
        body: CallBody,
        idempotency_key: Key = None,
        traceparent: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Run one call, after the trajectory's earlier calls, and answer its result."""
        trajectories = _of(request)
        trajectory = trajectories.get(trajectory_id)
        with tracing.continued(traceparent):
            submitted = trajectories.submit(trajectory, body, idempotency_key, counted_body(request))
        if "text/event-stream" in request.headers.get("accept", ""):
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(_events(submitted), media_type="text/event-stream", headers=headers)
        return Response((await submitted.answer()).model_dump_json(), media_type="application/json")

    @app.get("/trajectories/{trajectory_id}/calls/{call_id}", responses={**_ERRORS, 202: {"model": CallAnswer}})
    async def earlier(request: Request, response: Response, trajectory_id: Id, call_id: Id) -> CallAnswer:
        """A call sent earlier: its result, or 202 while it has none."""
        call = _of(request).get(trajectory_id).calls.get(call_id)
        if call is None:
            raise Refusal(404, "not_found", f"there is no call {call_id!r}; only the latest are kept")
        if not call.task.done():
            response.status_code = 202
            return call.pending()
        return await call.answer()


async def _events(call: OpenCall) -> AsyncIterator[str]:
    yield _event("accepted", call.pending().model_dump_json())
    while not call.task.done():
        done, _ = await asyncio.wait([call.task], timeout=WAITING_S)
        if not done:
            yield _event("waiting", "{}")
    try:
        answer = await call.answer()
    except Refusal as refusal:
        yield _event("error", refusal.body().decode())
        return
    yield _event("result", answer.model_dump_json())


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
