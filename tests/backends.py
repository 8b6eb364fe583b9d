"""One backend, as tests of pools need it: how it is configured, hurt and inspected. The engines are in `engines`."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.testing import BackendHarness
from tests import engines
from tests.processes import adopt_orphans, descendants, gone_within


class ProcessesHere(BackendHarness):
    """A backend whose containers are processes of this machine.

    Args:
        settings: fields of `SlotPoolConfig` by which a pool is on it.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._others: set[int] = set()
        adopt_orphans()

    def config(self, **settings: Any) -> SlotPoolConfig:
        """A pool's configuration under a name of its own."""
        self._others = set(descendants())
        return engines.pool_config(**(self._settings | settings))

    async def residue(self, config: SlotPoolConfig) -> list[str]:
        """The processes that a pool left."""
        return [f"process {line}" for line in await gone_within(30, but=self._others)]


class Engine(ProcessesHere):
    """One of the built-in backends."""

    def __init__(self, name: str) -> None:
        super().__init__(backend=name)
        self.name = name

    async def signal(self, container: str, number: signal.Signals) -> None:
        """Send a signal to a local server's process."""
        assert self.name == "local"
        os.kill(int(container.partition("-")[0]), number)

    async def kill(self, pool: SlotPool, container: str) -> None:
        """End a container of the pool as an accident would."""
        if self.name == "local":
            await self.signal(container, signal.SIGKILL)
        elif self.name == "docker":
            await asyncio.to_thread(engines.kill_container, container)
        else:
            known = await asyncio.to_thread(engines.allocations, pool.config.job_id)
            allocation = next(one["ID"] for one in known if container.startswith(one["ID"]))
            (running,) = await asyncio.to_thread(engines.containers_of_allocation, allocation)
            await asyncio.to_thread(engines.kill_container, running)

    async def residue(self, config: SlotPoolConfig) -> list[str]:
        """What is left of a pool that was stopped and purged; empty when nothing is."""
        if self.name != "local":
            # an engine forgets a container a moment after its end; on a busy machine, much later
            for _ in range(600):
                if not (found := await asyncio.to_thread(engines.leftovers, self.name, config.job_id)):
                    break
                await asyncio.sleep(0.1)
            return found
        left = await super().residue(config)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return left + [f"mount {line}" for line in mounts if f"atropos-{os.getpid()}-" in line]
