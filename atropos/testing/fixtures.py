"""Pools for the conformance tests, made from the `harness` fixture that a backend's author defines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from atropos.testing.harness import BackendHarness

FreshPool = Callable[..., AbstractAsyncContextManager[SlotPool]]

__all__ = ["fresh_pool_fixture", "pool_fixture"]


@pytest_asyncio.fixture(name="pool", scope="module", loop_scope="module")
async def pool_fixture(harness: BackendHarness) -> AsyncIterator[SlotPool]:
    """Two containers of four slots for a module's tests. A slot that is not free at the end is a failure."""
    config = harness.config(min_containers=2, max_containers=2, slots_per_container=4)
    async with SlotPool(config) as pool:
        yield pool
        stats = pool.stats()
        assert (stats.leased, stats.waiting) == (0, 0), repr(pool)
        assert stats.free == 8 - stats.retired, repr(pool)
    assert await harness.residue(config) == []


@pytest.fixture(name="fresh_pool")
def fresh_pool_fixture(harness: BackendHarness) -> FreshPool:
    """`async with fresh_pool(max_containers=2) as pool:`, and nothing is left of it afterwards."""

    @asynccontextmanager
    async def make(**settings: object) -> AsyncGenerator[SlotPool]:
        config = harness.config(**({"slots_per_container": 2} | settings))
        async with SlotPool(config) as pool:
            yield pool
        assert await harness.residue(config) == []

    return make
