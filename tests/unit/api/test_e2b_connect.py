"""The Connect protocol's answers to clients that misbehave."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message

from atropos.api.e2b import connect
from atropos.api.gate import Bodies, Body


async def test_a_gone_client_is_no_bug() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def handler(message: bytes) -> connect.Json:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "headers": [], "atropos.body": Body(Bodies())}
    request = Request(scope, receive)
    assert (await connect.unary(request, handler)).status_code == 499
