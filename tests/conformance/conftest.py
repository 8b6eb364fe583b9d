"""A pool on each backend, shared by a module's tests; `engine` alone for tests that make their own."""

from __future__ import annotations

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from tests.backends import Engine
from tests.engines import params


@pytest.fixture(scope="module", params=params())
def engine(request) -> Engine:
    return Engine(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(engine: Engine):
    """Two containers of four slots. What tests leave in it is a failure: at the end every slot must be free."""
    config = engine.config(min_containers=2, max_containers=2, slots_per_container=4)
    async with SlotPool(config) as pool:
        yield pool
        stats = pool.stats()
        assert (stats.leased, stats.waiting) == (0, 0), repr(pool)
        assert stats.free == 8 - stats.retired, repr(pool)
    assert await engine.residue(config) == []
