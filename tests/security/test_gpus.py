"""A GPU is its lease's alone: whoever has none, or another one, finds no way to it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from atropos.slots import LeaseLimits, Slot, SlotPool
from tests import privileges
from tests.engines import params, pool_config
from tests.gpus import NUMBERS, GpuMachine, gpu_machine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), privileges.device_nodes]
ONE = LeaseLimits(gpus=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=params("local", "docker"))
async def slots(request) -> AsyncGenerator[tuple[Slot, Slot, Slot, GpuMachine]]:
    """Two slots with a GPU each, and one without."""
    with gpu_machine() as machine:
        async with (
            SlotPool(pool_config(request.param, slots_per_container=3, **machine.settings())) as pool,
            pool.lease("one", limits=ONE) as one,
            pool.lease("two", limits=ONE) as two,
            pool.lease("none") as none,
        ):
            await one.start("exec 3< /dev/test-gpu0; exec sleep 1000")
            yield one, two, none, machine


MAKE = """
import os, sys
major, minor = map(int, sys.argv[1:3])
found = []
for folder in ("/dev", "/dev/shm", "/tmp", "/workspace", "/run"):
    try:
        os.mknod(f"{folder}/mine", 0o666 | 0o020000, os.makedev(major, minor))
        os.open(f"{folder}/mine", os.O_RDWR)
        found.append(folder)
    except OSError:
        pass
print(found)
"""
SEARCH = """
import os, sys
number = os.makedev(int(sys.argv[1]), int(sys.argv[2]))
theirs = os.stat("/dev/zero").st_ino
found = []
for top in ("/dev", "/proc", "/sys", "/run", "/tmp", "/.atropos", "/opt", "/workspace"):
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not folder.startswith("/proc/") or name in ("fd", "root", "cwd", "map_files")]
        for name in files + folders:
            try:
                each = os.stat(f"{folder}/{name}")
            except OSError:
                continue
            if each.st_rdev == number and each.st_ino != theirs:
                found.append(f"{folder}/{name}")
print(found)
"""
MOUNT = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
host = sys.argv[1]
done = [
    libc.mount(host.encode(), b"/mnt", None, 4096, None),
    libc.mount(b"devtmpfs", b"/mnt", b"devtmpfs", 0, None),
    libc.mount(None, b"/dev", None, 32 | 4096, None),
    libc.umount2(b"/dev/test-gpu1", 2),
    libc.syscall(428, -100, host.encode(), 1),
    libc.syscall(429, 3, b"", -100, b"/mnt", 4),
    libc.unshare(0x10000000 | 0x20000),
    subprocess.run(["ls", f"{host}/gpu0"], capture_output=True).returncode or None,
]
print([each for each in done if each in (0, None)])
"""
CHANGE = """
import os
refused = 0
for name in ("gpu1", "gpuctl"):
    path = f"/dev/test-{name}"
    for act in (lambda: os.chmod(path, 0), lambda: os.chown(path, 0, 0), lambda: os.utime(path), lambda: os.unlink(path),
                lambda: os.rename(path, "/dev/other"), lambda: os.setxattr(path, "user.a", b"b")):
        try:
            act()
        except OSError:
            refused += 1
print(refused)
"""


def number_of(gpu: int) -> tuple[int, int]:
    """Major and minor number of a GPU."""
    return os.major(NUMBERS[gpu]), os.minor(NUMBERS[gpu])


async def run(slot: Slot, program: str, *arguments: object) -> str:
    done = await slot.exec(["python3", "-c", program, *map(str, arguments)], timeout_s=60)
    return done.output.strip()


@pytest.mark.parametrize("user", ["0", "1000"])
async def test_no_slot_makes_another_s(slots, user):
    _, two, none, _ = slots
    for slot, gpu in ((two, 0), (none, 1)):
        done = await slot.exec(["python3", "-c", MAKE, *map(str, number_of(gpu))], user=user)
        assert done.output.strip() == "[]"


async def test_no_slot_finds_another_s(slots):
    one, two, none, _ = slots
    assert "/dev/test-gpu0" in await run(one, SEARCH, *number_of(0))  # so that the search can find it
    assert [await run(slot, SEARCH, *number_of(0)) for slot in (two, none)] == ["[]", "[]"]


async def test_none_mounted_or_uncovered(slots):
    _, two, none, machine = slots
    assert [await run(slot, MOUNT, machine.folder / "dev") for slot in (two, none)] == ["[]", "[]"]


async def test_nodes_stay_as_they_are(slots):
    _, two, _, machine = slots
    before = [(each.stat().st_mode, each.stat().st_mtime_ns) for each in sorted((machine.folder / "dev").iterdir())]
    assert await run(two, CHANGE) == "12"
    after = [(each.stat().st_mode, each.stat().st_mtime_ns) for each in sorted((machine.folder / "dev").iterdir())]
    assert after == before
    library = "/opt/gpu-test/lib/libgpu-test.so.1.2.3"
    assert (await two.exec(f"echo x > {library} || rm {library} || mv {library} /tmp/x")).exit_code
