"""One env process of `fleet_decisions`: a real pool on the real Nomad backend, its servers stood in for in memory.

Usage: python -m benchmarks.fleet_member PORT CONTAINERS; a line of JSON in, one out: {"acquires": N} or {"whole":
SECONDS}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.container import Container

from .fleet import SLOTS, Server


class Member:
    """The pool, and the nodes that don't answer it."""

    def __init__(self, port: int, containers: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.containers = containers
        self.silent: set[str] = set()
        self.servers: dict[str, list[Server]] = {}
        """By node."""

    def client(self, container: Container, *_: object) -> Any:
        """What stands in for a connection to a container."""
        node = str(container.url).split("/")[2].partition(":")[0]
        server = Server(container.id, node not in self.silent)
        self.servers.setdefault(node, []).append(server)
        return server

    async def follow_silence(self) -> None:
        """Break the connections to nodes that went silent."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.url}/gone") as answer:
            async for line in answer.content:
                nodes = set(json.loads(line))
                for node in nodes - self.silent:
                    for server in self.servers.get(node, ()):
                        server.reachable = False
                        server.lost.set()
                self.silent |= nodes

    async def until_whole(self, pool: SlotPool, patience_s: float) -> float:
        """Seconds until as many containers are ready as the job has."""
        began = time.perf_counter()
        async with asyncio.timeout(patience_s):
            while pool.stats().ready < self.containers:  # noqa: ASYNC110 (seen by polling alone)
                await asyncio.sleep(0.1)
        return time.perf_counter() - began

    async def run(self) -> None:
        config = SlotPoolConfig(
            backend="nomad",
            nomad_address=self.url,
            slots_per_container=SLOTS,
            min_containers=self.containers,
            max_containers=self.containers,
            idle_container_s=3600,
            start_timeout_s=600,
        )
        loop = asyncio.get_running_loop()
        following = loop.create_task(self.follow_silence())
        pool = SlotPool(config, make_client=self.client)  # type: ignore[arg-type]
        began = time.perf_counter()
        await pool.start()
        await self.until_whole(pool, 1800)
        self.say({"ready_s": time.perf_counter() - began})
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            if "whole" in order:
                while pool.stats().ready == self.containers:  # noqa: ASYNC110 (as above)
                    await asyncio.sleep(0.02)
                self.say({"whole_s": await self.until_whole(pool, order["whole"])})
            else:
                self.say({"acquire_us": await self.acquires(pool, order["acquires"])})
        following.cancel()

    async def acquires(self, pool: SlotPool, number: int) -> float:
        """Microseconds of CPU of this process for an acquire with its release."""
        began = time.process_time()
        for _ in range(number):
            await (await pool.acquire("t")).release()
        return (time.process_time() - began) / number * 1e6

    @staticmethod
    def say(what: dict[str, float]) -> None:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(Member(int(sys.argv[1]), int(sys.argv[2])).run())
