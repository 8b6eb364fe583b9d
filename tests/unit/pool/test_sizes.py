"""Leases of different sizes: who gets room where, and what a pool refuses at once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atropos.errors import ConfigError, LimitTooLarge
from atropos.resources import NOTHING, Resources
from atropos.slots import LeaseLimits, SlotPoolConfig
from atropos.slots.containers.fleet import Fleet
from atropos.slots.containers.scaling import Limits, PoolState, plan
from atropos.slots.containers.seats import Seat, Ticket
from atropos.wire import SlotLimits
from tests.unit.pool.model import SLOT as MODEL_SLOT
from tests.unit.pool.model import model_pool
from tests.waiting import until

SLOT = Resources(memory_mib=10, pids=4)
SIZES = [
    Resources(memory_mib=mib, pids=pids)
    for mib, pids in ((10, 4), (10, 4), (10, 4), (15, 4), (20, 8), (25, 4), (10, 12), (40, 4))
]


class MixedSizes(RuleBasedStateMachine):
    """Leases of one slot and of several: nothing is leased twice, and whoever waits longest is not passed for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(SLOT)
        self.made = 0
        self.seats: list[Seat] = []
        self.line: list[Ticket] = []
        self.granted: list[Ticket] = []
        self.first: Ticket | None = None
        # leases from before the time at which `first` became the longest waiting, or room was lost that was kept for it
        self.before: list[Ticket] = []

    def settle(self) -> None:
        for ticket in self.fleet.match():
            self.line.remove(ticket)
            self.fleet.granted(ticket)
            self.granted.append(ticket)
        first = min((t for t in self.line if t.pin is None), key=lambda t: t.seq, default=None)
        if first is not self.first:
            self.first, self.before = first, list(self.granted)
        self.before = [ticket for ticket in self.before if ticket in self.granted]

    @rule(index=st.integers(0, 5), slots=st.integers(1, 4))
    def join(self, index, slots):
        self.made += 1
        seat = Seat(f"c{self.made}", index)
        self.fleet.join(seat, slots=slots, free=SLOT * slots, now=0)
        self.seats.append(seat)
        self.settle()

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), gone=st.booleans())
    def close(self, data, gone):
        seat = data.draw(st.sampled_from(self.seats))
        stranded = self.fleet.leave(seat) if gone else self.fleet.close(seat)
        self.line = [ticket for ticket in self.line if ticket not in stranded]
        assert not any(ticket.pin is seat for ticket in self.line)
        if gone:
            self.seats.remove(seat)
            self.granted = [ticket for ticket in self.granted if ticket.seat is not seat]
        self.first = None
        self.settle()

    @rule(data=st.data(), pinned=st.booleans(), room=st.sampled_from(SIZES))
    def ask(self, data, pinned, room):
        seats = [s for s in self.seats if s.open and room.fits(s.capacity)]
        pin = data.draw(st.sampled_from(seats)) if pinned and seats else None
        ticket = self.fleet.ticket(pin, room)
        self.fleet.ask(ticket)
        self.line.append(ticket)
        self.settle()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def withdraw(self, data):
        ticket = data.draw(st.sampled_from(self.line))
        self.fleet.withdraw(ticket)
        self.line.remove(ticket)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), clean=st.sampled_from([True, True, True, False]))
    def give_back(self, data, clean):
        ticket = data.draw(st.sampled_from(self.granted))
        self.granted.remove(ticket)
        self.fleet.returned(ticket.seat, ticket.room, clean=clean, now=1)
        if not clean:  # the container counts it as retired
            ticket.seat.retired_room += ticket.room
            self.fleet.counted(ticket.seat, ticket.seat.free)
            self.first = None
        self.settle()

    @invariant()
    def no_container_is_over_committed(self):
        for seat in self.seats:
            used = sum((ticket.room for ticket in self.granted if ticket.seat is seat), NOTHING)
            assert used == seat.leased_room
            assert (seat.free + used + seat.retired_room).fits(seat.capacity)

    @invariant()
    def counts_agree(self):
        assert self.fleet.free == sum(seat.free.holds(SLOT) for seat in self.seats)
        assert self.fleet.waiting_room == sum((ticket.room for ticket in self.line if ticket.pin is None), NOTHING)
        assert self.fleet.waiting + self.fleet.pinned_waiting == len(self.line)
        assert self.fleet.reserved == 0

    @invariant()
    def the_longest_waiting_waits_only_for_leases_from_before_it(self):
        first = self.first
        if first is None or any(seat.kept_for is not None and seat.kept_for.pin for seat in self.seats):
            return
        roomy = [s for s in self.seats if s.open and s.can_hold(first.room)]
        # a pinned lease, which can be had nowhere else, goes before it
        before = self.before or any(ticket.pin is not None or ticket.seq < first.seq for ticket in self.granted)
        assert not roomy or before, "it was passed by leases that came after it"

    @invariant()
    def nobody_waits_beside_room(self):
        for ticket in self.line:
            seats = self.seats if ticket.pin is None else [ticket.pin]
            assert not any(seat.open and seat.has_room(ticket.room) for seat in seats)


