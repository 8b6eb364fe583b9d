"""A reverse proxy that fails some of the requests to a service: refused, cut before the service saw them, or after."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from tests.web_app import serving

HOP = {"transfer-encoding", "connection", "content-length", "keep-alive", "host"}


class HttpFaults:
    """What it did, by kind: `503`, `cut` (the service never saw the request), `lost` (the answer was cut off)."""

    def __init__(self, target: str, *, rate: float, paths: tuple[str, ...], seed: int = 5) -> None:
        self._target, self._rate, self._paths = target.rstrip("/"), rate, paths
        self._random = random.Random(seed)
        self.struck: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = None
        if request.path in self._paths and self._random.random() < self._rate:
            kind = self._random.choice(("503", "cut", "lost"))
            self.struck[kind] += 1
        body = await request.read()
        if kind == "503":
            return web.json_response({"code": "asked_to_fail", "message": "asked to fail"}, status=503)
        if kind != "cut":
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
            async with self._session.request(
                request.method, self._target + request.raw_path, data=body, headers=headers
            ) as found:
                payload = await found.read()
                answered = {name: value for name, value in found.headers.items() if name.lower() not in HOP}
        if kind is not None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(body=payload, status=found.status, headers=answered)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as self._session,
            serving(app, auto_decompress=False) as url,
        ):
            yield url
