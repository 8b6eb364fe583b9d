"""Leases of more files than memory: kept on disk with a bound of their own, or without one where the log says so."""

from __future__ import annotations

import os
import shutil

import pytest
import pytest_asyncio

from atropos.errors import LimitTooLarge, NotSupported, PoolFull
from atropos.slots import LeaseLimits, SlotPool
from atropos.slots.client import SandboxClient
from atropos.wire import CommandResult, Exec, Lease, LeaseRequest
from tests import privileges
from tests.backends import Engine
from tests.engines import params
from tests.settings import shows
from tests.small_disk import keeping_files_on, small_disk
from tests.unit.server.test_serve import running
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


def of(number: int, disk_mib: int) -> LeaseRequest:
    return LeaseRequest(lease_id=f"lease-{number:05}", client_id="tester", limits=LeaseLimits(disk_mib=disk_mib))


async def full(client: SandboxClient, lease: Lease, mib: int) -> None:
    """A lease holds what it asked for, on the disk, and no more."""
    holds = f"head -c {(mib - 1) << 20} /dev/urandom | tee f | cksum && sync f && dd if=f iflag=direct bs=1M status=none | cksum"
    done = await client.call(lease, Exec(command=holds))
    assert isinstance(done, CommandResult) and done.exit_code == 0, done
    assert len(set(done.output.splitlines())) == 1, "what is written is on the disk"
    done = await client.call(lease, Exec(command=write(3, "g")))
    assert isinstance(done, CommandResult) and done.limit == "disk"


@needs_cells
async def test_a_lease_takes_what_it_asks_for():
    """The disk has room for two of the largest size."""
    with small_disk(400) as disk:
        settings = {"slots": 5, "limits": PLAIN | {"memory_mib": 32, "disk_mib": 16}, "largest_disk_mib": 128}
        async with running(keeping_files_on(disk), **settings) as server, server.client() as client:
            sizes = 128, 64, 64
            held = [await client.acquire(of(number, mib)) for number, mib in enumerate(sizes)]
            with pytest.raises(PoolFull):
                await client.acquire(of(3, 128))
            hog = disk / "hog"
            with pytest.raises(OSError, match="No space left"), open(hog, "wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
            for lease, mib in zip(held, sizes, strict=True):
                await full(client, lease, mib)
            hog.unlink()
            await client.release(held.pop(0))
            for number, mib in enumerate((128, 100, 40, 120), 4):  # what is free is as large as it was, or changes
                held.append(await client.acquire(of(number, mib)))
                await full(client, held[-1], mib)
                await client.release(held.pop(number % 2))
            for lease in held:
                assert (await client.release(lease)).clean


@pytest.mark.parametrize("name", params("docker", "nomad"))
async def test_containers_keep_files_on_disk(name):
    """They have no loop devices, so nothing bounds them."""
    engine = Engine(name)
    settings = config(engine)
    async with SlotPool(settings) as pool:
        for _ in range(2):
            async with pool.lease("large", limits=LARGE) as slot:
                assert (await slot.exec(f"ls; {write(180)}")).output == f"{180 << 20}\n"
                async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
                    assert (await fork.exec("stat -c %s f && rm f && ls")).output == f"{180 << 20}\n"
                assert "disk_mib, inodes: nothing bounds files on disk here (" in (slot.lease.limit_note or "")
            async with pool.lease("plain") as slot:
                assert (await slot.exec(f"ls; {write(48)}")).limit == "disk"
    assert await engine.residue(settings) == []


@shows("largest_disk_mib")
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
