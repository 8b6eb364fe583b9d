"""Slots released while heaps of files and processes in them fight back, and counters that no namespace divides.

ATROPOS_FAULTS above 1 takes 200,000 files and repeats the releases.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from atropos import wire
from atropos.slots import SlotPool
from tests import privileges
from tests.backends import Engine
from tests.repeats import TIMES
from tests.security.test_races import archive
from tests.security.test_what_programs_say_and_leave import says
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
FILES = 200_000 if TIMES > 1 else 30_000

HEAPS = f"""
import mmap, os, random, sys
os.chdir("/workspace")
kept = [os.open(f"/tmp/held-{{n}}", os.O_RDWR | os.O_CREAT) for n in range(200)]
for fd in kept[:100]:
    os.write(fd, bytes(10000))
for n in range(100):
    os.unlink(f"/tmp/held-{{n}}")
mapped = mmap.mmap(kept[0], 0)
def files():
    for folder in range({FILES} // 500):
        os.mkdir(f"m{{folder}}")
        for n in range(500):
            os.close(os.open(f"m{{folder}}/{{n}}", os.O_CREAT | os.O_WRONLY))
def deep():
    for _ in range(1500):
        os.mkdir("d" * 60)
        os.chdir("d" * 60)
    os.close(os.open("bottom", os.O_CREAT))
def odd():
    os.mkdir(b"odd")
    for n in range(2000):
        name = b"odd/" + random.randbytes(20).replace(b"/", b"_").replace(b"\\0", b"-")
        try:
            os.mkdir(name) if n % 2 else os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        except OSError:
            continue
        os.chmod(name, 0)
    os.chmod("odd", 0)
def restless():
    while True:
        for n in range(100):
            os.pwrite(kept[n], os.urandom(10), random.randrange(9000))
            mapped[n] = n
        if os.fork() == 0:
            os.setsid()
            os.chdir("/proc/self/fd")
for work in (deep, odd, restless, restless):
    if os.fork() == 0:
        os.setsid()
        try:
            work()
        finally:
            os._exit(0)
files()
print("made", flush=True)
while True:
    mapped[random.randrange(10000)] = 1
"""


async def test_heaps_are_gone_at_release():
    engine, rng = Engine("local"), random.Random(41)
    limits = {"memory_mib": 1024, "inodes": FILES + 20_000, "disk_mib": 64, "pids": 48, "open_files": 1024}
    config = engine.config(slots_per_container=1, max_containers=1, min_containers=1, limits=limits)
    async with SlotPool(config) as pool:
        async with pool.lease("first"):
            (link,) = pool.links.values()
        pid = int(link.container.id.partition("-")[0])
        groups = [  # walked, not globbed: other servers' come and go meanwhile
            Path(folder, name)
            for folder, _, names in os.walk("/sys/fs/cgroup")
            if os.path.basename(folder).startswith(f"atropos-{pid}-")
            for name in {"memory.usage_in_bytes", "memory.current"}.intersection(names)
        ]

        def held() -> tuple[int, int]:
            """MiB in use, and mounts."""
            used = int(groups[0].read_text()) if groups else 0
            return used >> 20, len(Path(f"/proc/{pid}/mounts").read_text().splitlines())

        async def settled() -> None:
            while (await link.client.status()).warming:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        await settled()
        memory, mounts = held()
        for number in range(3 * min(TIMES, 10)):
            whole = number % 3 == 0
            async with pool.lease(f"heaps-{number}") as slot:
                begun = await slot.run(wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": HEAPS}))
                if whole:  # all of them are there, and everything goes on
                    told = await slot.run(wire.ProcRead(id=begun.id, wait_s=120, until="output"))
                    assert told.output == b"made\n", told
                else:
                    await asyncio.sleep(rng.random() * 1.5)
            async with pool.lease(f"after-{number}") as slot:
                await says(slot, "ls -A /workspace /tmp | wc -l; set -- /proc/[0-9]*; echo $#", "3\n2\n")
        await settled()
        await until(lambda: held()[0] <= memory + 24 and held()[1] <= mounts, f"{(memory, mounts)} again, not {held()}")
        stats = pool.stats()
        assert (stats.free, stats.retired) == (1, 0), repr(pool)
    assert await engine.residue(config) == []


DEEP = """
import os
for _ in range(4000):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").write("reached")
"""
BOTTOM = """
import os
for _ in range(4000):
    os.chdir("d")
print(open("bottom").read())
"""


@privileges.volumes_on_disk
async def test_deep_folders_end_no_server():
    config = Engine("local").config(slots_per_container=3, max_containers=1, volume="disk")
    async with SlotPool(config) as pool, pool.lease("neighbour") as neighbour, pool.lease("deep") as slot:
        await slot.exec("exec python3 -I -", stdin=DEEP)
        async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
            assert (await fork.exec("exec python3 -I -", stdin=BOTTOM)).output == "reached\n"
        await says(neighbour, "echo goes on", "goes on\n")


# ------------------------------------------------------------------------------- counters of one user of the kernel's

GREEDY = """
import array, errno, fcntl, os, select, socket, time
kept, said = [], []
def attempt(what, work):
    try:
        while True:
            work()
    except OSError as error:
        said.append(f"{what}: {errno.errorcode[error.errno]}")
room = [os.dup(0) for _ in range(20)]
def pipes():
    r, w = os.pipe()
    kept.extend((r, w))
    fcntl.fcntl(w, 1031, 1 << 20)
def watches():
    epoll = select.epoll()
    kept.append(epoll)
    for fd in kept[:200]:
        if isinstance(fd, int):
            try:
                epoll.register(fd)
            except PermissionError:
                pass
def flights():
    a, b = socket.socketpair()
    kept.extend((a, b))
    a.setblocking(False)
    try:
        while True:
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 250))])
    except BlockingIOError:
        pass
