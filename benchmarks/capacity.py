"""`python -m benchmarks.capacity`: what an executor server does with a core and a GiB, for sizing (docs/operations.md).

It counts CPU time, which a busy machine changes little, of the server, its sandbox server and all slots; and memory as
proportional set size.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .executor_server import ExecutorServer, executor_server
from .ours import pss_bytes
from .pull import Images, registry

_MIB = 1 << 20
_PULL_PROGRAMS = ("docker-registry", "skopeo")
_IMAGE_MIB = 512
_LAYERS = 4


async def measure(slots: int, calls: int) -> dict[str, float]:
    """CPU seconds of a lease and of a call, and bytes of a slot."""
    async with executor_server(slots) as server:
        first = await server.open()
        await server.call(first)
        held = _memory(server)
        others = [await server.open() for _ in range(slots - 1)]
        for each in others:
            await server.call(each)
        per_slot = (_memory(server) - held) / len(others)
        began = server.cpu_s()
        for index in range(calls):
            await server.call(others[index % len(others)])
        per_call = (server.cpu_s() - began) / calls
        for each in others:
            await server.end(each)
        await asyncio.sleep(2)  # what is started ahead
        began, leases = server.cpu_s(), 3 * slots
        for _ in range(leases):
            await server.end(await server.open())
        await asyncio.sleep(2)
        return {"slot": per_slot, "call": per_call, "lease": (server.cpu_s() - began) / leases}


def _memory(server: ExecutorServer) -> int:
    """What its processes hold, in bytes."""
    return sum(map(pss_bytes, server.tree()))


async def measure_pull() -> float:
    """CPU seconds of a MiB of an image, unpacked, from a registry on loopback to the server's store."""
    with tempfile.TemporaryDirectory(prefix="atropos-bench-pull-") as folder, registry(Path(folder)) as host:
        images = Images(Path(folder), host)
        source = images.push([images.layer(_IMAGE_MIB // _LAYERS) for _ in range(_LAYERS)])
        store = {"folder": f"{folder}/store", "insecure_registries": [host]}
        async with executor_server(2, image_store=store) as server:
            await server.end(await server.open())  # a container is up
            began = server.cpu_s()
            await server.prepare(source)
            return (server.cpu_s() - began) / _IMAGE_MIB


def main(
    slots: Annotated[int, typer.Option(min=2, help="slots that are held at once")] = 32,
    calls: Annotated[int, typer.Option(min=1, help="calls that are counted")] = 1000,
) -> None:
    """Measure an executor server's CPU and memory, and print what a core and a GiB are enough for."""
    found = asyncio.run(measure(slots, calls))
    table = Table("what", "costs", "a core, or a GiB, is enough for")
    table.add_row("a call (`echo`)", f"{found['call'] * 1000:.2f} ms CPU", f"{1 / found['call']:,.0f} a second")
    table.add_row(
        "a lease, with its reset", f"{found['lease'] * 1000:.1f} ms CPU", f"{1 / found['lease']:,.0f} a second"
    )
    table.add_row("an idle slot", f"{found['slot'] / _MIB:.1f} MiB", f"{1024 * _MIB / found['slot']:,.0f} slots")
    if missing := [name for name in _PULL_PROGRAMS if shutil.which(name) is None]:
        table.add_row("a MiB of a pulled image", f"not measured: {', '.join(missing)} missing", "")
    else:
        pulled = asyncio.run(measure_pull())
        table.add_row("a MiB of a pulled image", f"{pulled * 1000:.1f} ms CPU", f"{1 / pulled:,.0f} MiB a second")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
