"""What an acquire makes of containers' answers, and what its lease counts under."""

from __future__ import annotations

import time

import pytest

from atropos.errors import BackendUnavailable, ImageUnavailable
from atropos.slots.containers.share import BASE
from tests.unit.pool.model import model_pool
from tests.waiting import until

IMAGE = "registry.example/app"


async def test_joined_slots_know_their_group():
    pool, _ = model_pool(slots=3)
    async with pool, pool.lease("t") as first:
        second = await pool.join(first, ["second"])
        third = await pool.join(first, ["third"])
        assert first.group == [first, second, third]
        assert first.group is second.group is third.group


async def test_usage_is_by_root():
    pool, _ = model_pool(slots=4, bases={"other": "/other"})
    async with pool:
        first = await pool.acquire("t", image=IMAGE)
        frozen = await first.snapshot()
        for options in ({"snapshot": frozen}, {"base": "other"}, {}):
            await pool.acquire("t", **options)
        used = pool.share.usage(time.monotonic())
    assert {name: each.leases for name, each in used.items()} == {IMAGE: 2, "other": 1, BASE: 1}


@pytest.mark.parametrize("removals", [1, 2])
async def test_removed_image_is_prepared_once_more(removals):
    pool, backend = model_pool(containers=1)
    async with pool:
        (server,) = backend.servers.values()
        grant, requests = server.grant, []

        def removed(request):
            requests.append(request)
            if len(requests) <= removals:
                raise ImageUnavailable("removed meanwhile")
            return grant(request)

        server.grant = removed
        if removals == 1:
            await pool.acquire("t", image=IMAGE)
        else:
            with pytest.raises(ImageUnavailable, match="removed"):
                await pool.acquire("t", image=IMAGE)
        assert (len(requests), server.preparing) == (2, 2)


async def test_nothing_is_awaited_in_vain():
    pool, backend = model_pool(containers=1)
    async with pool:
        slot = await pool.acquire("t")
        backend.refuse = BackendUnavailable("busy")  # so that an acquire brings no news of the backend
        backend.away = "gone"
        backend.fail(BackendUnavailable("gone for good"))
        backend.vanish(slot.container)
        await until(lambda: not pool.links, "the container is dropped")
        with pytest.raises(BackendUnavailable, match="for good"):
            await pool.acquire("u", timeout_s=1)
