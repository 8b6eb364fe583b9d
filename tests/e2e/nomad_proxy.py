"""Stands between a backend and Nomad, and fails as real ones do: errors, empty answers, silence, no event stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

import aiohttp
from aiohttp import web

from tests.engines import NOMAD

Mode = Literal["pass", "error", "readonly", "empty", "gone", "silent"]


class NomadProxy:
    """`async with NomadProxy() as proxy:` then `proxy.url`; `proxy.mode` says how it behaves from now on."""

    def __init__(self, target: str = NOMAD, *, streams: bool = True) -> None:
        self.target = target
        self.mode: Mode = "pass"
        self.streams = streams
        self.asked: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._runner.cleanup()
        await self._session.close()

    def cut(self) -> None:
        """Break every open event stream and blocking query."""
        for task in self._tasks:
            task.cancel()

    def fail(self, mode: Mode) -> None:
        """Behave so from now on, for what is open as well."""
        self.mode = mode
        self.cut()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        if self.mode == "error" or (self.mode == "readonly" and request.method != "GET"):
            return web.Response(status=500, text="No cluster leader")
        if self.mode == "gone":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.mode == "empty" and request.path == "/v1/allocations":
            return web.json_response([], headers={"X-Nomad-Index": "1"})
        if not self.streams and request.path == "/v1/event/stream":
            return web.Response(status=403, text="Permission denied")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.mode == "silent":
                await asyncio.sleep(3600)
            return await self._forward(request)
        finally:
            self._tasks.discard(task)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with self._session.request(request.method, f"{self.target}{request.path_qs}", data=body) as answer:
            return await pass_on(answer, request, ("X-Nomad-Index", "Content-Type"))


async def pass_on(answer: aiohttp.ClientResponse, request: web.Request, headers: Sequence[str]) -> web.StreamResponse:
    """Answer a request as another server did, piece by piece, with these of its headers."""
    kept = {name: answer.headers[name] for name in headers if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=kept)
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response