for _ in range(8):
    if os.fork() == 0:
        break
attempt("pipes", pipes)
[os.close(fd) for fd in room[:12]]
attempt("watches", watches)
[os.close(fd) for fd in room[12:]]
del kept[-40:]
attempt("flights", flights)
print(*said, sep=", ", flush=True)
time.sleep(1000)
"""

PASSES = """
import array, os, socket
a, b = socket.socketpair()
try:
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
    print("passed")
except OSError as error:
    print(os.strerror(error.errno))
"""


@pytest.mark.alone("uses up what the kernel counts for all servers together")
async def test_shared_counters_touch_no_neighbour(pool, beside):
    """One slot takes all that it can of what the kernel counts per user.

    Others: calls, files, terminals, forks as ever.
    """
    async with pool.lease("victim") as victim:
        async with pool.lease("greedy") as greedy:
            begun = await greedy.run(wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": GREEDY}))
            told = await greedy.run(wire.ProcRead(id=begun.id, wait_s=30, until="output"))
            assert b"flights: ETOOMANYREFS" in told.output, told
            passes = (await victim.exec('python3 -c "$CODE"', env={"CODE": PASSES})).output
            assert passes in ("passed\n", "Too many references: cannot splice\n"), passes
            await says(victim, "head -c 150000 /dev/zero | tr '\\0' x | cat | wc -c", "150000\n")
            result = await victim.exec("head -c 180000 /dev/zero | tr '\\0' y; sleep 0.1; echo >&2 told", split=True)
            assert (len(result.stdout), result.stderr) == (180000, "told\n")
            for pty in (False, True):
                process = await victim.run(wire.ProcStart(command="read line; echo got $line; sleep 100", pty=pty))
                await victim.run(wire.ProcWrite(id=process.id, data=b"this\n"))
                async with asyncio.timeout(20):
                    read = wire.ProcRead(id=process.id, wait_s=1, until="output")
                    while b"got this" not in (await victim.run(read)).output:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            await victim.write_file("large", bytes(9_000_000))
            assert len(await victim.read_file("large")) == 9_000_000
            assert (await victim.run(wire.Untar(path="in", data=archive(f=b"x")))).kind == "done"
            async with await victim.snapshot() as snapshot, pool.lease("victim-fork", snapshot=snapshot) as fork:
                await says(fork, "cat in/f; ls", "xin\nlarge\n")
        # and what was taken is back with the release
        async with asyncio.timeout(20):
            while (await victim.exec('python3 -c "$CODE"', env={"CODE": PASSES})).output != "passed\n":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