MixedSizes.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
test_mixed_sizes = MixedSizes.TestCase


def test_small_leases_starve_no_large_one():
    fleet = Fleet(SLOT)
    one, two = Seat("one", 0), Seat("two", 1)
    for seat in (one, two):
        fleet.join(seat, slots=2, free=SLOT * 2, now=0)
    small = []
    for _ in range(3):
        fleet.ask(fleet.ticket())
        small += fleet.match()
    for ticket in small:
        fleet.granted(ticket)
    large = fleet.ticket(room=SLOT * 2)
    fleet.ask(large)
    assert list(fleet.match()) == []
    assert two.kept_for is large  # the one with the most room
    fleet.returned(one, SLOT, clean=True, now=0)
    fleet.ask(fleet.ticket())
    assert [ticket.seat for ticket in fleet.match()] == [one]
    fleet.ask(behind := fleet.ticket())
    assert list(fleet.match()) == []  # what is free in the kept container is not for it
    fleet.returned(two, SLOT, clean=True, now=0)
    assert [(ticket, ticket.seat) for ticket in fleet.match()] == [(large, two)]
    assert behind.waiting


def test_gpu_lease_reserves_one():
    fleet, seat = Fleet(SLOT, devices=Resources(gpus=1)), Seat("one", 0)
    fleet.join(seat, slots=4, free=SLOT * 4 + Resources(gpus=1), now=0)
    gpu = SLOT + Resources(gpus=1)
    has = asked(fleet, gpu)
    settle(fleet)
    waits, behind = asked(fleet, gpu), asked(fleet, gpu)
    plain = [asked(fleet, SLOT) for _ in range(3)]
    assert list(fleet.match()) == plain[:2]  # the third slot is kept for the GPU's
    for ticket in plain[:2]:
        fleet.granted(ticket)
    fleet.returned(seat, gpu, clean=True, now=0)
    assert list(fleet.match()) == [waits]  # and the last slot is kept for the next one's
    fleet.granted(waits)
    fleet.returned(seat, gpu, clean=True, now=0)
    assert list(fleet.match()) == [behind, plain[2]]
    assert has.seat is seat


def asked(fleet, room):
    fleet.ask(ticket := fleet.ticket(room=room))
    return ticket


def settle(fleet):
    for ticket in fleet.match():
        fleet.granted(ticket)


def test_none_passes_a_large_one():
    fleet = Fleet(SLOT)
    first, second, third = Seat("first", 0), Seat("second", 1), Seat("third", 2)
    fleet.join(first, slots=4, free=SLOT * 4, now=0)
    asked(fleet, SLOT)
    settle(fleet)
    large = asked(fleet, SLOT * 4)
    settle(fleet)
    fleet.join(second, slots=2, free=SLOT, now=0)
    later = asked(fleet, SLOT * 2)
    settle(fleet)
    assert (first.kept_for, second.kept_for) == (large, later)
    fleet.leave(first)
    fleet.join(third, slots=4, free=SLOT * 4, now=0)
    settle(fleet)
    assert (large.seat, later.seat) == (third, None)


def test_older_takes_the_reserved():
    fleet = Fleet(SLOT)
    first, second = Seat("first", 0), Seat("second", 1)
    for seat in (first, second):
        fleet.join(seat, slots=4, free=SLOT * 4, now=0)
    before = [asked(fleet, SLOT * 3), asked(fleet, SLOT * 3)]
    settle(fleet)
    large, later = asked(fleet, SLOT * 4), asked(fleet, SLOT * 2)
    settle(fleet)
    assert (first.kept_for, second.kept_for) == (large, later)
    fleet.leave(first)
    settle(fleet)
    assert second.kept_for is large
    fleet.returned(second, before[1].room, clean=True, now=0)
    settle(fleet)
    assert (large.seat, later.seat) == (second, None)
    fleet.returned(second, large.room, clean=True, now=0)
    settle(fleet)
    assert later.seat is second


