"""A process that speaks as much of Nomad's protocol as the backend uses, for fleets that no machine here could hold.

Its nodes are addresses in 127.0.0.0/8, all served by one listener that answers health checks as sandbox servers do.
Nodes vanish at once, are noticed after `HEARTBEAT_S`, and what they had is placed on the others, `PLACED_A_S` a second.
Started by `fleet_decisions`; prints its port, then takes a line of JSON at a time: {"vanish": share}, {"churn":
containers, "pause_s": seconds} or {}, and answers how often what was asked since the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import random
import sys
from collections import Counter
from typing import Any

from aiohttp import web

PER_NODE = 10
"""Containers on a node when the job starts."""
HEARTBEAT_S = 15.0
"""How long Nomad takes a silent node for alive: about its default TTL with its grace, in seconds."""
PLACED_A_S = 1000
EVENTS_S = 0.1
"""Changes of so long come as one message of the event stream, in seconds."""


class Cluster:
    """One job, its allocations, and who listens."""

    def __init__(self, containers: int) -> None:
        self.health_port = 0
        self.count = containers
        first = ipaddress.IPv4Address("127.1.0.0")
        self.nodes = [str(first + number) for number in range(max(2, containers // PER_NODE))]
        self.silent: set[str] = set()
        self.down: set[str] = set()
        self.rows: dict[str, dict[str, Any]] = {}
        self.asked: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self.news = asyncio.Event()
        self.gone: list[asyncio.Queue[list[str]]] = []
        self.listed = b"[]"
        self.stale = False

    def place(self, index: int) -> None:
        """A new allocation on a node that Nomad takes for alive."""
        number = next(self.numbers)
        node = random.choice([node for node in random.sample(self.nodes, 2) if node not in self.down] or self.nodes)
        ports = [{"Label": "http", "HostIP": node, "Value": self.health_port}]
        self.rows[f"alloc-{number}"] = {
            "ID": f"alloc-{number}",
            "Name": f"x.sandbox[{index}]",
            "NodeName": node,
            "DesiredStatus": "run",
            "ClientStatus": "running",
            "ModifyIndex": number,
            "TaskStates": {"server": {"State": "running", "Restarts": 0, "Events": []}},
            "AllocatedResources": {"Shared": {"Ports": ports}},
        }
        self.stale = True

    def replace(self, key: str, status: str) -> None:
        """End an allocation, and place another of its index."""
        row = self.rows.pop(key)
        self.rows[f"{key}-over"] = row | {"DesiredStatus": "stop", "ClientStatus": status}
        self.place(int(row["Name"].split("[")[1][:-1]))
        for over in [key for key in self.rows if key.endswith("-over")][:-100]:  # Nomad forgets them in time
            del self.rows[over]

    async def vanish(self, share: float) -> None:
        """Nodes go silent; after a while they count as down, and the others get what they had."""
        self.silent |= set(random.sample(self.nodes, int(len(self.nodes) * share)))
        for queue in self.gone:
            queue.put_nowait(sorted(self.silent))
        await asyncio.sleep(HEARTBEAT_S)
        self.down |= self.silent
        self.nodes = [node for node in self.nodes if node not in self.down]
        lost = [key for key, row in self.rows.items() if row["NodeName"] in self.down and row["DesiredStatus"] == "run"]
        for number, key in enumerate(lost):
            if key in self.rows:
                self.replace(key, "lost")
            if number % (PLACED_A_S // 10) == 0:
                await asyncio.sleep(0.1)

    async def churn(self, containers: int, pause_s: float) -> None:
        """Containers end, one after the other, and are replaced."""
        for _ in range(containers):
            running = [key for key, row in self.rows.items() if row["DesiredStatus"] == "run"]
            self.replace(random.choice(running), "failed")
            await asyncio.sleep(pause_s)

    async def tell(self) -> None:
        """Wake the event streams at most once every `EVENTS_S`."""
        while True:
            await asyncio.sleep(EVENTS_S)
            if self.stale:
                self.stale = False
                self.listed = json.dumps(list(self.rows.values())).encode()
                self.news.set()
                self.news = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Nomad's API, and `/gone`: nodes that went silent, as a broken connection would say."""
        path = request.path
        if path == "/gone":
            return await self.say_gone(request)
        kind = (
            "stop an allocation"
            if path.endswith("/stop")
            else f"{request.method} {path.replace('alloc-', '').rstrip('0123456789')}"
        )
        self.asked[kind] += 1
        if path == "/v1/event/stream":
            return await self.events(request)
        if path == "/v1/allocations":
            return web.Response(body=self.listed, content_type="application/json")
        if path.endswith("/stop"):
            if (key := path.split("/")[3]) in self.rows:
                self.replace(key, "complete")
        elif path.endswith("/evaluations"):
            return web.json_response([{"Status": "complete", "TriggeredBy": "job-register"}])
        elif path.startswith("/v1/var/"):
            return web.json_response({"Items": {"token": "t"}, "ModifyIndex": 1})
        elif path == "/v1/jobs/parse":
            return web.json_response({"Count": 0})
        elif path.startswith("/v1/job/") and request.method == "GET":
            group = {"Name": "sandbox", "Count": self.count, "Tasks": [{"Name": "server", "Env": {}, "Config": {}}]}
            return web.json_response({"ID": "atropos-sandbox-agent-env", "TaskGroups": [group], "JobModifyIndex": 1})
        return web.json_response({})

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        news = line = b'{"Events": [1]}\n'
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(line)
                line = news
                try:
                    async with asyncio.timeout(HEARTBEAT_S / 2):
                        await self.news.wait()
                except TimeoutError:
                    line = b"{}\n"
        return response

    async def say_gone(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[list[str]] = asyncio.Queue()
        self.gone.append(queue)
        while True:
            await response.write(json.dumps(await queue.get()).encode() + b"\n")


class Health(asyncio.Protocol):
    """The health of each node's sandbox servers; without an HTTP library, as there are tens of thousands."""

    BODY = json.dumps({"status": "ok", "boot_id": "b"}).encode()
    ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)

    def __init__(self, silent: set[str]) -> None:
        self._silent = silent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._node = transport.get_extra_info("sockname")[0]
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        if self._node in self._silent:
            self._transport.abort()
            return
        *requests, self._unread = (self._unread + data).split(b"\r\n\r\n")
        self._transport.write(self.ANSWER * len(requests))


async def main() -> None:
    containers = int(sys.argv[1])
    cluster = Cluster(containers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", cluster.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    loop = asyncio.get_running_loop()
    health = await loop.create_server(lambda: Health(cluster.silent), "0.0.0.0", 0, backlog=4096)
    cluster.health_port = health.sockets[0].getsockname()[1]
    for index in range(containers):
        cluster.place(index)
    telling = loop.create_task(cluster.tell())
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if "vanish" in order:
            await cluster.vanish(order["vanish"])
        if "churn" in order:
            await cluster.churn(order["churn"], order["pause_s"])
        print(json.dumps({"asked": dict(cluster.asked)}), flush=True)
        cluster.asked.clear()
    telling.cancel()
    health.close()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
