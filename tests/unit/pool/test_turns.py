"""Turns: nobody waits for more of another share's than one of its turns, nor for its turns that never end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection

import pytest

from atropos.slots import Quotas, Share
from atropos.slots.pool.turns import Turns
from tests.waiting import until


class Line:
    """Those that want a turn, each of which ends when it is told to."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, name: str, *shares: Share) -> set[Share]:
        wanted_by = set(shares)
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, wanted_by))
        await asyncio.sleep(0)
        return wanted_by

    async def _work(self, name: str, wanted_by: Collection[Share]) -> None:
        async with self.turns.turn(wanted_by):
            self.began.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def line(most: int, each: int) -> AsyncGenerator[Line]:
    """All turns are free again at the end."""
    made = Line(Turns(most, each))
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    assert repr(made.turns) == f"<Turns free={most} waiting=0>"


async def test_the_next_is_whose_share_has_least():
    small, large = Share(), Share()
    async with line(2, 2) as wanted:
        for number in range(20):
            await wanted.come(f"large {number}", large)
        await wanted.come("small", small)
        assert wanted.began == ["large 0", "large 1"]
        await wanted.end("large 0")
        assert wanted.began[2:] == ["small"]
        await wanted.end("large 1")
        assert wanted.began[3:] == ["large 2"]


async def test_all_shares_take_turns():
    """Also where there are more of them than turns."""
    shares = [Share() for _ in range(4)]
    async with line(1, 1) as wanted:
        for number, share in enumerate(shares):
            for time in range(3):
                await wanted.come(f"{number} {time}", share)
        for done in range(12):
            await wanted.end(wanted.began[done])
        assert [name[0] for name in wanted.began] == ["0", "1", "2", "3"] * 3


async def test_one_share_never_has_all():
    hung, other = Share(), Share()
    async with line(3, 2) as wanted:
        for number in range(5):
            await wanted.come(f"hung {number}", hung)
        assert wanted.began == ["hung 0", "hung 1"]
        await wanted.come("other", other)
        assert wanted.began[2:] == ["other"]


async def test_weight_counts():
    heavy, light = Share(Quotas(weight=3)), Share()
    async with line(4, 4) as wanted:
        for number in range(4):
            await wanted.come(f"first {number}", Share())
        for number in range(4):
            await wanted.come(f"light {number}", light)
            await wanted.come(f"heavy {number}", heavy)
        for number in range(4):
            await wanted.end(f"first {number}")
        assert sorted(name[:5] for name in wanted.began[4:]) == ["heavy"] * 3 + ["light"]


async def test_what_another_wants_too_is_its_own():
    large, small = Share(), Share()
    async with line(1, 1) as wanted:
        for number in range(3):
            last = await wanted.come(f"large {number}", large)
        last.add(small)
        await wanted.end("large 0")
        assert wanted.began[1:] == ["large 2"]


@pytest.mark.parametrize("when", ["waiting", "at its turn", "at work"])
async def test_cancelled_ones_leave_their_turn(when: str):
    share = Share()
    async with line(1, 1) as wanted:
        await wanted.come("first", share)
        await wanted.come("second", share)
        await wanted.come("third", share)
        if when == "waiting":
            wanted.tasks["second"].cancel()
            await wanted.end("first")
        elif when == "at work":
            await wanted.end("first")
            wanted.tasks["second"].cancel()
        else:
            wanted._ends["first"].set()
            await asyncio.sleep(0)
            wanted.tasks["second"].cancel()
        await until(lambda: "third" in wanted.began)
