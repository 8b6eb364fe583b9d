"""A pool with neighbours at work, beside which attacks run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from pathlib import Path

import pytest_asyncio

from atropos.slots import ExecResult, Process, SlotPool
from atropos.wire import SlotLimits
from tests.backends import Engine
from tests.waiting import SLOWNESS

SECRET = "correct-horse-battery-staple-" + os.urandom(8).hex()
NEIGHBOUR = "neighbour-" + os.urandom(6).hex()
LIMITS = SlotLimits(
    memory_mib=128, pids=64, disk_mib=48, inodes=5000, open_files=512, output_bytes=200_000, wall_s=60 * SLOWNESS
)
PATIENCE_S = 20.0 * SLOWNESS
"""A neighbour's call that takes longer on a loaded machine is a failure; without an attack it takes milliseconds."""
CHECKER = f"""
import array, ctypes, fcntl, os, pty, socket, sys
for line in sys.stdin:
    inotify = ctypes.CDLL(None).inotify_init1(0)
    assert inotify >= 0, "inotify"
    fds = [inotify, *pty.openpty(), os.memfd_create("x"), os.open("/usr/bin/env", os.O_RDONLY)]
    a, b = socket.socketpair()
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
    fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    with a, b, socket.create_connection(("127.0.0.1", 9999), {5 * SLOWNESS}):
        print("sound", flush=True)
    for fd in fds:
        os.close(fd)
"""
"""Tries, for each line that it reads, whether the kernel still gives a program what it needs."""


class Neighbour:
    """Works on in its own slot, and notices when anything there changes or stalls."""

    def __init__(self, slot) -> None:
        self.slot = slot
        self.calls = 0
        self.failure: str | None = None
        self.checker: Process
        self.replaced = False
        """Whether a test has it do other work than its own."""
        self._going = asyncio.Event()
        self.resume = self._going.set
        self.pause = self._going.clear

    async def settle(self) -> None:
        """Put down what attacks look for."""
        program = f"""
import ctypes, os, socket, threading, time
open("/workspace/{NEIGHBOUR}", "w").write("mine")
open("/dev/shm/{NEIGHBOUR}", "w").write("mine")
ctypes.CDLL(None).shmget(0x41545250, 4096, 0o1666)
listeners = []
for address, family in (("\\0{NEIGHBOUR}", socket.AF_UNIX), (("127.0.0.1", 8080), socket.AF_INET), (("127.0.0.1", 9999), socket.AF_INET)):
    s = socket.socket(family)
    s.bind(address)
    s.listen()
    listeners.append(s)
def serve(listener):  # what is not accepted stays in the backlog: 129 connections, and no more are taken
    while True:
        listener.accept()[0].close()
for s in listeners:
    threading.Thread(target=serve, args=(s,), daemon=True).start()
print("settled", flush=True)
time.sleep(100000)
"""
        await self.slot.write_file("settle.py", program)
        result = await self.slot.exec("python3 settle.py > log & until grep -q settled log; do sleep 0.02; done")
        assert result.exit_code == 0, result

    async def _call(self, command: str) -> ExecResult:
        """A call in time.

        The loop stands still while a module uses another one: a time that ran out then says nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                return await self.slot.exec(command)
        async with asyncio.timeout(PATIENCE_S):
            return await self.slot.exec(command)

    async def work(self) -> None:
        for number in itertools.count():
            try:
                await self._going.wait()
                result = await self._call(f"cat {NEIGHBOUR} /dev/shm/{NEIGHBOUR}; echo $(({number} + 1))")
                if result.output != f"minemine{number + 1}\n" or result.exit_code != 0:
                    self.failure = f"a call answered {result}"
                    return
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self.failure = f"a call failed: {type(error).__name__}: {error}"
                return
            self.calls = number + 1
            await asyncio.sleep(0.05)

    async def unharmed(self, since: int) -> None:
        """It has gone on working since, nothing in it has changed, and the kernel still gives it what it needs."""
        async with asyncio.timeout(PATIENCE_S):
            while self.calls <= since and self.failure is None and self._going.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert self.failure is None, self.failure
        await self.checker.write(b"\n")
        found = await self.checker.read(wait_s=PATIENCE_S)
        while found != b"sound\n" and (more := await self.checker.read(wait_s=1)):
            found += more
        assert found == b"sound\n", found.decode()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def pool(tmp_path_factory):
    os.environ["HOST_SECRET"] = SECRET
    engine = Engine("local")
    # Leases outlive modules with an event loop of their own, while which this one stands still.
    config = engine.config(
        slots_per_container=6,
        min_containers=1,
        max_containers=1,
        limits=LIMITS,
        acquire_timeout_s=60 * SLOWNESS,
        lease_ttl_s=3600,
    )
    async with SlotPool(config) as pool:
        yield pool
        stats = pool.stats()
        assert (stats.leased, stats.retired) == (0, 0), repr(pool)
    del os.environ["HOST_SECRET"]
    assert await engine.residue(config) == []


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def secret_file():
    """A file of the host's that anybody on the host may read."""
    path = Path(f"/tmp/atropos-secret-{os.urandom(6).hex()}")
    path.write_text(SECRET)
    yield path
    path.unlink()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def neighbours(pool):
    async with pool.lease("neighbour-1") as one, pool.lease("neighbour-2") as two:
        found = [Neighbour(one), Neighbour(two)]
        await found[0].settle()
        for path in ("/workspace", "/dev/shm"):
            await two.write_file(f"{path}/{NEIGHBOUR}", "mine")
        await two.exec(
            "python3 -m http.server 9999 >/dev/null 2>&1 & until (: > /dev/tcp/127.0.0.1/9999) 2>/dev/null; do sleep 0.02; done"
        )
        for each in found:
            each.checker = await each.slot.start(["python3", "-c", CHECKER])
        workers = [asyncio.create_task(neighbour.work()) for neighbour in found]
        yield found
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


@pytest_asyncio.fixture(loop_scope="session")
async def beside(neighbours):
    """Neighbours work beside the test; asserts, at its end, that they have noticed nothing."""
    since = [neighbour.calls for neighbour in neighbours]
    for neighbour in neighbours:
        if not neighbour.replaced:
            neighbour.resume()
    yield neighbours
    for neighbour, calls in zip(neighbours, since, strict=True):
        await neighbour.unharmed(calls)
    for neighbour in neighbours:  # their calls cost CPU, and the pool outlasts the tests that are beside them
        neighbour.pause()


@pytest_asyncio.fixture(loop_scope="session")
async def attacker(pool, beside):
    """A slot for one attack; afterwards it is usable still, or its release says that it was not clean."""
    async with contextlib.AsyncExitStack() as stack:
        yield await stack.enter_async_context(pool.lease(f"attack-{os.urandom(4).hex()}"))
