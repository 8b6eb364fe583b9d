"""How much an attack slows its neighbours, told apart from how busy the machine is.

Neighbours call on a fixed schedule; a call's latency counts from the moment it was due, and moments missed while a call
hung count as late too, so that one long stall is not one sample. A round is a quiet stretch and an attacked one, one
after the other. What both stretches are compared with:

- a *control*, an ordinary process outside the slots that starts a program on the same schedule. It gets its fair share
  of the CPU and no more, so what slows it as well is that share (up to what a fair scheduler may take) or the machine;
- the CPU time that others on the machine used. In a round where it was much, a bad ratio says half as much; a good one
  says that neighbours did well even so.

An attack passes when good rounds lead, and fails when bad ones lead by three or good ones never do. Noise makes some
rounds bad; what blocks the server makes nearly all of them bad.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import descendants

PERIOD_S = 0.012
QUIET_S, STRETCH_S = 0.35, 0.75
KEPT_QUIET = 3
"""Quiet stretches, the latest, that make up the quiet value."""
FAIR = 3.0
"""Most that a fair share explains: an attacker's slot, the server and the neighbour compete, each with the same
weight."""
FOREIGN_CORES = 0.3
MOST_ROUNDS = 10
_TICKS = os.sysconf("SC_CLK_TCK")

_CONTROL = f"""
import os, sys, time
due = time.monotonic()
while True:
    due += {PERIOD_S}
    now = time.monotonic()
    if now < due:
        time.sleep(due - now)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {{}}), 0)
    late = time.monotonic() - due
    print(due, late, flush=True)
    while late > {PERIOD_S}:  # the moments that it missed
        due += {PERIOD_S}
        late -= {PERIOD_S}
        print(due, late, flush=True)
"""


@dataclass
class Clock:
    """Latencies of something that is done on the schedule."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    async def keep(self, work: Callable[[], Awaitable[None]]) -> None:
        due = time.monotonic()
        while True:
            due += PERIOD_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await work()
            late = time.monotonic() - due
            self.samples.append((due, late))
            while late > PERIOD_S:
                due += PERIOD_S
                late -= PERIOD_S
                self.samples.append((due, late))

    def during(self, stretch: tuple[float, float]) -> list[float]:
        return [late for due, late in self.samples if stretch[0] <= due < stretch[1]]


class Control:
    """The ordinary process."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "control"
        with open(self._file, "wb") as out:
            self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _CONTROL], stdout=out)

    def during(self, stretch: tuple[float, float]) -> list[float]:
        lines = [line.split() for line in self._file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [float(late) for due, late in lines if stretch[0] <= float(due) < stretch[1]]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[max(0, math.ceil(0.99 * len(latencies)) - 1)] if latencies else math.inf


def _foreign_s() -> float:
    """CPU seconds that everything but us has used on this machine so far, the hypervisor's other guests included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    ours = 0
    for pid in (os.getpid(), *descendants()):
        with contextlib.suppress(OSError, ValueError, IndexError):
            ours += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return (user + nice + system + irq + softirq + steal - ours) / _TICKS


@dataclass(frozen=True)
class Round:
    """One round's outcome. `ratios`: a neighbour's p99 under attack to its quiet one, less what the control shows."""

    ratios: tuple[float, ...]
    raw: tuple[float, ...]
    control: float
    foreign: float
    quiet_ms: float
    samples: int

    def __str__(self) -> str:
        return (
            f"x{max(self.raw):.1f} of {self.quiet_ms:.1f} ms, control x{self.control:.1f}, so x{max(self.ratios):.1f} "
            f"({self.samples} calls; others used {self.foreign:.2f} cores)"
        )


class Watch:
    """Measures attacks beside neighbours.

    Args:
        clocks: the neighbours'.
        control: the ordinary process.
        working: what keeps the clocks; it never ends by itself.
    """

    def __init__(self, clocks: Sequence[Clock], control: Control, working: Sequence[asyncio.Task[None]]) -> None:
        self._clocks, self._control, self._working = clocks, control, working
        self._quiet: list[tuple[float, float]] = []

    async def _stretch(
        self, seconds: float, work: Callable[[float], Awaitable[None]]
    ) -> tuple[tuple[float, float], float]:
        foreign, begun = _foreign_s(), time.monotonic()
        await work(begun + seconds)
        ended = time.monotonic()
        return (begun, ended), (_foreign_s() - foreign) / (ended - begun)

    async def round(self, attack: Callable[[float], Awaitable[None]]) -> Round:
        """Quiet, then under attack; `attack(until)` goes on until that moment of the monotonic clock."""

        async def nothing(until: float) -> None:
            await asyncio.sleep(until - time.monotonic())

        quiet, foreign_before = await self._stretch(QUIET_S if len(self._quiet) >= KEPT_QUIET else STRETCH_S, nothing)
        attacked, foreign = await self._stretch(STRETCH_S, attack)
        await asyncio.sleep(4 * PERIOD_S)  # the last ones due under attack are answered
        self._quiet = [*self._quiet[1 - KEPT_QUIET :], quiet]
        calm = [[late for stretch in self._quiet for late in clock.during(stretch)] for clock in self._clocks]
        hurt = [clock.during(attacked) for clock in self._clocks]
        ordinary = [late for stretch in self._quiet for late in self._control.during(stretch)]
        control = p99(self._control.during(attacked)) / p99(ordinary)
        disturbed = max(foreign, foreign_before)
        explained = max(1.0, control if disturbed > FOREIGN_CORES else min(FAIR, control))
        raw = tuple(p99(bad) / p99(good) for bad, good in zip(hurt, calm, strict=True))
        return Round(
            tuple(each / explained for each in raw),
            raw,
            control,
            disturbed,
            max(map(p99, calm)) * 1000,
            sum(map(len, hurt)),
        )

    async def within(self, bound: float, attack: Callable[[float], Awaitable[None]]) -> str:
        """Repeat rounds until they decide.

        Raises:
            AssertionError: neighbours' p99 is not within `bound` times its quiet value.
        """
        lead, told = 0.0, list[str]()
        for _ in range(MOST_ROUNDS):
            seen = await self.round(attack)
            for task in self._working:
                assert not task.done(), task.exception()
            told.append(str(seen))
            if max(seen.ratios) <= bound:
                lead += 1
            else:
                lead -= 1 if seen.foreign <= FOREIGN_CORES else 0.5
            if lead >= 1:
                return "; ".join(told)
            if lead <= -3:
                break
        raise AssertionError(f"p99 of neighbours is not within {bound} times its quiet value:\n" + "\n".join(told))
