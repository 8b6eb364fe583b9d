"""Pools of real sandbox servers on this machine."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from tests.backends import Engine


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine("local")


@pytest.fixture(scope="session")
def local_pool(engine):
    """`async with local_pool(slots_per_container=4) as pool:` and nothing is left of it afterwards."""

    @asynccontextmanager
    async def make(**settings):
        config = engine.config(**settings)
        async with SlotPool(config) as pool:
            yield pool
        assert await engine.residue(config) == []

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pool(local_pool):
    """One container of four slots for a module's tests, which give back what they take."""
    async with local_pool(slots_per_container=4, max_containers=1) as pool:
        yield pool
        stats = pool.stats()
        assert (stats.leased, stats.waiting, stats.free + stats.retired) == (0, 0, 4), repr(pool)
