"""What neighbours feel of each attack: their p99 stays within 3 times its quiet value beside bombs, 2 times beside the
rest.

How it is told on a machine that is busy with other things: `tests.security.calm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import itertools
import os
import tarfile
import time
from pathlib import Path

import pytest
import pytest_asyncio

from tests.repeats import TIMES
from tests.security import programs
from tests.security.calm import Clock, Control, Watch
from tests.security.conftest import NEIGHBOUR
from tests.security.test_attack_programs import source

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone("compares times")]
REST = {**programs.ESCAPE, **programs.NEIGHBOURS}
FEW = (
    "fork_without_end",
    "memory_without_end",
    "fill_every_file_system",
    "burn_every_core",
    "wake_each_other_without_end",
    "sleep_for_moments_without_end",
    "pipe_buffers_without_end",
    "inotify_without_end",
    "orphans_and_zombies_without_end",
)
BOMBS = programs.BOMBS if TIMES > 1 else FEW
"""Each takes about five seconds: CI times one of each kind, `ATROPOS_FAULTS=2` all (what they can do is tried in any
case)."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watch(pool, neighbours, tmp_path_factory):
    """The neighbours' work meanwhile, on a schedule."""
    control = Control(tmp_path_factory.mktemp("control"))
    clocks = [Clock() for _ in neighbours]

    numbers = itertools.count()

    async def call(neighbour) -> None:
        number = next(numbers)
        result = await neighbour.slot.exec(f"read a < {NEIGHBOUR}; echo ${{a}}{number}")
        assert result.output == f"mine{number}\n", result

    for neighbour in neighbours:
        neighbour.replaced = True
    tasks = [
        asyncio.create_task(clock.keep(lambda neighbour=neighbour: call(neighbour)))
        for clock, neighbour in zip(clocks, neighbours, strict=True)
    ]
    try:
        yield Watch(clocks, control, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for neighbour in neighbours:
            neighbour.replaced = False
        control.end()


@pytest.mark.parametrize("name", BOMBS)
async def test_quick_beside_a_bomb(watch, attacker, pool, secret_file, name):
    text = source(attacker, programs.BOMBS[name], secret_file)

    async def attack(until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            await attacker.exec("exec python3 -I -", stdin=text, timeout_s=max(0.05, left))
        await attacker.quiesce()

    print(name, await watch.within(3, attack))
    result = await attacker.exec("echo usable")
    assert (result.exit_code, result.output) == (0, "usable\n"), result


async def test_beside_attacks(watch, attacker, pool, secret_file):
    texts = itertools.cycle([source(attacker, body, secret_file) for body in REST.values()])

    async def attack(until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            await attacker.exec("exec python3 -I -", stdin=next(texts), timeout_s=max(0.05, left))
        await attacker.quiesce()

    for _ in range(5):  # so that every program has its turn
        print(await watch.within(2, attack))


async def test_quick_beside_tricks(watch, attacker, pool, secret_file):
    texts = itertools.cycle([source(attacker, body, secret_file) for body in programs.TRICKS.values()])

    async def attack(until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            await attacker.exec("exec python3 -I -", stdin=next(texts), timeout_s=max(0.05, min(0.3, left)))
            await attacker.quiesce()

    for _ in range(3):
        print(await watch.within(3, attack))


async def floods_output(slot, pool) -> None:
    await slot.exec("exec head -c 100000000 /dev/zero")


async def answers_as_much_as_it_may(slot, pool) -> None:
    await slot.exec("exec head -c 200000 /dev/urandom")


async def is_cancelled_again_and_again(slot, pool) -> None:
    task = asyncio.create_task(slot.exec("sleep 1000"))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])


async def leases_and_leaves_a_full_slot(slot, pool) -> None:
    async with pool.lease(f"churn-{os.urandom(4).hex()}") as other:
        await other.exec(
            "mkdir -p a; for i in $(seq 500); do echo > a/$i; done; (setsid sleep 1000 &); head -c 9999999 /dev/zero > big"
        )


async def freezes_and_forks(slot, pool) -> None:
    async with pool.lease(f"origin-{os.urandom(4).hex()}") as origin:
        snapshot = await origin.snapshot()
        async with pool.lease(f"fork-{os.urandom(4).hex()}", snapshot=snapshot) as fork:
            await fork.exec("echo hi")
        await snapshot.drop()


async def hangs_until_its_time_is_over(slot, pool) -> None:
    result = await slot.exec("trap '' TERM INT HUP; while :; do sleep 1000; done", timeout_s=0.2)
    assert result.timed_out


def refused_archive() -> bytes:
    """4,000 files and 8 MB to unpack, and at the end what no server exported: nothing of it is kept."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, size in (("0/big", 8_000_000), *((f"0/f{number}", 100) for number in range(4000)), ("0/../evil", 1)):
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    return out.getvalue()


def send_archive(url: str, token: str, archive: bytes) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-tar"}
    with contextlib.suppress(ConnectionError):  # refused while it is sent
        connection.request("PUT", f"/v1/snapshots/snap-{os.urandom(6).hex()}/archive?layers=1", archive, headers)
        assert connection.getresponse().status == 400
    connection.close()


async def is_sent_archives_to_import(slot, pool) -> None:
    (link,) = pool.links.values()
    sending = [asyncio.to_thread(send_archive, link.container.url, link.container.token, ARCHIVE) for _ in range(8)]
    await asyncio.gather(*sending)


ARCHIVE = refused_archive()
CALLS = [floods_output, answers_as_much_as_it_may, is_cancelled_again_and_again, leases_and_leaves_a_full_slot, freezes_and_forks,
         hangs_until_its_time_is_over, is_sent_archives_to_import]  # fmt: skip


@pytest.mark.parametrize("use", CALLS, ids=lambda use: use.__name__)
async def test_beside_bad_use(watch, attacker, pool, use):
    async def attack(until: float) -> None:
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < until:
                await use(attacker, pool)
        await attacker.quiesce()

    bound = 5 if use is is_sent_archives_to_import else 3  # work of the server's own, by whoever holds its token
    print(use.__name__, await watch.within(bound, attack))


async def test_afterwards_every_slot_can_be_used(pool):
    stats = pool.stats()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(6 - stats.leased - stats.retired):
            slot = await stack.enter_async_context(pool.lease(f"afterwards-{number}"))
            assert (await slot.exec("echo usable")).output == "usable\n"


async def test_server_memory_stays_flat(pool, attacker, secret_file):
    """Every bomb once more, after all of them have run before: the server holds no more than then."""
    (link,) = pool.links.values()
    pid = int(link.container.id.partition("-")[0])

    def mib() -> float:
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024

    async def everything() -> None:
        for body in programs.BOMBS.values():
            await attacker.exec("exec python3 -I -", stdin=source(attacker, body, secret_file), timeout_s=0.2)
            await attacker.quiesce()

    before = mib()
    await everything()
    assert mib() <= before + 8, (before, mib())
