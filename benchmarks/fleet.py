"""`python -m benchmarks.fleet`: what an acquire and a reconcile cost in fleets of up to 10,000 containers x 32 slots.

Containers and servers are simulated in memory; the pool's own code is what runs. Each row is one fleet size with churn:
acquires and releases in a nearly full fleet, and containers that die and are replaced. Printed as a curve in n. With
`--live N` instead: N real slots on this machine at once (`live`). With `--job N`: env processes that share one Nomad
job of N containers (`fleet_decisions`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from atropos import wire
from atropos.errors import BackendUnavailable, PoolFull
from atropos.resources import NOTHING
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from atropos.slots.containers.fleet import Fleet
from atropos.slots.containers.seats import Seat

from . import machine
from .live import measure, show

SLOTS = 32
SLOT = SlotPoolConfig().slot_room


class Server:
    """Grants leases in memory; stands in for a client, too. One that isn't `reachable` refuses to be connected to."""

    def __init__(self, name: str, reachable: bool = True) -> None:
        self.name = name
        self.reachable = reachable
        self.free = SLOTS
        self.lost = asyncio.Event()

    async def connect(self) -> None:
        if not self.reachable:
            raise BackendUnavailable(f"{self.name} does not answer")

    async def close(self, reason: str = "") -> None: ...

    async def acquire(self, request: wire.LeaseRequest) -> wire.Lease:
        if not self.free:
            raise PoolFull("full")
        self.free -= 1
        return wire.Lease(lease_id=request.lease_id, slot="s", epoch=1, boot_id=self.name, ttl_s=60)

    async def release(self, lease: wire.Lease) -> wire.ReleaseResult:
        del lease
        self.free += 1
        return wire.ReleaseResult(released=True)

    async def capabilities(self) -> wire.Capabilities:
        return wire.Capabilities(boot_id=self.name, kernel="", features=(), limits={}, stateful=True, isolated=True)

    async def status(self) -> wire.Status:
        return wire.Status(
            boot_id=self.name,
            slots=SLOTS,
            free=self.free,
            room=SLOT * self.free,
            leased=SLOTS - self.free,
            warming=0,
            retired=0,
            retired_room=NOTHING,
            draining=False,
            clients=1,
            uptime_s=0,
        )


class FleetBackend(Backend):
    """As many containers as asked for, at once; counts how often it is asked."""

    name = "simulated"

    def __init__(self) -> None:
        self.listed: dict[int, Container] = {}
        self.made = 0
        self.asked = 0
        self.news = asyncio.Event()

    def _make(self, index: int) -> None:
        self.made += 1
        self.listed[index] = Container(f"c{self.made}", index, f"http://c{self.made}", "t", "running")

    async def start(self) -> None: ...

    async def scale(self, count: int) -> None:
        self.asked += 1
        for index in range(len(self.listed), count):
            self._make(index)
        self.news.set()

    def replace(self, index: int) -> None:
        """A container died and another took its place."""
        self._make(index)
        self.news.set()

    def containers(self) -> Sequence[Container]:
        return list(self.listed.values())

    async def changed(self) -> None:
        await self.news.wait()
        self.news.clear()

    def trouble(self) -> str:
        return ""

    async def aclose(self, *, purge: bool) -> None: ...


