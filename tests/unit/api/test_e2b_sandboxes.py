"""Sandboxes of the E2B API on real slots."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from unittest import mock

import pytest
from pydantic import SecretStr

from atropos.api.e2b.sandboxes import Sandboxes
from atropos.api.e2b.snapshots import NamedSnapshots
from atropos.api.executor.models import ExecutorServerSettings
from atropos.errors import ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from tests.unit.api.account import own_account


@pytest.mark.slow("starts servers")
async def test_a_clock_step_moves_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time
    config = SlotPoolConfig(backend="local", slots_per_container=2, max_containers=1)
    async with SlotPool(config) as pool:
        sandboxes = Sandboxes(pool, ExecutorServerSettings(token=SecretStr("x"), pool=config), own_account())
        for step_s in (7200, -7200):
            monkeypatch.setattr(time, "time", clock)
            made = await sandboxes.create("base", timeout_s=600, metadata={}, env={}, hosts=None)
            started = clock()
            monkeypatch.setattr(time, "time", lambda step_s=step_s: clock() + step_s)
            assert sandboxes.find(made.id) is made
            sandboxes.set_timeout(made, 900)
            end = datetime.fromisoformat(str(made.info(sandboxes.limits)["endAt"])).timestamp()
            assert 800 < end - started < 1000
            sandboxes.set_timeout(made, 0)
            assert sandboxes.find(made.id) is None
        await sandboxes.aclose()


@pytest.mark.parametrize("name", ["base", "e2bdev/base", "e2bdev/base:latest", "debian"])
async def test_a_snapshot_hides_no_base(name: str) -> None:
    with pytest.raises(ConfigError, match=f"name: '{name}' is a base of the pool"):
        await NamedSnapshots(own_account(), {"debian"}).keep(mock.Mock(id="sandbox"), name)


async def test_two_keeps_of_a_name_leave_one() -> None:
    class Snapshot:
        dropped = False

        async def drop(self) -> None:
            await asyncio.sleep(0)
            self.dropped = True

    taken = [Snapshot() for _ in range(3)]
    sandbox = mock.Mock(slot=mock.Mock(snapshot=mock.AsyncMock(side_effect=taken)))
    snapshots = NamedSnapshots(own_account(), ())
    await snapshots.keep(sandbox, "name")
    await asyncio.gather(*(snapshots.keep(sandbox, "name") for _ in range(2)))
    named = snapshots.get("name")
    assert named is not None
    assert [each for each in taken if not each.dropped] == [named.snapshot]
