"""Sync calls in reward functions wait without blocking the loop, and behave as awaits do."""

import asyncio
import contextvars

import pytest

from atropos.envs.hermes.bridge import bridged, in_bridge, wait
from tests.waiting import until


async def after(seconds, value):
    await asyncio.sleep(seconds)
    return value


async def test_sync_and_async_waits_mix():
    async def reward():
        first = wait(after(0.001, 1))
        second = await after(0.001, 2)
        third = wait(asyncio.ensure_future(after(0, 3)))
        await asyncio.sleep(0)
        return [first, second, third, in_bridge()]

    assert await bridged(reward) == [1, 2, 3, True]
    assert await bridged(lambda: wait(after(0, 4))) == 4
    assert await bridged(lambda: 5) == 5
    assert not in_bridge()


async def test_errors_pass_both_ways():
    async def failing():
        await asyncio.sleep(0)
        raise KeyError("x")

    async def reward():
        with pytest.raises(KeyError):
            wait(failing())
        with pytest.raises(KeyError):
            await failing()
        raise LookupError("out")

    with pytest.raises(LookupError, match="out"):
        await bridged(reward)


async def test_waiting_leaves_the_loop_free():
    waiting, over = [], asyncio.Event()

    async def held(number):
        waiting.append(number)
        await over.wait()
        return number

    async def run(number):
        return await bridged(lambda: wait(held(number)))

    running = [asyncio.create_task(run(number)) for number in range(50)]
    await until(lambda: len(waiting) == 50, "all of them at once")
    over.set()
    assert await asyncio.gather(*running) == list(range(50))


async def test_a_cancellation_reaches_finally():
    seen = []

    async def reward():
        try:
            wait(after(60, None))
        finally:
            seen.append("sync")

    async def patient():
        try:
            await after(60, None)
        except asyncio.CancelledError:
            seen.append("async")
            raise

    for function in (reward, patient):
        task = asyncio.create_task(_run(function))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert seen == ["sync", "async"]


async def _run(function):
    return await bridged(function)


async def test_bridges_may_be_nested():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("outer")

    async def inner():
        assert variable.get() == "outer"
        return wait(after(0.001, "inner"))

    async def reward():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):  # noqa: ASYNC100 (the wait is inside wait())
                wait(after(60, None))
        return [wait(bridged(inner)), await bridged(inner), variable.get()]

    assert await bridged(reward) == ["inner", "inner", "outer"]


async def test_outside_it_says_what_is_wrong():
    with pytest.raises(RuntimeError, match="bridged"):
        wait(after(0, 1))


async def test_abandoned_bridge_is_closed():
    closed = []

    async def reward():
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    run = _run(reward)
    run.send(None)
    run.close()
    assert closed == [True]
