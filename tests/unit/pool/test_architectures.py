"""Pools whose containers run on machines of one architecture, or of two."""

from __future__ import annotations

import pytest

from atropos.cli.image_progress import image_or_task
from atropos.errors import AcquireTimeout, ConfigError, ImageUnavailable
from atropos.slots.pool import images
from atropos.tasks.format.task import Task
from atropos.wire import ImageInfo
from tests.unit.pool.model import model_pool
from tests.waiting import until

BOTH = ("amd64", "arm64")


def image_for(architecture: str) -> str:
    """An image for this architecture alone; servers of the model go by its name."""
    return f"registry.example/app:only-for-{architecture}"


def mixed_pool(**settings):
    return model_pool(slots=4, containers=2, min_containers=2, architectures=BOTH, **settings)


@pytest.mark.parametrize("architecture", BOTH)
async def test_image_goes_where_it_runs(architecture):
    pool, backend = mixed_pool()
    async with pool:
        for n in range(4):
            slot = await pool.acquire(f"t{n}", image=image_for(architecture))
            assert backend.servers[slot.container].architecture == architecture
        with pytest.raises(AcquireTimeout):
            await pool.acquire("one more", image=image_for(architecture), timeout_s=0.2)


async def test_image_for_neither_fails():
    pool, _ = mixed_pool()
    async with pool:
        with pytest.raises(ImageUnavailable, match="no image for linux/"):
            await pool.acquire("t", image=image_for("riscv64"), timeout_s=60)


async def test_lack_is_remembered(monkeypatch):
    pool, backend = mixed_pool()
    async with pool:
        asked = {server.architecture: server for server in backend.servers.values()}

        async def lease() -> None:
            async with pool.lease("t", image=image_for("arm64")):
                pass

        for _ in range(5):
            await lease()
        assert asked["amd64"].preparing == 1
        await pool.prepare(image_for("arm64"))
        assert asked["amd64"].preparing == 2
        monkeypatch.setattr(images, "ASK_AGAIN_S", 0.0)
        await lease()
        assert asked["amd64"].preparing == 3


async def test_failed_names_are_forgotten(monkeypatch):
    """Clients may name any number of images that there aren't."""
    monkeypatch.setattr(images, "ASK_AGAIN_S", 0.0)
    pool, _ = mixed_pool()
    async with pool:
        for number in range(20):
            with pytest.raises(ImageUnavailable):
                await pool.prepare(f"{image_for('riscv64')}-{number}")
        assert [len(tasks) for tasks in pool._images._tasks.values()] == [1, 1]


async def test_built_image_keeps_kind():
    pool, backend = mixed_pool()
    async with pool:
        amd64, arm64 = backend.servers.values()
        built = ImageInfo(
            id="0" * 64, source=f"atropos-build:{'0' * 64}", bytes=1, parent_source="atropos-base:default"
        )
        arm64.built[built.source] = built
        for n in range(3):
            slot = await pool.acquire(f"t{n}", image=built.source)
            assert slot.container == arm64.name
        assert amd64.built == {}


async def test_fork_stays_with_its_kind():
    pool, backend = mixed_pool()
    async with pool:
        origin = await pool.acquire("origin")
        snapshot = await origin.snapshot()
        for n in range(3):
            fork = await pool.acquire(f"f{n}", snapshot=snapshot)
            assert fork.container == origin.container
        with pytest.raises(AcquireTimeout):
            await pool.acquire("one more", snapshot=snapshot, timeout_s=0.2)
        assert [server.taken_in for server in backend.servers.values()] == [0, 0]


async def test_built_for_one_kind():
    pool, _ = mixed_pool()
    async with pool:
        with pytest.raises(ConfigError, match="architecture: the pool has containers of amd64 and arm64; name one"):
            _ = pool.architecture
    for architectures, wanted in ((("arm64",), None), (("arm64",), "arm64")):
        pool, _ = model_pool(architectures=architectures, architecture=wanted)
        async with pool:
            assert pool.architecture == "arm64"


@pytest.mark.parametrize("architecture", BOTH)
async def test_dockerfiles_are_read_for_the_pool(tmp_path, architecture):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"FROM --platform=linux/{architecture} debian\n")
    pool, _ = model_pool(architectures=(architecture,))
    async with pool:
        task = image_or_task(str(dockerfile), pool)
    assert isinstance(task, Task)
    assert task.recipe.image == "debian"


async def test_other_kind_fails_the_start():
    pool, _ = model_pool(architectures=("amd64",), architecture="arm64")
    with pytest.raises(ConfigError, match=r"architecture: arm64 is set, and container .* is amd64"):
        await pool.start()


async def test_other_kind_gets_no_lease():
    pool, backend = model_pool(slots=1, containers=2, architectures=BOTH, architecture="amd64")
    async with pool:
        first = await pool.acquire("t")
        with pytest.raises((AcquireTimeout, ConfigError)):
            await pool.acquire("one more", timeout_s=0.3)
        await until(lambda: backend.retired, "the refused container's end")
        assert backend.servers[first.container].architecture == "amd64"
        assert not any(server.requests for server in backend.history if server.architecture == "arm64")
