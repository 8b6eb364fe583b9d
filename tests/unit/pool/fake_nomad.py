"""An agent that has `room` for so many containers, in this process: what a real one does at the wrong moment, at will.

Its containers are real sandbox servers on a host without kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections import Counter
from typing import Any, Self

from aiohttp import web

from atropos.slots import SlotPool, SlotPoolConfig
from tests.unit.server.fakes import TOKEN, Running, serving

PULL = {"Type": "Driver Failure", "DisplayMessage": "Failed to pull `nowhere:1`: not found"}


class FakeNomad:
    """`async with FakeNomad() as nomad:` then `nomad.pool()`."""

    def __init__(self) -> None:
        self.job: dict[str, Any] | None = None
        self.room = 9
        self.broken_images = False
        self.allocations: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, list[web.Response]] = {}
        """What is answered instead, by the end of a path: one after the other."""
        self.streams = "on"
        """How the event stream is: `on`, `cut` as soon as it opens, `silent` or `refused`."""
        self.blocks = False
        """Whether blocking queries block."""
        self._servers: dict[str, tuple[Running, contextlib.AsyncExitStack]] = {}
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._placing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._servers):
            await self._end(name)
        await self._runner.cleanup()

    def pool(self, **changes: Any) -> SlotPool:
        """A pool of one-slot containers here."""
        values: dict[str, Any] = {"backend": "nomad", "nomad_address": self.url, "slots_per_container": 1}
        return SlotPool(SlotPoolConfig(**(values | {"idle_container_s": 0.2} | changes)))

    @property
    def count(self) -> int:
        return self.job["TaskGroups"][0]["Count"] if self.job else 0

    async def register(self, count: int) -> None:
        """As somebody else's `nomad job run`."""
        group = {"Name": "sandbox", "Count": count, "Tasks": [{"Name": "server", "Env": {}, "Config": {}}]}
        self.job = {"ID": "atropos-sandbox-agent-env", "TaskGroups": [group], "JobModifyIndex": next(self._numbers)}
        await self._place()

    def _running(self) -> list[dict[str, Any]]:
        return [each for each in self.allocations if each["ClientStatus"] != "complete"]

    async def _place(self, *, stopped: str = "") -> None:
        """Do what the job asks for, as far as there is room, and replace what is stopped."""
        async with self._placing:
            for each in self._running():
                if int(each["Name"].split("[")[1][:-1]) >= self.count or each["ID"] == stopped:
                    each |= {"ClientStatus": "complete", "DesiredStatus": "stop"}
                    await self._end(each["ID"])
            taken = {each["Name"] for each in self._running()}
            for index in range(self.count):
                if f"x.sandbox[{index}]" not in taken and len(self._running()) < self.room:
                    await self._start(index)
        self._news.set()
        self._news = asyncio.Event()

    async def _start(self, index: int) -> None:
        name = f"alloc-{next(self._numbers)}"
        task: dict[str, Any] = {"State": "running", "Restarts": 0, "Events": []}
        row = {"ID": name, "Name": f"x.sandbox[{index}]", "DesiredStatus": "run", "ModifyIndex": next(self._numbers)}
        if self.broken_images:
            task |= {"State": "pending", "Events": [PULL]}
            self.allocations.append(row | {"ClientStatus": "pending", "TaskStates": {"server": task}})
            return
        stack = contextlib.AsyncExitStack()
        running = await stack.enter_async_context(serving(slots=1))
        self._servers[name] = running, stack
        ports = [{"Label": "http", "HostIP": "127.0.0.1", "Value": running.server.port}]
        row |= {"ClientStatus": "running", "TaskStates": {"server": task}}
        self.allocations.append(row | {"AllocatedResources": {"Shared": {"Ports": ports}}})

    async def _end(self, name: str) -> None:
        if name in self._servers:
            _, stack = self._servers.pop(name)
            await stack.aclose()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked[path.rpartition("/")[2]] += 1
        for end, answers in self.answers.items():
            if path.endswith(end) and answers:
                return answers.pop(0)
        if path == "/v1/event/stream":
            return await self._stream(request)
        if path == "/v1/allocations":
            return web.json_response(self.allocations)
        if path.endswith("/allocations"):
            if self.blocks and request.query["index"] != "0":
                await asyncio.sleep(60)
            return web.json_response([], headers={"X-Nomad-Index": "7"})
        if path.endswith("/evaluations"):
            return web.json_response(self._evaluations())
        if path.startswith("/v1/var/"):
            return web.json_response({"Items": {"token": TOKEN}, "ModifyIndex": 1})
        if path == "/v1/jobs/parse":
            (count,) = re.findall(r"^count = (\d+)$", (await request.json())["Variables"], re.MULTILINE)
            return web.json_response({"Count": int(count)})
        if path == "/v1/jobs":
            asked = await request.json()
            job, index = asked["Job"], self.job["JobModifyIndex"] if self.job else 0
            if asked["JobModifyIndex"] != index:
                return web.Response(
                    status=500, text=f"Enforcing job modify index {asked['JobModifyIndex']}: it is {index}"
                )
            await self.register(job["Count"] if "Count" in job else job["TaskGroups"][0]["Count"])
        elif path.endswith("/scale"):
            await self.register((await request.json())["Count"])
        elif path.startswith("/v1/allocation/"):
            await self._place(stopped=path.split("/")[3])
        elif path.startswith("/v1/job/"):
            if request.method == "DELETE" and self.job is not None:
                self.job = None
                await self._place()
            return web.json_response(self.job) if self.job else web.Response(status=404, text="job not found")
        return web.json_response({})

    def _evaluations(self) -> list[dict[str, Any]]:
        lacking = self.count - len(self._running())
        metric = {"NodesEvaluated": 1, "DimensionExhausted": {"memory": 1}, "CoalescedFailures": lacking - 1}
        return [{"FailedTGAllocs": {"sandbox": metric}, "Status": "blocked"}] if lacking else []

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.streams == "refused":
            return web.Response(status=403, text="Permission denied")
        response = web.StreamResponse()
        await response.prepare(request)
        if self.streams == "silent":
            await asyncio.sleep(60)
        while self.streams == "on":
            news = self._news
            await response.write(json.dumps({"Events": [1]}).encode() + b"\n")
            await news.wait()
        return response
