"""E2B's REST API: sandboxes are created, listed, prolonged and ended."""

from __future__ import annotations

import urllib.parse
from collections.abc import Awaitable, Callable
from datetime import datetime

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atropos.api.e2b import connect, messages, template_rest
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.sandbox import ENVD_VERSION, E2bSandbox
from atropos.api.e2b.sandboxes import sandboxes_of
from atropos.api.gate import body_of
from atropos.api.http import Refusal
from atropos.errors import ConfigError, ImageUnavailable, NotSupported, QuotaReached, SandboxError
from atropos.wire import SlotLimits

MAX_API_BYTES = 1 << 20
"""Longest body of a request."""
ENDED = "its programs have ended, and its files are kept"
"""Said where E2B would keep what runs, too."""
PAGE = 100
"""Most sandboxes in one answer of a list."""


def problem(status: int, message: str, *, retry: bool = False) -> Response:
    """An error as E2B answers it. `retry`: it may help to send the request again."""
    headers = {"Retry-After": "1"} if retry else None
    return JSONResponse({"code": status, "message": message}, status, headers)


def gone(sandbox_id: str) -> Response:
    """The SDK recognizes a sandbox that is gone by this text."""
    return problem(502, f"The sandbox {sandbox_id[:100]} was not found")


def _found(request: Request, sandbox: E2bSandbox | None) -> E2bSandbox:
    if sandbox is None:
        raise RpcError("not_found", f"sandbox {request.path_params['sandbox_id'][:100]!r} was not found")
    return sandbox


def _running(request: Request) -> E2bSandbox:
    return _found(request, sandboxes_of(request).find(request.path_params["sandbox_id"]))


def _known(request: Request) -> E2bSandbox:
    """One that runs or is paused."""
    return _found(request, sandboxes_of(request).known(request.path_params["sandbox_id"]))


async def _create(request: Request) -> Response:
    body = messages.parse(messages.NewSandbox, await body_of(request, MAX_API_BYTES))
    sandbox = await sandboxes_of(request).create(
        body.template_id,
        timeout_s=body.timeout,
        metadata=body.metadata,
        env=body.env_vars,
        hosts=body.network.hosts(internet=body.allow_internet_access),
        on_timeout="pause" if body.auto_pause else "kill",
        auto_resume=body.auto_resume.enabled,
        public=body.network.allow_public_traffic is not False,
    )
    if await request.is_disconnected():  # nobody would end it, and the wait for a slot or an image may be long
        await sandboxes_of(request).kill(sandbox.id)
        raise ClientDisconnect
    return JSONResponse(_opened(request, sandbox), 201)


async def _connect(request: Request) -> Response:
    """Running sandboxes go on for longer, paused ones go on."""
    paused = _known(request).state == "paused"
    body = messages.parse(messages.NewTimeout, await body_of(request, MAX_API_BYTES))
    sandbox = _found(request, await sandboxes_of(request).resume(request.path_params["sandbox_id"], body.timeout))
    sandboxes_of(request).set_timeout(sandbox, body.timeout, later=True)
    return JSONResponse(_opened(request, sandbox), 201 if paused else 200)


async def _pause(request: Request) -> Response:
    if _known(request).state == "paused":
        return problem(409, "it is paused already")
    await sandboxes_of(request).pause(_running(request))
    return Response(status_code=204, headers={"Warning": f'299 atropos "{ENDED}"'})


async def _fork(request: Request) -> Response:
    body = messages.parse(messages.NewFork, await body_of(request, MAX_API_BYTES))
    forks = await sandboxes_of(request).fork(_running(request), body.count, body.timeout)
    return JSONResponse(
        [
            {"sandbox": _opened(request, one)}
            if isinstance(one, E2bSandbox)
            else {"error": {"code": 503, "message": str(one)}}
            for one in forks
        ],
        201,
    )


async def _keep_snapshot(request: Request) -> Response:
    body = messages.parse(messages.NewSnapshot, await body_of(request, MAX_API_BYTES))
    snapshot = await sandboxes_of(request).snapshots.keep(_running(request), body.name)
    return JSONResponse(snapshot.info(), 201)


async def _list_snapshots(request: Request) -> Response:
    query = request.query_params
    of, name = query.get("sandboxID"), query.get("name")
    snapshots = sandboxes_of(request).snapshots.all()
    matching = [one for one in snapshots if of in {None, one.sandbox_id} and (name is None or name in one.names)]
    return JSONResponse([one.info() for one in matching])


async def _drop_template(request: Request) -> Response:
    template = request.path_params["template_id"]
    sandboxes = sandboxes_of(request)
    if not await sandboxes.snapshots.drop(template):
        await sandboxes.templates.drop(sandboxes.templates.get(template))
    return Response(status_code=204)


async def _list(request: Request) -> Response:
    sandboxes = sandboxes_of(request)
    return _page(request, sandboxes.list(), sandboxes.limits)


async def _info(request: Request) -> Response:
    return JSONResponse(_known(request).info(sandboxes_of(request).limits))


async def _kill(request: Request) -> Response:
    await sandboxes_of(request).kill(_known(request).id)
    return Response(status_code=204)


