"""What asyncio leaves to its users: nothing is lost by a cancellation, no task by its owner; waits and reads are
bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from atropos.aio import RECEIVE_BYTES, Tasks, backoff_s, outlive, race, receive_small, task_group


async def cancelled_while(work) -> asyncio.Task[None]:
    task = asyncio.create_task(outlive(work))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_work_outlives_cancels():
    go, done = asyncio.Event(), []

    async def work():
        await go.wait()
        done.append(True)

    task = await cancelled_while(work())
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_cancellation_and_error_both_show():
    go = asyncio.Event()

    async def work():
        await go.wait()
        raise OSError("disk full")

    task = await cancelled_while(work())
    go.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert task.cancelled()
    assert isinstance(caught.value.__cause__, OSError) or isinstance(caught.value.__context__, OSError)


async def test_plain_error_is_raised():
    async def work():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await outlive(work())


async def test_tasks_end_with_owner(caplog):
    ended = []

    async def work():
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def failing():
        raise OSError("disk full")

    async with Tasks("store") as tasks:
        tasks.spawn(failing(), "sweep")
        with pytest.raises(OSError, match="disk full"):
            await tasks.spawn(failing(), "awaited", awaited=True)
        tasks.spawn(work(), "work")
        await asyncio.sleep(0)
    assert ended == [True]
    assert not tasks
    assert [record.getMessage() for record in caplog.records] == ["store: sweep failed"]


async def test_the_first_to_end_wins():
    gone = []

    async def never():
        try:
            await asyncio.sleep(1000)
        finally:
            gone.append(True)

    async def at_once(value):
        if isinstance(value, Exception):
            raise value
        return value

    assert await race(never(), at_once("won"), never()) == "won"
    assert gone == [True, True]
    with pytest.raises(OSError, match="disk full"):
        await race(at_once("won"), at_once(OSError("disk full")))


def test_waits_double_up_to_bound():
    for attempt, longest in enumerate([0.2, 0.4, 0.8, 1.0, 1.0]):
        assert longest / 2 <= backoff_s(attempt, first_s=0.2, longest_s=1.0) <= longest
    assert backoff_s(10_000, first_s=0.2, longest_s=1.0) <= 1.0


async def test_small_frames_read_little():
    sizes: list[int] = []
    ended = asyncio.Event()

    class Receiver(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            receive_small(transport)

        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))

        def connection_lost(self, exc: Exception | None) -> None:
            ended.set()

    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        end.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):  # more than a bound waits before the first read
        while sent < 2 * RECEIVE_BYTES:
            sent += theirs.send(bytes(2 * RECEIVE_BYTES - sent))
    assert sent > RECEIVE_BYTES
    await asyncio.get_running_loop().connect_accepted_socket(Receiver, ours)
    theirs.close()
    await asyncio.wait_for(ended.wait(), 10)
    assert sum(sizes) == sent
    assert max(sizes) <= RECEIVE_BYTES


async def test_group_error_keeps_cause():
    async def fail():
        raise RuntimeError("no slot") from OSError("refused")

    with pytest.raises(RuntimeError, match="no slot") as failed:
        async with task_group() as tasks:
            tasks.create_task(fail())
    assert str(failed.value.__cause__) == "refused"