def decision_us(containers: int, rounds: int) -> float:
    """One decision of who gets which slot, in a fleet that is nine tenths full: microseconds."""
    fleet = Fleet(SLOT)
    for n in range(containers):
        fleet.join(Seat(f"c{n}", n), slots=SLOTS, free=SLOT * SLOTS, now=0)
    for _ in range(containers * SLOTS * 9 // 10):
        fleet.ask(fleet.ticket())
    for ticket in fleet.match():
        assert ticket.seat is not None
        fleet.granted(ticket)
    began = time.perf_counter()
    for _ in range(rounds):
        fleet.ask(fleet.ticket())
        for ticket in fleet.match():
            assert ticket.seat is not None
            fleet.granted(ticket)
            fleet.returned(ticket.seat, SLOT, clean=True, now=0)
    return (time.perf_counter() - began) / rounds * 1e6


async def whole_us(containers: int, rounds: int) -> dict[str, float]:
    """Through the pool: an acquire with its release, and a reconcile after one container died: microseconds."""
    backend = FleetBackend()
    config = SlotPoolConfig(
        slots_per_container=SLOTS, min_containers=containers, max_containers=containers, idle_container_s=3600
    )
    servers: dict[str, Server] = {}
    pool = SlotPool(
        config,
        backend=backend,
        make_client=lambda c, *_: servers.setdefault(c.id, Server(c.id)),  # type: ignore[arg-type]
    )
    began = time.perf_counter()
    async with pool:
        ready_s = time.perf_counter() - began
        for n in range(containers * SLOTS * 9 // 10):
            await pool.acquire(f"t{n}")
        gc.collect()
        gc.freeze()
        began = time.perf_counter()
        for _ in range(rounds):
            await (await pool.acquire("t")).release()
        acquire = (time.perf_counter() - began) / rounds
        costs: list[float] = []
        for n in range(20):
            backend.replace(n * containers // 20)
            backend.news.clear()  # measured here, not behind our back
            began = time.perf_counter()
            pool._keeper.reconcile()  # noqa: SLF001 (one part alone is measured)
            costs.append(time.perf_counter() - began)
            await asyncio.sleep(0)
        asked = backend.asked
        gc.unfreeze()
    return {
        "ready_s": ready_s,
        "acquire_release_us": acquire * 1e6,
        "reconcile_us": statistics.median(costs) * 1e6,
        "backend_asked": asked,
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where the JSON goes")] = None,
    largest: Annotated[int, typer.Option(help="containers in the largest fleet")] = 10_000,
    live: Annotated[int, typer.Option(help="real slots at once on this machine, instead of the simulation")] = 0,
    containers: Annotated[int, typer.Option(help="with --live: sandbox servers that hold them")] = 10,
    rounds: Annotated[int, typer.Option(help="with --live: calls of each slot")] = 10,
    job: Annotated[int, typer.Option(help="containers of one Nomad job that env processes share, instead")] = 0,
    processes: Annotated[int, typer.Option(help="with --job: env processes")] = 5,
) -> None:
    """Print the curve, and write it when asked."""
    console = Console()
    if job:
        from . import fleet_decisions

        phases = asyncio.run(fleet_decisions.measure(job, processes, console))
        fleet_decisions.show(console, job, SLOTS, processes, phases)
        if json_path:
            json_path.write_text(json.dumps({"machine": machine.describe(), "phases": phases}, indent=1))
        return
    if live:
        found = asyncio.run(measure(live, containers, rounds, console))
        show(console, found)
        if json_path:
            json_path.write_text(json.dumps({"machine": machine.describe(), **asdict(found)}, indent=1))
        raise typer.Exit(1 if found.left else 0)
    sizes = [n for n in (10, 100, 1000, 3000, 10_000, 100_000) if n <= largest]
    table = Table(title=f"a simulated fleet, {SLOTS} slots a container, nine tenths leased, with churn")
    columns = "containers", "slots", "decision µs", "acquire µs", "reconcile µs", "ready s", "asked"
    for column in columns:
        table.add_column(column, justify="right")
    rows: list[dict[str, float]] = []
    for n in sizes:
        row = {"containers": n, "decision_us": decision_us(n, 3000)} | asyncio.run(whole_us(n, 1000))
        rows.append(row)
        numbers = f"{row['decision_us']:.1f}", f"{row['acquire_release_us']:.0f}", f"{row['reconcile_us']:.0f}"
        table.add_row(str(n), str(n * SLOTS), *numbers, f"{row['ready_s']:.2f}", f"{row['backend_asked']:.0f}")
    console.print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
