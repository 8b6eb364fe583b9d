"""Work on a pool while things break: trajectories without end, and witnesses who stay. Every wrong answer fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from typing import Self

from atropos.errors import AcquireTimeout, SandboxError
from atropos.slots import Slot, SlotPool
from tests.waiting import until

BACK_S = 60
"""What is promised: a pool is back to its size within this, in seconds."""
LOST = {"slot_lost", "outcome_unknown", "lease_expired"}
"""How a trajectory on a lost container may end."""


class Witness:
    """One trajectory that stays in its slot and calls without a pause; how it ended says whether it noticed anything."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.container = slot.container
        self.calls = 0
        self.longest_s = 0.0
        self.error: SandboxError | None = None
        self._stop = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while not self._stop:
                began = time.monotonic()
                result = await self.slot.exec("echo >> count; wc -l < count", timeout_s=120)
                self.calls += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                assert result.output == f"{self.calls}\n", "somebody else was in the slot"
                await asyncio.sleep(0.05)
        except SandboxError as error:
            self.error = error
        finally:
            await self.slot.release()

    async def more(self, calls: int) -> None:
        """Until so many more were answered."""
        aim = self.calls + calls
        await until(lambda: self.calls >= aim or self.task.done(), "more calls", BACK_S)
        assert self.error is None, self.error

    async def lost(self) -> None:
        """Until it has ended with its container, and in no other way."""
        await until(self.task.done, "the end of its lease", BACK_S)
        assert self.error is not None
        assert self.error.code in LOST, self.error

    async def finish(self) -> None:
        """End it as a trajectory ends."""
        self._stop = True
        await self.task


class Load:
    """`async with Load(pool, width=3, witnesses=3) as load:`: trajectories that lease, call and release for ever.

    A trajectory that fails for reasons of the infrastructure is counted by its error's code and the container it ran
    in, and followed by another. What a call answers is checked, so that a shared slot or a lost call fails the test.
    """

    def __init__(self, pool: SlotPool, *, width: int, witnesses: int = 0) -> None:
        self.pool = pool
        self.outcomes: Counter[str] = Counter()
        self.lost_in: set[str] = set()
        self.witnesses: list[Witness] = []
        self._width, self._count = width, witnesses
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._trajectories()) for _ in range(self._width)]
        for _ in range(self._count):
            await self.witness()
        await self.more(self._width)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for witness in self.witnesses:
            await witness.finish()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if kind is None:
                assert isinstance(result, asyncio.CancelledError), result

    def __repr__(self) -> str:
        calls = [f"{each.calls} calls, the longest {each.longest_s:.2f} s" for each in self.witnesses]
        return f"{dict(self.outcomes)}; witnesses: {'; '.join(calls)}"

    async def witness(self) -> Witness:
        """One more, in a container that has none yet where there is one."""
        aside: list[Slot] = []
        taken = {each.container for each in self.witnesses if each.error is None}
        while (slot := await self.pool.acquire("witness", timeout_s=BACK_S)).container in taken:
            aside.append(slot)
            if len(taken) >= self.pool.stats().ready:
                break
        for each in aside:
            if each is not slot:
                await each.release()
        self.witnesses.append(Witness(slot))
        return self.witnesses[-1]

    async def _trajectories(self) -> None:
        while True:
            slot: Slot | None = None
            try:
                async with self.pool.lease("load", timeout_s=BACK_S) as slot:
                    mark = f"trajectory {next(self._numbers)}"
                    assert (await slot.exec("ls -A")).output == "", "a slot was not fresh"
                    for n in range(1, 5):
                        told = (await slot.exec(f"echo {mark} >> f; uniq -c f")).output.split(maxsplit=1)
                        assert told == [str(n), f"{mark}\n"], told
                        await asyncio.sleep(0.03)
                self.outcomes["done"] += 1
            except AcquireTimeout:
                raise
            except SandboxError as error:
                self.outcomes[error.code] += 1
                if slot is not None:
                    assert error.code in LOST, error
                    self.lost_in.add(slot.container)
                await asyncio.sleep(0.02)

    async def more(self, trajectories: int) -> None:
        """Until so many more are done."""
        aim = self.outcomes["done"] + trajectories
        await until(
            lambda: self.outcomes["done"] >= aim or any(t.done() for t in self._tasks), "more trajectories", BACK_S
        )

    def unharmed(self, but: Collection[str] = frozenset()) -> None:
        """Nothing was lost so far, in any container but these."""
        assert self.lost_in <= set(but), (self.lost_in, dict(self.outcomes))
        for witness in self.witnesses:
            if witness.container not in but:
                assert witness.error is None, (witness.container, witness.error)
                assert witness.task.done() is False

    async def back(self, gone: Collection[str] = ()) -> float:
        """Until the pool has its size again, without the containers `gone`; answers how long that took, in seconds."""
        began = time.monotonic()
        size = self.pool.config.min_containers
        await until(
            lambda: self.pool.stats().ready == size and self.pool.links.keys().isdisjoint(gone),
            f"{size} containers ({self.pool!r})",
            BACK_S,
        )
        return time.monotonic() - began


def kill_server(container: str) -> None:
    """`kill -9` of the sandbox server inside a Docker container: the child of the container's init that is of its kind.

    A program that the server is about to start is of its kind too.
    """
    listed = subprocess.run(
        ["docker", "top", container, "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True, timeout=60
    )
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()[1:]]
    servers = {pid: parent for pid, parent, arguments in rows if "-m atropos.sandbox" in arguments}
    (server,) = (pid for pid, parent in servers.items() if parent in servers and servers[parent] not in servers)
    os.kill(int(server), signal.SIGKILL)
