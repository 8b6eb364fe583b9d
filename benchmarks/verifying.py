"""`python -m benchmarks.verifying`: what verification costs in each mode, taken in turn on one pool.

Each round leases a slot, does a task's solution in it, and, once what that set off in the pool is over, times
`workspace.verify`; a separate verifier's slot is leased and prepared within that time. The order changes from round to
round.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from atropos.slots import Slot, SlotPool, SlotPoolConfig
from atropos.tasks import workspace
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier.mode import Mode

from . import machine

MODES: tuple[Mode, ...] = ("shared", "view", "separate")
PAUSE_S = 0.3
"""An agent works for much longer than the pool takes to start a sandbox in the place of one that was leased."""


async def measure(path: Path, rounds: int, modes: Sequence[Mode]) -> dict[str, list[float]]:
    """Seconds of each verification by mode, the first round left out."""
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    async with SlotPool(SlotPoolConfig(backend="local", slots_per_container=4, max_containers=1)) as pool:
        prepared = await TaskImages(pool).prepare(load_task(path))
        task = prepared.task

        async def fresh() -> Slot:
            slot = await pool.acquire("verifier", image=prepared.image)
            others.append(slot)
            await workspace.enter(slot, task)
            return slot

        for number in range(rounds + 1):
            for mode in (modes, modes[::-1])[number % 2]:
                others: list[Slot] = []
                async with pool.lease("agent", image=prepared.image) as slot:
                    await workspace.enter(slot, task)
                    await workspace.solve(slot, task)
                    await asyncio.sleep(PAUSE_S)
                    started = time.perf_counter()
                    verdict = await workspace.verify(slot, task, mode=mode, fresh=fresh)
                    if number:
                        found[mode].append(time.perf_counter() - started)
                    assert verdict.reward == 1, verdict
                for other in others:
                    await other.release()
    return found


def main(
    task: Annotated[Path, typer.Option(help="whose tests run")] = Path("examples/tasks/fix-ledger"),
    rounds: Annotated[int, typer.Option(help="verifications of each mode")] = 20,
    mode: Annotated[list[str] | None, typer.Option(help="modes beside shared; all of them")] = None,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
) -> None:
    """Print p50 and the ratio to `shared` for each mode."""
    modes = [each for each in MODES if mode is None or each in {"shared", *mode}]
    found = asyncio.run(measure(task, rounds, modes))
    base = statistics.median(found["shared"])
    rows = {
        name: {"p50_s": statistics.median(times), "ratio": statistics.median(times) / base}
        for name, times in found.items()
    }
    for name, row in rows.items():
        typer.echo(f"{name:10} {row['p50_s'] * 1000:8.1f} ms   {row['ratio']:.2f} x shared")
    if out is not None:
        out.write_text(json.dumps({"machine": machine.describe(), "n": rounds, "modes": rows}, indent=2))


if __name__ == "__main__":
    typer.run(main)
