"""This checkout beside an older one, in one run: both keep their slots open, and their rounds take turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .stats import Row, row

HERE = Path(__file__).resolve().parent.parent
KINDS = ("client", "server", "runner", "command")
"""The processes of a call: the executor's, the sandbox server's, PID 1 of the slots, and what it starts (bash)."""


@dataclass(frozen=True)
class Round:
    """What one round of calls took.

    Attributes:
        samples: seconds of each call.
        seconds: of all together.
        cpu: seconds of CPU by kind of process.
    """

    samples: list[float]
    seconds: float
    cpu: dict[str, float]


@dataclass(frozen=True)
class Life:
    """What one pool took from its start on.

    Attributes:
        start: seconds until each slot had answered a call.
        start_cpu: seconds of CPU until then, of all processes.
        memory: bytes of all processes then, a slot.
        leases: seconds of each further lease with one call.
        lease_cpu: seconds of CPU of one.
    """

    start: float
    start_cpu: float
    memory: float
    leases: list[float]
    lease_cpu: float


class Driver:
    """A process that runs the calls of one checkout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def measure(self, parallel: int, n: int) -> Round:
        """`n` calls, `parallel` at once.

        Raises:
            RuntimeError: the driver ended; the message ends with its last words.
        """
        return Round(**await self._ask({"parallel": parallel, "n": n}))

    async def live(self, leases: int) -> Life:
        """A pool from nothing, and that many leases one after the other.

        Raises:
            RuntimeError: as `measure`.
        """
        return Life(**await self._ask({"leases": leases}))

    async def _ask(self, order: dict[str, int]) -> dict[str, Any]:
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        stdin.write(json.dumps(order).encode() + b"\n")
        line = await asyncio.wait_for(stdout.readline(), 300)
        if not line:
            said = (await stderr.read()).decode(errors="replace").strip()
            raise RuntimeError(f"the driver ended: {said[-400:]}")
        return json.loads(line)


@contextlib.asynccontextmanager
async def driver(checkout: Path, slots: int, containers: int = 1) -> AsyncIterator[Driver]:
    """A driver on `slots` slots, in so many containers, of the code in `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(Path(__file__).with_name("driver.py")), str(slots), str(containers)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=checkout,
        env=environment,
        limit=64 * 1024 * 1024,
    )
    try:
        yield Driver(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.communicate(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A worktree of a revision, for as long as it is needed.

    Raises:
        RuntimeError: git has no such revision.
    """
    commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as folder:
        place = Path(folder, commit[:12])
        _git("worktree", "add", "--detach", "--quiet", str(place), commit)
        try:
            yield place
        finally:
            _git("worktree", "remove", "--force", str(place))


def rows(case: str, subject: str, rounds: list[Round], *, base: bool, at: str) -> list[Row]:
    """Latency and throughput of the rounds, and the CPU of a call by kind of process."""
    samples = [sample for each in rounds for sample in each.samples]
    calls = len(samples)
    seconds = sum(each.seconds for each in rounds)
    made = [row(case, subject, samples, throughput=calls / seconds, base=base)]
    for kind, parts in (*((kind, (kind,)) for kind in KINDS), ("all together", KINDS)):
        each_s = [sum(one.cpu[part] for part in parts) / len(one.samples) for one in rounds]
        made.append(row(f"CPU a call at {at}, {kind}", subject, each_s, base=base))
    return made


async def measure(
    checkouts: dict[str, Path], *, parallel: int, n: int, rounds: int, say: Any, containers: int = 1
) -> list[Row]:
    """Rounds of `n` calls in each checkout, taking turns; the first one is the base of the ratios."""
    taken: dict[str, list[Round]] = {subject: [] for subject in checkouts}
    async with contextlib.AsyncExitStack() as stack:
        drivers = {
            s: await stack.enter_async_context(driver(path, parallel, containers)) for s, path in checkouts.items()
        }
        for number in range(rounds):
            for subject, each in drivers.items():
                say(f"{parallel} trajectories: {subject}, round {number + 1} of {rounds}")
                taken[subject].append(await each.measure(parallel, n))
    over = f" over {containers} containers" if containers > 1 else ""
    case = f"throughput, {parallel} trajector{'y' if parallel == 1 else 'ies'}{over}"
    parts = [
        rows(case, subject, each, base=index == 0, at=f"{parallel}{over}")
        for index, (subject, each) in enumerate(taken.items())
    ]
    return [made for group in zip(*parts, strict=True) for made in group]


async def lives(checkouts: dict[str, Path], *, leases: int, rounds: int, say: Any) -> list[Row]:
    """Pools of four slots from nothing in each checkout, taking turns: the start, leases, and the memory of a slot."""
    taken: dict[str, list[Life]] = {subject: [] for subject in checkouts}
    async with contextlib.AsyncExitStack() as stack:
        drivers = {s: await stack.enter_async_context(driver(path, 4)) for s, path in checkouts.items()}
        for number in range(rounds):
            for subject, each in drivers.items():
                say(f"a pool from nothing: {subject}, round {number + 1} of {rounds}")
                taken[subject].append(await each.live(leases))
    made: list[Row] = []
    for index, (subject, found) in enumerate(taken.items()):
        base = index == 0
        made += [
            row("start of four slots", subject, [one.start for one in found], base=base),
            row("start of four slots, CPU", subject, [one.start_cpu for one in found], base=base),
            row("lease with a call", subject, [each for one in found for each in one.leases], base=base),
            row("lease with a call, CPU", subject, [one.lease_cpu for one in found], base=base),
            row("memory a slot, with the server's", subject, [one.memory / 1e6 for one in found], "MB", base=base),
        ]
    return sorted(made, key=lambda one: [each.case for each in made].index(one.case))