async def _timeout(request: Request) -> Response:
    body = messages.parse(messages.NewTimeout, await body_of(request, MAX_API_BYTES))
    sandboxes_of(request).set_timeout(_running(request), body.timeout)
    return Response(status_code=204)


async def _network(request: Request) -> Response:
    body = messages.parse(messages.Network, await body_of(request, MAX_API_BYTES))
    sandbox, hosts = _running(request), body.hosts()
    if hosts != () and not sandbox.slot.network:
        raise NotSupported("network: the sandbox was created without one")
    await sandbox.slot.set_network(hosts)
    sandbox.hosts = hosts
    return Response(status_code=204)


def _answered(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A handler of the REST API whose failures are answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except (RpcError, Refusal, ClientDisconnect) as error:
            refused = connect.rpc_error(error)
            return problem(refused.status, str(refused))
        except (ConfigError, NotSupported, ImageUnavailable) as error:
            return problem(400, str(error))
        except QuotaReached as error:
            return problem(429, str(error))
        except SandboxError as error:
            return problem(503, str(error), retry=True)

    return answered


def _opened(request: Request, sandbox: E2bSandbox) -> Json:
    key = request.headers.get("x-api-key")
    return {
        "sandboxID": sandbox.id,
        "templateID": sandbox.template,
        "clientID": "atropos",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": None if key is None else f"{key}.{sandbox.id}",
        "domain": request.app.state.domain,
        "trafficAccessToken": sandbox.traffic_token,
    }


def _page(request: Request, sandboxes: list[E2bSandbox], limits: SlotLimits) -> Response:
    """The sandboxes that a query asks for, a page at a time: each begins after the last one of the page before it."""
    query = request.query_params
    metadata = {
        urllib.parse.unquote(name): urllib.parse.unquote(value)
        for name, value in urllib.parse.parse_qsl(query.get("metadata", ""), keep_blank_values=True)
    }
    if query.get("state"):
        states = ",".join(query.getlist("state")).split(",")
        sandboxes = [sandbox for sandbox in sandboxes if sandbox.state in states]
    since, template = _moment(query.get("startedAfter")), query.get("template")
    last, ascending = query.get("nextToken"), query.get("order") == "asc"
    matching = [
        sandbox
        for sandbox in sorted(sandboxes, key=lambda one: one.place, reverse=not ascending)
        if metadata.items() <= sandbox.metadata.items()
        and template in {None, sandbox.template}
        and sandbox.started >= since
        and (not last or (sandbox.place > last if ascending else sandbox.place < last))
    ]
    limit = query.get("limit", "")
    size = min(PAGE, int(limit[:9]) or PAGE) if limit.isdecimal() else PAGE
    page = matching[:size]
    headers = {"X-Next-Token": page[-1].place} if len(matching) > size else None
    return JSONResponse([sandbox.info(limits) for sandbox in page], headers=headers)


def _moment(given: str | None) -> float:
    if not given:
        return 0.0
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError):
        raise RpcError("invalid_argument", f"startedAfter: {given[:100]!r} is no time") from None


ROUTES = [
    Route(f"{version}{path}", _answered(handler), methods=[method])
    for method, path, handler, versions in (
        ("POST", "/sandboxes", _create, ("", "/v2")),
        ("GET", "/sandboxes", _list, ("", "/v2")),
        ("GET", "/sandboxes/{sandbox_id}", _info, ("",)),
        ("DELETE", "/sandboxes/{sandbox_id}", _kill, ("",)),
        ("POST", "/sandboxes/{sandbox_id}/timeout", _timeout, ("",)),
        ("POST", "/sandboxes/{sandbox_id}/connect", _connect, ("", "/v2")),
        ("POST", "/sandboxes/{sandbox_id}/resume", _connect, ("",)),
        ("POST", "/sandboxes/{sandbox_id}/pause", _pause, ("",)),
        ("POST", "/sandboxes/{sandbox_id}/fork", _fork, ("",)),
        ("POST", "/sandboxes/{sandbox_id}/snapshots", _keep_snapshot, ("",)),
        ("PUT", "/sandboxes/{sandbox_id}/network", _network, ("",)),
        ("GET", "/snapshots", _list_snapshots, ("",)),
        ("POST", "/templates", template_rest.create, ("/v2", "/v3")),
        ("GET", "/templates", template_rest.list_all, ("",)),
        ("GET", "/templates/aliases/{template_id}", template_rest.alias, ("",)),
        ("POST", "/templates/tags", template_rest.assign_tags, ("",)),
        ("DELETE", "/templates/tags", template_rest.drop_tags, ("",)),
        ("GET", "/templates/{template_id}/tags", template_rest.tags, ("",)),
        ("GET", "/templates/{template_id}/files/{files_hash}", template_rest.upload_link, ("",)),
        ("PUT", f"{template_rest.UPLOADS}{{secret}}", template_rest.upload, ("",)),
        ("POST", "/templates/{template_id}/builds/{build_id}", template_rest.start, ("/v2",)),
        ("GET", "/templates/{template_id}/builds/{build_id}/status", template_rest.status, ("",)),
        ("DELETE", "/templates/{template_id:path}", _drop_template, ("",)),
    )
    for version in versions
]
"""In each version of the API that has them."""
