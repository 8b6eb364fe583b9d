"""An engine that doesn't answer: what runs goes on, what waits is told in time, and the end of the process waits for
nobody."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from atropos.errors import BackendUnavailable
from atropos.slots.backends.engines import BlockingCalls, Outage, persist
from atropos.slots.backends.nomad.refusals import NomadMisconfigured
from tests.unit.pool.model import model_pool
from tests.waiting import until

GONE = "Nomad does not answer at http://nomad:4646"


@pytest.mark.parametrize(("patience_s", "is_final"), [(3600, False), (0, True)])
def test_ends_after_outage_s(caplog, patience_s, is_final):
    caplog.set_level(logging.WARNING)
    outage = Outage(patience_s=patience_s)
    assert (outage.reason, outage.away_s, outage.failure(), outage.over()) == ("", 0, None, False)
    for _ in range(3):
        outage.noted(BackendUnavailable(GONE))
    final = f"{GONE}; that has been so for longer than outage_s ({patience_s} s): restart the engine, or raise outage_s"
    assert (outage.reason, str(outage.failure())) == (GONE, final if is_final else "None")
    assert outage.over()
    assert (outage.reason, outage.failure()) == ("", None)
    assert [GONE in record.message for record in caplog.records] == [True, False], caplog.messages


def test_wrong_setting_is_none():
    outage = Outage(patience_s=0)
    outage.noted(NomadMisconfigured("NOMAD_TOKEN is no token of the cluster: make one"))
    assert str(outage.failure()).endswith("make one; that has been so for longer than outage_s (0 s)")


async def test_waiters_hear_of_it():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        slot = await pool.acquire("t")
        backend.away = GONE
        backend.fail(BackendUnavailable(f"{GONE}; for good"))
        waiting = asyncio.create_task(pool.acquire("u"))
        await asyncio.sleep(0.02)
        assert (await slot.exec("true")).exit_code == 0
        assert not waiting.done(), "the container may serve it yet"
        assert pool.outage() == ""
        backend.never = True
        backend.vanish(slot.container)
        with pytest.raises(BackendUnavailable, match="for good"):
            await waiting
        with pytest.raises(BackendUnavailable, match="for good"):
            await pool.acquire("v")
        with pytest.raises(BackendUnavailable, match="for good"):
            await pool.wait_for_engine()


async def test_an_outage_is_outlasted():
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        await pool.wait_for_engine()
        backend.never, backend.away = True, GONE
        (key,) = pool.links
        backend.vanish(key)
        await until(lambda: pool.outage() == GONE, "the outage")
        waiting = [asyncio.create_task(pool.wait_for_engine()) for _ in range(2)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting)
        backend.open(0)
        await asyncio.gather(*waiting)
        assert backend.away, "a container is enough"


async def test_unreachable_comes_back(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.ASK_AGAIN_S", 0.02)
    monkeypatch.setattr("atropos.slots.containers.keeper.RELINK_S", 0.02)
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (key,) = pool.links
        server = backend.servers[key]
        backend.refuse_retire = BackendUnavailable(GONE)
        server.kill()  # the way to it is cut
        # while it is tried to connect again, there is no trouble
        again = lambda: len(backend.retired) >= 2 and "could not be replaced" in pool.trouble()  # noqa: E731
        await until(again, "a second try to replace it")
        server.alive = True
        async with pool.lease("t", timeout_s=30) as slot:
            assert slot.container == key
        assert list(pool.links) == [key]


async def test_replacements_are_paced(monkeypatch):
    monkeypatch.setattr("atropos.slots.containers.keeper.ASK_AGAIN_S", 0.1)
    monkeypatch.setattr("atropos.slots.containers.keeper.RELINK_S", 0.02)
    pool, backend = model_pool(slots=1, containers=1)
    async with pool:
        (key,) = pool.links
        backend.refuse_retire = BackendUnavailable(GONE)
        looks = mock.Mock(side_effect=backend.containers)
        monkeypatch.setattr(backend, "containers", looks)
        backend.servers[key].kill()
        await until(lambda: len(backend.retired) >= 3, "a third try to replace it")
        assert looks.call_count < 100


async def test_refused_purge_is_retried():
    tried = 0

    async def action() -> None:
        nonlocal tried
        tried += 1
        raise BackendUnavailable("first" if tried == 1 else "then")

    with pytest.raises(BackendUnavailable, match="then"):
        await persist(action, lambda error: 60 if str(error) == "first" else 0)
    assert tried == 2


def test_hanging_call_lets_exit():
    program = (
        "import asyncio, time\n"
        "from atropos.slots.backends.engines import BlockingCalls\n"
        "async def main():\n"
        "    calls = BlockingCalls('test', at_once=1)\n"
        "    try:\n"
        "        async with asyncio.timeout(0.1): await calls.run(lambda: time.sleep(600), changes=True)\n"
        "    except TimeoutError: await calls.settled(0.1)\n"
        "    print(await calls.run(lambda: 'the next one has its turn'))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("the next one has its turn\n", "")


async def test_cancelled_are_awaited():
    calls, begun, ended = BlockingCalls("test", at_once=2), threading.Event(), []

    def change() -> None:
        begun.set()
        time.sleep(0.1)
        ended.append(True)
        raise OSError("nobody is there to hear it")

    task = asyncio.create_task(calls.run(change, changes=True))
    await until(begun.is_set, "the call")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await calls.settled(10)
    assert ended == [True]
    with pytest.raises(ZeroDivisionError):
        await calls.run(lambda: 1 / 0)