def test_unneeded_goes_on():
    fleet = Fleet(SLOT)

    def full(key, index):
        fleet.join(seat := Seat(key, index), slots=4, free=NOTHING, now=0)
        return seat

    def waits_at(seat, room):
        fleet.ask(ticket := fleet.ticket(room=room))
        assert (list(fleet.match()), seat.kept_for) == ([], ticket)
        return ticket

    first = full("first", 0)
    older = waits_at(first, SLOT * 4)
    younger = waits_at(full("second", 1), SLOT * 2)
    third, fourth = full("third", 2), full("fourth", 3)
    fleet.leave(first)
    fleet.counted(third, SLOT * 2)
    fleet.counted(fourth, SLOT * 4)
    assert [(ticket, ticket.seat) for ticket in fleet.match()] == [(older, fourth), (younger, third)]


def test_given_up_goes_on():
    fleet = Fleet(SLOT)
    first, second = Seat("first", 0), Seat("second", 1)
    fleet.join(first, slots=4, free=SLOT * 2, now=0)
    fleet.ask(older := fleet.ticket(room=SLOT * 4))
    assert (list(fleet.match()), first.kept_for) == ([], older)
    fleet.join(second, slots=4, free=SLOT, now=0)
    fleet.ask(younger := fleet.ticket(room=SLOT * 2))
    assert (list(fleet.match()), second.kept_for) == ([], younger)
    fleet.withdraw(older)
    assert [(ticket, ticket.seat) for ticket in fleet.match()] == [(younger, first)]


def test_a_shrunken_container_serves_others():
    fleet = Fleet(SLOT)
    fleet.join(seat := Seat("worn", 0), slots=4, free=SLOT * 2, now=0)
    fleet.ask(large := fleet.ticket(room=SLOT * 4))
    fleet.ask(small := fleet.ticket())
    assert (list(fleet.match()), seat.kept_for) == ([], large)
    seat.retired, seat.retired_room = 1, SLOT
    fleet.counted(seat, SLOT * 2)
    assert [(ticket, ticket.seat) for ticket in fleet.match()] == [(small, seat)]
    fleet.join(whole := Seat("whole", 1), slots=4, free=SLOT * 4, now=0)
    assert [(ticket, ticket.seat) for ticket in fleet.match()] == [(large, whole)]


def test_impossible_holds_up_none():
    fleet = Fleet(SLOT)
    fleet.join(seat := Seat("worn", 0), slots=4, free=SLOT * 3, now=0)
    seat.retired, seat.retired_room = 1, SLOT
    fleet.ask(large := fleet.ticket(room=SLOT * 4))
    fleet.ask(small := fleet.ticket())
    assert list(fleet.match()) == [small]
    fleet.join(whole := Seat("whole", 1), slots=4, free=SLOT * 4, now=0)
    fleet.ask(later := fleet.ticket())
    assert [(ticket, ticket.seat) for ticket in fleet.match()] == [(large, whole), (later, seat)]


def test_scattered_grows_the_pool():
    fleet = Fleet(SLOT)
    for n in range(4):
        fleet.join(Seat(f"c{n}", n), slots=2, free=SLOT, now=0)
    for wanted, containers in ((2, 5), (4, 6)):
        fleet.ask(fleet.ticket(room=SLOT * 2))
        assert list(fleet.match()) == []
        assert fleet.wanted_slots == wanted
        state = PoolState(containers=4, ready=4, waiting=fleet.wanted_slots, needed=4)
        assert plan(state, Limits(1, 8, slots_per_container=2)).target == containers


async def test_those_behind_get_it():
    pool, _ = model_pool(slots=2, containers=1)
    async with pool, pool.lease("holder"):
        large = asyncio.create_task(pool.acquire("large", limits=LeaseLimits(memory_mib=2 * MODEL_SLOT.memory_mib)))
        await until(lambda: pool.stats().waiting == 1, "the large one in line")
        behind = asyncio.create_task(pool.acquire("behind", timeout_s=2))
        await until(lambda: pool.stats().waiting == 2, "both in line")
        large.cancel()
        await (await behind).release()


