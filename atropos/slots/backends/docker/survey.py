"""An operator's view of a pool's containers in a Docker engine."""

from __future__ import annotations

import asyncio

from atropos.slots.backends.container import Container
from atropos.slots.backends.docker.engine import DockerEngine
from atropos.slots.backends.survey import Survey


async def open_docker(pool: str, address: str | None) -> Survey:
    """See `Backend.survey`."""
    engine = DockerEngine(pool, address)
    await asyncio.to_thread(engine.connect)

    async def containers() -> tuple[list[Container], str]:
        rows: list[Container] = []
        ended: list[str] = []
        for item in sorted(await asyncio.to_thread(engine.found), key=lambda item: item.index):
            if item.state in {"exited", "dead", "removing"}:
                reason = (await asyncio.to_thread(engine.ending, item.id)).reason
                ended.append(f"container {item.name} is {item.state}: {reason}")
                continue
            token = await asyncio.to_thread(engine.token, item.id)
            state = "starting" if item.state == "created" else "running"
            rows.append(Container(item.name, item.index, item.url, token or "", state, item.owner))
        return rows, "; ".join(ended)

    async def end(container: Container) -> None:
        await asyncio.to_thread(engine.end, container.id, within_s=10)

    async def purge() -> None:
        for item in await asyncio.to_thread(engine.found):
            await asyncio.to_thread(engine.end, item.id, within_s=1)

    return Survey(containers, end, purge, lambda: asyncio.to_thread(engine.close))
