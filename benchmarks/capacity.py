"""`python -m benchmarks.capacity`: what an executor server does with a core and a GiB, for sizing (docs/operations.md).

It counts CPU time, which a busy machine changes little, of the server, its sandbox server and all slots; and memory as
proportional set size.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from .ours import children, cpu_s, pss_bytes

_MIB = 1 << 20


class Measured:
    """An executor server with slots on this machine."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client

    def tree(self) -> list[int]:
        """The server and all that it started."""
        return [self.process.pid, *children(self.process.pid)]

    def cpu_s(self) -> float:
        """What they have used, those that have ended among them."""
        return cpu_s(self.tree())

    def memory(self) -> int:
        """What they hold, in bytes."""
        return sum(map(pss_bytes, self.tree()))

    async def open(self) -> str:
        """A trajectory with a slot."""
        return (await self.client.post("/trajectories", json={})).raise_for_status().json()["trajectory_id"]

    async def call(self, trajectory: str) -> None:
        """A command of a model."""
        call = {"name": "terminal", "arguments": {"command": "echo hello"}}
        (await self.client.post(f"/trajectories/{trajectory}/calls", json=call)).raise_for_status()

    async def end(self, trajectory: str) -> None:
        """Give its slot back."""
        (await self.client.delete(f"/trajectories/{trajectory}")).raise_for_status()


async def measure(slots: int, calls: int) -> dict[str, float]:
    """CPU seconds of a lease, of a call, and bytes of a slot."""
    token = secrets.token_hex(16)
    command = [
        sys.executable,
        "-m",
        "atropos.cli",
        "executor-server",
        "--port",
        "0",
        "--slots-per-container",
        str(slots),
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--max-containers",
        "1",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "ATROPOS_EXECUTOR_TOKEN": token},
    )
    try:
        assert process.stderr is not None
        while (found := re.search(rb"http://\S+", await process.stderr.readline())) is None:
            pass
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=found[0].decode(), headers=headers, timeout=120) as client:
            return await _measured(Measured(process, client), slots, calls)
    finally:
        process.terminate()
        await process.communicate()


async def _measured(server: Measured, slots: int, calls: int) -> dict[str, float]:
    first = await server.open()
    await server.call(first)
    held = server.memory()
    others = [await server.open() for _ in range(slots - 1)]
    for each in others:
        await server.call(each)
    per_slot = (server.memory() - held) / len(others)
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
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