async def test_large_lease_grows_pool():
    pool, _ = model_pool(slots=2, containers=3, min_containers=2)
    async with pool:
        held = [await pool.acquire(f"t{n}") for n in range(3)]
        await held[0].release()
        large = await pool.acquire("large", limits=LeaseLimits(memory_mib=2 * MODEL_SLOT.memory_mib), timeout_s=2)
        assert large.container not in {slot.container for slot in held}
        await asyncio.gather(*(slot.release() for slot in [*held[1:], large]))


@pytest.mark.parametrize(
    ("asked", "field", "largest"),
    [
        (LeaseLimits(memory_mib=401), "memory_mib", 400),
        (LeaseLimits(pids=101), "pids", 100),
        (LeaseLimits(disk_mib=401), "disk_mib", 400),
    ],
)
async def test_too_large_is_refused(asked, field, largest):
    pool, _ = model_pool(slots=4, containers=1, limits=SlotLimits(memory_mib=100, pids=25))
    async with pool:
        with pytest.raises(LimitTooLarge, match=rf"limits\.{field}: {largest + 1} asked for.*has {largest}") as caught:
            await pool.acquire("t", limits=asked)
    assert isinstance(caught.value, ConfigError)
    assert (caught.value.field, caught.value.asked, caught.value.largest) == (field, largest + 1, largest)


@pytest.mark.parametrize("field", ["memory_mib", "pids"])
def test_members_fit_together(field):
    config = SlotPoolConfig(slots_per_container=4, limits=SlotLimits(memory_mib=64, pids=25))
    each, most = {"memory_mib": (100, 256), "pids": (40, 100)}[field]
    fitting = LeaseLimits(**{field: each}, members=(LeaseLimits(**{field: each}),) * (most // each - 1))
    config.check_room(fitting, 4)
    more = fitting.model_copy(update={"members": (*fitting.members, LeaseLimits(**{field: each}))})
    with pytest.raises(LimitTooLarge, match=rf"limits\.{field}: \d+ asked for.*has {most} .*with its members"):
        config.check_room(more, 4)


def test_refused_size_is_exact():
    refused = str(LimitTooLarge("memory_mib", 1_048_577, 4_194_304.0, "4 slots"))
    assert refused == "limits.memory_mib: 1048577 asked for, the largest container has 4194304 (4 slots)"


def test_lease_takes_at_least_slot():
    config = SlotPoolConfig(limits=SlotLimits(memory_mib=100, pids=20))
    slot = Resources(memory_mib=100, pids=20)
    assert config.room(None) == config.room(LeaseLimits()) == slot
    assert config.room(LeaseLimits(memory_mib=50, pids=10)) == slot
    assert config.room(LeaseLimits(memory_mib=250)) == Resources(memory_mib=250, pids=20)
    assert config.room(LeaseLimits(pids=50)) == Resources(memory_mib=100, pids=50)
    assert config.room(LeaseLimits(cpu_quota=8, disk_mib=90, wall_s=9)) == slot


async def test_forks_have_lease_s_size():
    pool, backend = model_pool(slots=4, containers=1)
    async with pool:
        slot = await pool.acquire("t", limits=LeaseLimits(memory_mib=3000))
        assert (slot.room.memory_mib, pool.stats().free, pool.stats().leased) == (3000, 1, 1)
        waiting = asyncio.create_task(pool.acquire("u", limits=LeaseLimits(memory_mib=2048)))
        await asyncio.sleep(0.05)
        behind = asyncio.create_task(pool.acquire("v"))
        await asyncio.sleep(0.05)
        assert not behind.done()  # first come, first served: the free slot's room is kept
        await slot.release()
        second = await asyncio.wait_for(waiting, 5)
        snapshot = await second.snapshot()
        await asyncio.wait_for(behind, 5)
        await second.release()
        fork = await pool.acquire("w", snapshot=snapshot)
        plain = await pool.acquire("x", snapshot=snapshot, limits=LeaseLimits())
        assert (fork.room.memory_mib, plain.room.memory_mib) == (2048, 1024)
    (server,) = backend.servers.values()
    asked = [request.limits and request.limits.memory_mib for request in server.requests]
    assert asked == [3000, 2048, None, 2048, None]
