"""The E2B API as an app: E2B's REST API, and behind the header `E2b-Sandbox-Id` what its daemon answers in each sandbox."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos.api.e2b import daemon, rest
from atropos.api.e2b.rest import problem
from atropos.net.admission import BearerToken

TOKEN_HEADERS = (b"x-api-key", b"x-access-token")
"""Where the SDK sends the token: to the API, and to sandboxes."""
_NO_TOKEN = "send this server's token as the API key (E2B_API_KEY)"


def create_e2b_app(token: str) -> Starlette:
    """The E2B API as an app that answers nothing without the server's token; its `state.sandboxes` is for the caller to set."""
    return Starlette(
        routes=[*rest.ROUTES, *daemon.ROUTES],
        middleware=[Middleware(_Gate, token=token)],
        exception_handlers={HTTPException: _unknown},
    )


class _Gate:
    """401 without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = BearerToken(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name in TOKEN_HEADERS]
            if len(given) != 1 or not self._token.is_token(given[0]):
                await problem(401, _NO_TOKEN)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return problem(501, f"{request.method} {request.url.path[:200]} is not part of this server's E2B API")
    return problem(error.status_code, error.detail)
