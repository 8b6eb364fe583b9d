"""Which lease starts a command next (`atropos.sandbox.server.calls.start_queue`)."""

from __future__ import annotations

import asyncio

import pytest

from atropos.sandbox.server.calls import start_queue
from atropos.sandbox.server.calls.start_queue import StartQueue
from atropos.testing.waiting import until


class Lease:
    """Starts its commands as the queue lets it, and writes each down in `log`."""

    def __init__(self, name: str, queue: StartQueue, log: list[str], commands: int = 1, *, since: float = 0.0) -> None:
        self.name, self.queue, self.log, self.left = name, queue, log, commands
        self.started_at = since

    def start_next(self) -> None:
        while self.left and self.queue.admit(self):
            self.left -= 1
            self.queue.started(self, f"{self.name}{self.left}")
            self.log.append(f"{self.name}{self.left}")


@pytest.fixture
def no_limit_of_time(monkeypatch):
    monkeypatch.setattr(start_queue, "STARTING_S", 3600)


@pytest.mark.usefixtures("no_limit_of_time")
async def test_starts_are_bounded():
    queue, log = StartQueue(2), list[str]()
    for name in "abc":
        Lease(name, queue, log).start_next()
    assert log == ["a0", "b0"]
    queue.ended("b0")
    assert log == ["a0", "b0", "c0"]


@pytest.mark.usefixtures("no_limit_of_time")
async def test_longest_waiting_first():
    queue, log = StartQueue(1), list[str]()
    Lease("busy", queue, log, 3).start_next()
    Lease("new", queue, log, since=2.0).start_next()
    Lease("quiet", queue, log, since=1.0).start_next()
    for command in ("busy2", "quiet0", "new0", "busy1"):
        queue.ended(command)
    assert log == ["busy2", "quiet0", "new0", "busy1", "busy0"]


@pytest.mark.usefixtures("no_limit_of_time")
async def test_a_turn_is_for_one_command():
    queue, log = StartQueue(2), list[str]()
    Lease("a", queue, log, 2).start_next()
    Lease("b", queue, log, 2, since=1.0).start_next()
    Lease("c", queue, log, since=2.0).start_next()
    queue.ended("a0")
    queue.ended("a1")
    assert log == ["a1", "a0", "b1", "c0"]


async def test_endless_hold_up_nobody():
    queue, log = StartQueue(1), list[str]()
    for number in range(5):
        Lease(f"{number}.", queue, log).start_next()
    await until(lambda: len(log) == 5)
    assert log == [f"{number}.0" for number in range(5)]


async def test_long_start_frees_its_turn():
    queue, log = StartQueue(1), list[str]()
    Lease("long", queue, log).start_next()
    await asyncio.sleep(2 * start_queue.STARTING_S)
    Lease("next", queue, log).start_next()
    assert log == ["long0", "next0"]


@pytest.mark.usefixtures("no_limit_of_time")
async def test_idle_lease_gives_its_turn():
    queue, log = StartQueue(1), list[str]()
    leases = [Lease(name, queue, log) for name in "abc"]
    for lease in leases:
        lease.start_next()
    leases[1].left = 0
    queue.ended("a0")
    assert log == ["a0", "c0"]


@pytest.mark.usefixtures("no_limit_of_time")
async def test_never_started_may_end():
    queue, log = StartQueue(1), list[str]()
    Lease("a", queue, log).start_next()
    Lease("b", queue, log).start_next()
    queue.ended("b0")
    assert log == ["a0"]
