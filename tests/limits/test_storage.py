"""Leases of more files than memory: kept on disk with a bound of their own, or without one where the log says so."""

from __future__ import annotations

import os
import shutil

import pytest
import pytest_asyncio

from atropos.errors import LimitTooLarge, NotSupported
from atropos.slots import LeaseLimits, SlotPool
from tests import privileges
from tests.backends import Engine
from tests.waiting import SLOWNESS

in_one_loop = pytest.mark.asyncio(loop_scope="module")
needs_cells = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control") or shutil.which("mkfs.ext4") is None,
    reason="needs root, loop devices and mkfs.ext4",
)
PLAIN = {"memory_mib": 96, "pids": 48, "disk_mib": 32, "inodes": 3000}
LARGE = LeaseLimits(disk_mib=256)


def config(engine=None, **changes):
    settings = {"slots_per_container": 3, "max_containers": 1, "limits": PLAIN, "acquire_timeout_s": 60 * SLOWNESS}
    return (engine or Engine("local")).config(**settings | {"largest_disk_mib": 256} | changes)


def write(mib: int, name: str = "f") -> str:
    return f"head -c {mib << 20} /dev/zero > {name} && stat -c %s {name}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    engine = Engine("local")
    async with SlotPool(config(engine)) as pool:
        yield pool
        assert pool.stats().retired == 0, repr(pool)
    assert await engine.residue(pool.config) == []


@needs_cells
@in_one_loop
async def test_more_files_than_memory_are_on_disk(pool):
    for _ in range(2):
        async with pool.lease("large", limits=LARGE) as slot:
            assert (await slot.exec(write(180))).output == f"{180 << 20}\n"
            assert (await slot.exec("exec python3 -c \"print(len(b'x' * (48 << 20)) >> 20)\"")).output == "48\n"
            assert (await slot.exec(write(180, "g"))).limit == "disk"
            await slot.exec("rm -f f g")
            files = "for i in $(seq 4000); do : > f$i || exit 1; done 2>/dev/null"
            assert (await slot.exec(files, timeout_s=60 * SLOWNESS)).limit == "inodes"
            assert (await slot.exec("exec python3 -c \"x = b'x' * (144 << 20)\"")).limit == "memory"
            assert slot.lease.limit_note is None
        async with pool.lease("plain") as slot:
            assert (await slot.exec(f"ls; {write(48)}")).limit == "disk"


@needs_cells
@in_one_loop
async def test_snapshots_on_disk_keep_their_place(pool):
    async with pool.lease("large", limits=LARGE) as slot:
        assert (await slot.exec(write(150))).exit_code == 0
        async with await slot.snapshot() as snapshot:
            assert (await slot.exec(write(150, "g"))).limit == "disk", "its snapshot is in the same place"
            async with pool.lease("fork", snapshot=snapshot) as fork:
                assert (await fork.exec(f"stat -c %s f; {write(150, 'g')}")).output == f"{150 << 20}\n" * 2
    async with pool.lease("next", limits=LARGE) as slot:
        assert (await slot.exec(f"ls; {write(180)}")).output == f"{180 << 20}\n"


@needs_cells
@in_one_loop
async def test_view_shows_files_on_disk(pool):
    async with pool.lease("large", limits=LARGE) as slot:
        assert (await slot.exec(f"mkdir -p /app && cd /app && {write(150)}")).exit_code == 0
        await slot.view(["/app"])
        assert (await slot.exec("stat -c %s /app/f && rm /app/f && echo own > /app/g")).output == f"{150 << 20}\n"


@in_one_loop
async def test_too_large_is_refused(pool):
    with pytest.raises(LimitTooLarge, match=r"limits\.disk_mib: 257 asked for.*256.*largest_disk_mib"):
        await pool.acquire("x", limits=LeaseLimits(disk_mib=257))
    async with SlotPool(config(largest_disk_mib=None)) as without:
        with pytest.raises(LimitTooLarge, match=r"limits\.disk_mib: 512 asked for.*288.*set largest_disk_mib"):
            await without.acquire("x", limits=LeaseLimits(disk_mib=512))


@privileges.cgroups
async def test_unbounded_is_named(caplog):
    """There is no disk on which a place of 512 TiB has room."""
    huge = 1 << 29
    async with SlotPool(config(largest_disk_mib=huge)) as pool:
        for _ in range(2):
            async with pool.lease("large", limits=LeaseLimits(disk_mib=huge)) as slot:
                assert (await slot.exec(f"ls; {write(180)}")).output == f"{180 << 20}\n"
                assert "disk_mib, inodes: nothing bounds files on disk here (" in (slot.lease.limit_note or "")
            async with pool.lease("plain") as slot:
                assert "disk_mib" not in (slot.lease.limit_note or "")
    assert sum("nothing bounds files on disk" in line for line in caplog.messages) == 1
    async with SlotPool(config(largest_disk_mib=huge, require_sandbox=True)) as pool:
        with pytest.raises(NotSupported, match=r"disk_mib, inodes: nothing bounds .*require_sandbox"):
            await pool.acquire("x", limits=LeaseLimits(disk_mib=huge))
