"""The E2B API as an app: E2B's REST API and, with the header `E2b-Sandbox-Id`, its daemon's API in each sandbox."""

from __future__ import annotations

import h11
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos.api.e2b import daemon, rest
from atropos.api.e2b.rest import problem
from atropos.api.e2b.template_rest import UploadLinks
from atropos.api.gate import Bodies
from atropos.api.http import Door, header_of

ROOT_PATH = "/e2b"
"""Where the server has this app."""
TOKEN_HEADERS = (b"x-api-key", b"x-access-token")
"""Where the SDK sends the token: to the API, and to sandboxes."""
_NO_TOKEN = "send this server's token as the API key (E2B_API_KEY)"


def create_e2b_app(door: Door, domain: str | None = None) -> Starlette:
    """The E2B API as an app that answers nothing without a token that the door lets in, or an upload link.

    Args:
        door: who comes in.
        domain: where clients find hosts of sandboxes; None: there are none.
    """
    links = UploadLinks()
    app = Starlette(
        routes=[*rest.ROUTES, *daemon.ROUTES],
        middleware=[Middleware(_Gate, door=door, links=links)],
        exception_handlers={HTTPException: _unknown},
    )
    app.state.links, app.state.domain = links, domain
    return app


def needs_no_token(app: Starlette, request: h11.Request) -> bool:
    """Whether a request to the server is for an upload link of this app."""
    path = request.target.decode("ascii", "replace").removeprefix(ROOT_PATH)
    return app.state.links.find(path) is not None


class _Gate:
    """401 without a token, 429 where its holder sends too many requests; upload links open themselves."""

    def __init__(self, app: ASGIApp, door: Door, links: UploadLinks) -> None:
        self._app = app
        self._door = door
        self._links = links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and self._links.find(path) is None:
            refused = self._door(scope, header_of(scope, *TOKEN_HEADERS))
            if refused is not None:
                message = _NO_TOKEN if refused.status == 401 else refused.message
                await problem(refused.status, message, retry=refused.status == 429)(scope, receive, send)
                return
            bodies: Bodies = scope["atropos.bodies"]
            with bodies.counted(scope):
                await self._app(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return problem(501, f"{request.method} {request.url.path[:200]} is not part of this server's E2B API")
    return problem(error.status_code, error.detail)
