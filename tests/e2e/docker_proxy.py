"""Stands between a backend and a Docker engine on a unix socket, and answers in its place what a broken one would."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web

from tests.e2e.nomad_proxy import pass_on

ENGINE = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
KEPT = ("Content-Type", "X-Docker-Container-Path-Stat")


class DockerProxy:
    """`async with DockerProxy() as proxy:` then `proxy.url`.

    Attributes:
        instead: what answers a request in the engine's place; None: the engine does.
    """

    def __init__(self) -> None:
        self.instead: Callable[[web.Request], web.Response | None] = lambda request: None

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "docker.sock")
        self.url = f"unix://{path}"
        connector = aiohttp.UnixConnector(ENGINE, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()
        self._folder.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if (answer := self.instead(request)) is not None:
            return answer
        body = await request.read()
        headers = {"Content-Type": request.headers["Content-Type"]} if "Content-Type" in request.headers else {}
        url = f"http://docker{request.path_qs}"
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            return await pass_on(answer, request, KEPT)
