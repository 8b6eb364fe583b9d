"""What both services answer: refusals, rates, doors, and the shape of errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from atropos.net.admission import BearerToken
from atropos.wire import Problem

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no token."""


class Refusal(Exception):
    """An HTTP answer other than 2xx, as an exception.

    Attributes:
        status: the HTTP status.
        code: the stable name of the problem.
        message: the problem and its remedy.
        retry_after_s: time after which a retry may help.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The refusal as JSON."""
        return Problem(code=self.code, message=self.message).model_dump_json(exclude_none=True).encode()

    def response(self) -> Response:
        """The refusal as an HTTP answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, "application/json")


NO_TOKEN = Refusal(401, "unauthorized", "send 'Authorization: Bearer TOKEN' with this server's token")


class TokenBucket:
    """A rate: an average per second (None: any), and `burst` at once."""

    def __init__(self, rate_per_s: float | None, burst: int) -> None:
        self._rate = rate_per_s
        self._burst = float(burst)
        self._level = self._burst
        self._filled = time.monotonic()

    def _fill(self) -> None:
        now = time.monotonic()
        gained = math.inf if self._rate is None else (now - self._filled) * self._rate
        self._level, self._filled = min(self._burst, self._level + gained), now

    @property
    def full(self) -> bool:
        """Whether `burst` may come at once."""
        self._fill()
        return self._level >= self._burst

    def wait_s(self) -> float:
        """Seconds until one more may come; 0: now."""
        self._fill()
        return 0.0 if self._rate is None or self._level >= 1 else (1 - self._level) / self._rate

    def take(self) -> float:
        """Count one. Returns as `wait_s`; one that has to wait isn't counted."""
        if (wait_s := self.wait_s()) == 0:
            self._level -= 1
        return wait_s


Door = Callable[[Scope, bytes], Refusal | None]
"""Lets a request with this token in, which it may note in the scope; or says why not."""


def door_of(token: str | None) -> Door:
    """The door of a server with one token; None: everybody comes in."""
    known = None if token is None else BearerToken(token)
    return lambda _, given: None if known is None or known.is_token(given) else NO_TOKEN


def header_of(scope: Scope, *names: bytes) -> bytes:
    """The only one of these headers that a request has; empty: it has none, or several."""
    values = [value for name, value in scope["headers"] if name in names]
    return values[0] if len(values) == 1 else b""


def _safe(value: object) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()[:300]


def _explain(error: RequestValidationError) -> str:
    return "; ".join(f"{_safe('.'.join(str(p) for p in e['loc']))}: {_safe(e['msg'])}" for e in error.errors()[:10])


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Statuses that a route answers with a `Problem`, as its OpenAPI document names them."""
    return {status: {"model": Problem} for status in statuses}


def describe_auth(app: FastAPI) -> None:
    """Declare in the OpenAPI document that every operation but /health needs the token, which `gate.Gate` checks."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        document = generate()  # cached by the app; changed in place here
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes.setdefault("bearer", {"type": "http", "scheme": "bearer"})
        for path, operations in document["paths"].items():
            if path not in OPEN_PATHS:
                for operation in operations.values():
                    operation["security"] = [{"bearer": []}]
        return document

    app.openapi = described


def _allowed(request: Request) -> str:
    """The methods of every route at this path; the framework names only those of the first match."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return ", ".join(sorted(methods))


def add_error_handlers(app: FastAPI) -> None:
    """Give every error the shape of `atropos.wire.Problem`."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return error.response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        sent = request.headers.get("content-type", "")
        unread = request.method == "POST" and "json" not in sent  # curl's -d sends a form
        cure = "; send it with Content-Type: application/json" if unread else ""
        return Refusal(422, "invalid", f"{_explain(error)}{cure}").response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # the framework's status for such a body; wrong JSON is 422 as well
            return Refusal(
                422, "invalid", "body: it is not UTF-8, or nested too deeply; write one JSON object"
            ).response()
        codes = {404: "not_found", 405: "method_not_allowed"}
        answer = Refusal(error.status_code, codes.get(error.status_code, "http"), _safe(error.detail)).response()
        answer.headers.update(dict(error.headers or {}))
        if error.status_code == 405:
            answer.headers["Allow"] = _allowed(request)
        return answer

    async def bug(_: Request, error: Exception) -> Response:
        return Refusal(500, "internal", f"the server has a bug: {type(error).__name__}; its log says more").response()

    app.add_exception_handler(Exception, bug)
    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
