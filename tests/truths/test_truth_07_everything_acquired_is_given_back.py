"""Truth 7: a dead client's leases end within twice their TTL, a dead container's slots are gone at once, a cancelled
acquire leaks nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from atropos.errors import SandboxError
from atropos.slots import SlotPoolConfig
from atropos.slots.backends.local.backend import make_scratch, remove_scratch
from atropos.slots.backends.local.server_process import ServerProcess
from atropos.slots.client import SandboxClient
from atropos.wire import LeaseRequest
from tests.faults.proxy import proxied
from tests.processes import descendants, running
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOST = """
import asyncio
import signal
from atropos.errors import SandboxError
from atropos.slots import SlotPool, SlotPoolConfig

def interrupt(*_):
    raise KeyboardInterrupt

async def main():
    async with SlotPool(SlotPoolConfig(slots_per_container=1, max_containers=1)) as pool, pool.lease("t") as slot:
        signal.signal(signal.SIGTERM, interrupt)
        print("working", flush=True)
        try:
            await slot.exec(f"sleep {1000 + 7}")
        finally:
            try:
                await slot.exec("true")
            except SandboxError as error:
                print(type(error).__name__, flush=True)

asyncio.run(main())
"""
"""Ends its event loop on SIGTERM as Harbor does: asyncio then cancels all tasks, the pool's own too, and waits for
them."""


async def trainer(mark: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.truths.trainer",
        mark,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    assert line.startswith(b"working"), (await process.stderr.read()).decode()
    return process


@pytest.mark.alone("compares times")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_an_ended_trainer_leaves_no_process(engine, number):
    before = set(descendants())
    mark = str(1_000_000 + secrets.randbelow(1_000_000))
    process = await trainer(mark)
    try:
        await until(lambda: sum(mark in line for line in descendants().values()) >= 6, "slots at work")
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    await until(lambda: not descendants(but=before), "the end of every process of it")
    await process.communicate()  # which closes its pipes


async def test_a_broken_event_loop_ends(engine):
    before = set(descendants())
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, stdout=asyncio.subprocess.PIPE)
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"working\n"
        await until(lambda: running("sleep 1007"), "a program in the slot")
        process.send_signal(signal.SIGTERM)
        said, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert said in {b"OutcomeUnknown\n", b"SlotLost\n", b""}  # none: raised in the call itself, before the loop went on
    await until(lambda: not descendants(but=before), "the end of every process of it")


async def test_next_pool_removes_it(engine, local_pool):
    process = await trainer("1234567")
    scratch = list(Path(tempfile.gettempdir()).glob(f"atropos-{process.pid}-*"))
    assert scratch
    process.kill()
    await process.wait()
    await until(lambda: not any("1234567" in line for line in descendants().values()), "the end of its servers")
    await process.communicate()  # which closes its pipes
    async with local_pool():
        pass
    # a pool of another process may be removing it just now
    await until(lambda: not any(path.exists() for path in scratch), "the end of what it left")


async def test_dead_client_s_leases_end():
    ttl_s = 4.0  # whoever is alive says so in it, also on a machine that is busy for seconds
    scratch = make_scratch()
    config = SlotPoolConfig(slots_per_container=2).server_config("token", state_dir=str(scratch), heartbeat_s=0.3)
    server = await ServerProcess.start(config)
    try:
        await server.ready(60)
        url = f"http://127.0.0.1:{server.port}"
        async with SandboxClient(url, "token", client_id="watcher") as watcher, proxied(server.port) as proxy:
            dying = SandboxClient(proxy.url, "token", client_id="dying")
            await dying.connect()
            lease = await dying.acquire(LeaseRequest(lease_id="lease-0001", client_id="dying", ttl_s=ttl_s))
            await asyncio.sleep(1.25 * ttl_s)  # alive, it keeps its lease past the TTL
            assert (await watcher.status()).leased == 1
            await proxy.close()  # its stream ends and nothing is said, as after kill -9
            began = asyncio.get_running_loop().time()
            while (await watcher.status()).leased:
                assert asyncio.get_running_loop().time() < began + 2 * ttl_s + 5
                await asyncio.sleep(0.05)
            newer = await watcher.acquire(LeaseRequest(lease_id="lease-0002", client_id="watcher"))
            assert newer.epoch > lease.epoch
            await watcher.release(newer)
            await dying.close()
    finally:
        await server.stop(5)
        remove_scratch(scratch)
    assert not scratch.exists()


async def test_kill_at_start_leaves_none(engine):
    before = set(descendants())
    scratch = make_scratch()
    for n in range(3):
        folder = scratch / str(n)
        folder.mkdir()
        config = SlotPoolConfig(slots_per_container=8).server_config("token", state_dir=str(folder))
        server = await ServerProcess.start(config)
        await until(
            lambda: any("atropos-runner" in line for line in descendants(but=before).values()), "a slot that starts"
        )
        await asyncio.sleep(n * 0.07)
        os.kill(server.pid, signal.SIGKILL)
        await server.stop(0)
        await until(lambda: not descendants(but=before), "the end of every process of it")
    remove_scratch(scratch)


async def test_dead_are_replaced(local_pool, engine):
    async with local_pool(slots_per_container=2, max_containers=2, min_containers=2) as pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        victim = slots[0].container
        await engine.signal(victim, signal.SIGKILL)
        await until(lambda: all(slot.lost for slot in slots if slot.container == victim), "the loss")
        for slot in slots:
            if slot.container == victim:
                with pytest.raises(SandboxError):
                    await slot.exec("true")
            else:
                assert (await slot.exec("true")).ok
            await slot.release()
        await until(lambda: pool.stats().free == 4, "four free slots again")


async def all_are_free(pool) -> None:
    """Each of the four slots, by the word of the pool and of the server."""
    await until(lambda: pool.stats().free == 4, "four slots free")
    (link,) = pool.links.values()
    assert (await link.client.status()).leased == 0


async def test_cancels_leak_no_slot(shared_pool):
    for n in range(60):
        task = asyncio.create_task(shared_pool.acquire("t"))
        await asyncio.sleep(n * 0.0002)
        task.cancel()
        try:
            await (await task).release()
        except asyncio.CancelledError:
            pass
    await all_are_free(shared_pool)


async def test_unsendable_takes_no_slot(shared_pool):
    with pytest.raises(ValueError, match="trajectory_id"):
        await shared_pool.acquire("item-\udcff")
    await all_are_free(shared_pool)


async def test_cancelled_release_happens(shared_pool):
    for n in range(20):
        slot = await shared_pool.acquire("t")
        task = asyncio.create_task(slot.release())
        await asyncio.sleep(n * 0.0005)
        task.cancel()
        await asyncio.wait([task])
    await all_are_free(shared_pool)


async def left_in_tmp(slot):
    return (await slot.exec("ls -A /tmp", concurrent=True)).output.split()


@pytest.mark.parametrize("user", [None, "1:1"])
async def test_long_input_leaves_no_file(local_pool, user):
    async with local_pool(limits={"disk_mib": 32}) as pool, pool.lease("t") as slot:
        too_long = bytes(40 << 20)
        assert (await slot.exec("wc -c", stdin=too_long, user=user)).error.startswith("no_space")
        assert await left_in_tmp(slot) == []

        began = asyncio.create_task(slot.exec("touch /dev/shm/began; sleep 1000", stdin=bytes(8 << 20), user=user))
        while not (await slot.exec("test -e /dev/shm/began", concurrent=True)).ok:
            assert not began.done()
        assert len(await left_in_tmp(slot)) == 1
        began.cancel()
        await asyncio.wait([began])
        async with asyncio.timeout(10 * SLOWNESS):
            while await left_in_tmp(slot):
                pass
        assert began.cancelled()


async def test_stop_in_use_leaves_none(local_pool):
    async with local_pool(slots_per_container=4, max_containers=2) as pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(8)))
        calls = [asyncio.create_task(slot.exec("exec sleep 1007")) for slot in slots]
        await until(lambda: running("sleep 1007") >= 8, "a program in each slot")
        await pool.stop()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, SandboxError) for result in results)
