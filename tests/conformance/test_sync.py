"""`atropos.slots.sync`: the names of `atropos.slots`, as calls that block. Real slots of this machine."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from atropos import slots
from atropos.errors import AcquireTimeout, ConfigError, LeaseExpired
from atropos.slots import sync
from tests.engines import pool_config
from tests.processes import running
from tests.waiting import SLOWNESS, until

INTERNAL = {
    "Slot": {
        "end",
        "start_release",
        "lease",
        "limits",
        "limits_reached",
        "link",
        "network",
        "room",
        "ticket",
        "trajectory_id",
    },
    "Snapshot": {"add", "bring", "pin", "places", "start_drop", "info", "limits", "state", "stays_because", "ticket"},
    "SlotPool": {"architecture", "bound_frames", "building", "links", "share"},
    "Process": set[str](),
    "PortForward": {"ended"},
}
"""What is the pool's own, or a builder's."""
SECONDS = "3600.7531"
PROGRAM = f"""
import sys
from atropos.slots import SlotPoolConfig
from atropos.slots.sync import SlotPool

pool = SlotPool(SlotPoolConfig(backend="local", slots_per_container=1, start_timeout_s={60 * SLOWNESS}))
pool.start()
slot = pool.acquire("a")
try:
    slot.exec("sleep " + sys.argv[1])
except KeyboardInterrupt:
    print(slot.exec("pgrep -c sleep").output, flush=True)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[sync.SlotPool]:
    with sync.SlotPool(pool_config("local", max_containers=1)) as pool:
        yield pool


def names(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", INTERNAL)
def test_every_name_is_there(name: str) -> None:
    awaited, blocking = getattr(slots, name), getattr(sync, name)
    assert names(awaited) - INTERNAL[name] <= names(blocking)
    for method in names(blocking) & names(awaited) - {"acquire", "lease"}:
        function = getattr(blocking, method)
        if inspect.isfunction(function):
            assert (
                inspect.signature(function).parameters.keys()
                == inspect.signature(getattr(awaited, method)).parameters.keys()
            )
            assert not inspect.iscoroutinefunction(function)


def test_works_without_a_loop(pool: sync.SlotPool) -> None:
    with pool.lease("a") as slot:
        slot.write_file("a.bin", b"\x00")
        assert slot.exec("echo hi").output == "hi\n"
        process = slot.start("echo one; sleep 0.1; echo two >&2", split=True)
        assert b"".join(process.output()) == b"one\n"
        assert process.wait() == 0
        assert process.errors is not None
        assert b"".join(process.errors.output()) == b"two\n"
        assert [one.id for one in slot.processes()][:1] == [process.id]
        assert pool.stats().leased == 1
    with pytest.raises(LeaseExpired):
        slot.exec("true")


def test_forks_start_from_snapshot(pool: sync.SlotPool) -> None:
    with pool.lease("a") as slot:
        slot.write_file("a.bin", b"\x00")
        with slot.snapshot() as snapshot, pool.lease("b", snapshot=snapshot) as fork:
            assert fork.read_file("a.bin") == b"\x00"


def test_a_port_is_forwarded(pool: sync.SlotPool) -> None:
    with pool.lease("a") as slot:
        slot.start("exec python3 -m http.server 8000")
        with sync.PortForward.to_slot(slot, 8000) as forward:
            deadline = time.monotonic() + 30 * SLOWNESS
            while True:
                try:
                    answer = httpx.get(f"http://127.0.0.1:{forward.port}/")
                    break
                except httpx.TransportError:
                    assert time.monotonic() < deadline
            assert answer.status_code == 200


def test_threads_share_a_pool(pool: sync.SlotPool) -> None:
    def work(number: int) -> str:
        with pool.lease(f"t{number}") as slot:
            return slot.exec(f"echo {number}").output

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(16))) == [f"{number}\n" for number in range(16)]


def test_errors_arrive(pool: sync.SlotPool) -> None:
    with pytest.raises(ConfigError, match="base: 'x'"):
        pool.acquire("a", base="x")
    with pool.lease("a"), pool.lease("b"), pytest.raises(AcquireTimeout):
        pool.acquire("c", timeout_s=0.01)


async def test_ctrl_c_leaves_nothing() -> None:
    command = (sys.executable, "-c", PROGRAM, SECONDS)
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await until(lambda: running(f"sleep {SECONDS}") > 0, "the call to run")  # a child of the program has its arguments
    program.send_signal(signal.SIGINT)
    assert await program.communicate() == (b"0\n\n", None)
    assert program.returncode == 0
    await until(lambda: running(SECONDS) == 0, "the end of all that it started")
