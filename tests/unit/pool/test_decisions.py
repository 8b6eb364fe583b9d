"""The decisions without I/O: scaling, and who gets which slot."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atropos.resources import NOTHING, Resources
from atropos.slots.containers.fleet import Fleet
from atropos.slots.containers.scaling import Limits, Plan, PoolState, plan, worn_out
from atropos.slots.containers.seats import Seat

SLOT = Resources(memory_mib=1024, pids=256)

counts = st.integers(0, 50)
limits = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 16)).map(
    lambda t: Limits(min_containers=min(t[0], t[1]), max_containers=max(t[0], t[1], 1), slots_per_container=t[2])
)


@given(
    st.builds(PoolState, containers=counts, ready=counts, waiting=counts, needed=counts, closing=counts, late=counts),
    limits,
)
def test_plan_is_within_bounds(state, bounds):
    planned = plan(state, bounds)
    target = planned.target
    assert bool(planned.reason) == (target != state.containers)
    if target > state.containers:
        assert target <= bounds.max_containers
        enough = (target - state.containers) * bounds.slots_per_container
        assert enough - bounds.slots_per_container < state.waiting or target == bounds.min_containers
    if target < state.containers:
        assert state.waiting == 0
        assert target >= max(bounds.min_containers, min(state.needed, state.containers))


@pytest.mark.parametrize(
    ("state", "target"),
    [
        (PoolState(containers=1, ready=1, waiting=1, needed=1), 2),
        (PoolState(containers=1, ready=1, waiting=9, needed=1), 4),
        (PoolState(containers=2, ready=1, waiting=4, needed=1), 2),  # what comes is enough
        (PoolState(containers=2, ready=1, waiting=5, needed=1), 3),
        (PoolState(containers=1, ready=0, waiting=1, needed=1, closing=1), 2),  # a draining one gives nothing
        (PoolState(containers=1, ready=1, waiting=999, needed=1), 5),
        (PoolState(containers=5, ready=5, waiting=0, needed=2), 2),
        (PoolState(containers=5, ready=4, waiting=0, needed=2), 5),  # not while one is coming
        (PoolState(containers=5, ready=4, waiting=0, needed=2, late=1), 2),  # it has no place
        (PoolState(containers=5, ready=3, waiting=0, needed=2, late=1), 5),
        (PoolState(containers=5, ready=5, waiting=0, needed=0), 1),
        (PoolState(containers=0, ready=0, waiting=0, needed=0), 1),
    ],
)
def test_plans_by_example(state, target):
    assert plan(state, Limits(min_containers=1, max_containers=5, slots_per_container=4)).target == target


def test_closing_keeps_no_others():
    state = PoolState(containers=3, ready=2, closing=1, waiting=0, needed=1)
    bounds = Limits(min_containers=1, max_containers=5, slots_per_container=4, idle_s=60)
    assert plan(state, bounds) == Plan(1, "2 idle for 60 s")


def worn(key, retired, **fields):
    return Seat(key, 0, slots=4, **{"open": True, "retired": retired, "leased": 4 - retired} | fields)


@pytest.mark.parametrize(
    ("state", "seats", "key"),
    [
        ({}, [worn("a", 0), worn("b", 1), worn("c", 2)], "c"),
        ({}, [worn("a", 1, leased=3), worn("b", 1, leased=1)], "b"),  # the sooner empty one
        ({}, [worn("a", 0), worn("b", 0)], None),
        ({}, [worn("a", 2, pins=1), worn("b", 1)], "b"),  # its snapshots would be lost
        ({}, [worn("a", 2, open=False), worn("b", 0)], None),
        ({"closing": 1, "ready": 1}, [worn("a", 2)], None),  # one at a time
        ({"ready": 1}, [worn("a", 2)], None),  # another container is coming
        ({"containers": 1, "ready": 1}, [worn("a", 2)], None),  # there may be one more: it is asked for instead
        ({"waiting": 0}, [worn("a", 2)], None),
    ],
)
def test_missed_retired_slots_are_replaced(state, seats, key):
    state = PoolState(**{"containers": 2, "ready": 2, "waiting": 1, "needed": 2} | state)
    seat = worn_out(state, Limits(min_containers=1, max_containers=2, slots_per_container=4), seats)
    assert (seat and seat.key) == key


class FleetMachine(RuleBasedStateMachine):
    """The fleet against a naive model that keeps plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(SLOT)
        self.made = 0
        self.seats: list[Seat] = []
        self.line: list = []  # waiting tickets, in order
        self.reserved: list = []
        self.leases: list[Seat] = []
        self.free: dict[Seat, int] = {}

    def settle(self) -> None:
        for ticket in self.fleet.match():
            seat = ticket.seat
            earlier = [t for t in self.line if t.seq < ticket.seq and (t.pin is None or t.pin is seat)]
            assert not earlier, "somebody who came first could have had this slot"
            if ticket.pin is None:
                assert seat.index == min(s.index for s in self.seats if s.open and self.free[s] > 0)
            else:
                assert seat is ticket.pin
            self.free[seat] -= 1
            self.line.remove(ticket)
            self.reserved.append(ticket)
        for ticket in self.line:
            assert not any(n > 0 for s, n in self.free.items() if ticket.pin in (None, s)), "a slot lies idle"

    @rule(index=st.integers(0, 5), slots=st.integers(1, 4))
    def join(self, index, slots):
        self.made += 1
        seat = Seat(f"c{self.made}", index)
        self.fleet.join(seat, slots=slots, free=SLOT * slots, now=0)
        self.seats.append(seat)
        self.free[seat] = slots
        self.settle()

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), gone=st.booleans())
    def close(self, data, gone):
        seat = data.draw(st.sampled_from(self.seats))
        stranded = self.fleet.leave(seat) if gone else self.fleet.close(seat)
        assert sorted(t.seq for t in stranded) == [t.seq for t in self.line if t.pin is seat]
        self.line = [t for t in self.line if t.pin is not seat]
        self.free.pop(seat, None)
        if gone:
            self.seats.remove(seat)
            self.leases = [s for s in self.leases if s is not seat]

    @rule(data=st.data(), pinned=st.booleans())
    def ask(self, data, pinned):
        open_seats = [s for s in self.seats if s.open]
        pin = data.draw(st.sampled_from(open_seats)) if pinned and open_seats else None
        ticket = self.fleet.ticket(pin)
        self.fleet.ask(ticket)
        self.line.append(ticket)
        self.settle()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def withdraw(self, data):
        ticket = data.draw(st.sampled_from(self.line))
        self.fleet.withdraw(ticket)
        self.fleet.withdraw(ticket)
        self.line.remove(ticket)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), how=st.sampled_from(["granted", "cancelled", "refused", "abandoned"]))
    def answer(self, data, how):
        ticket = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(ticket)
        seat = ticket.seat
        here = seat in self.seats
        if how == "granted":
            self.fleet.granted(ticket)
            if here:
                self.leases.append(seat)
        elif how == "cancelled":
            self.fleet.cancel_reservation(ticket)
            if here and seat.open:
                self.free[seat] += 1
        elif how == "refused":
            self.fleet.refused(ticket, free=NOTHING)
            if here and seat.open:
                self.free[seat] = 0
            if ticket.pin is None or seat.open:
                self.fleet.ask(ticket)
                self.line = sorted([*self.line, ticket], key=lambda t: t.seq)
        else:
            self.fleet.abandon_reservation(ticket)
        self.settle()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), clean=st.booleans())
    def give_back(self, data, clean):
        seat = data.draw(st.sampled_from(self.leases))
        self.leases.remove(seat)
        self.fleet.returned(seat, SLOT, clean=clean, now=1)
        if clean and seat.open:
            self.free[seat] += 1
        self.settle()

    @invariant()
    def counts_agree(self):
        assert self.fleet.free == sum(self.free.values()) == sum(s.free.holds(SLOT) for s in self.seats)
        assert self.fleet.leased == len(self.leases)
        assert self.fleet.waiting + self.fleet.pinned_waiting == len(self.line)
        assert self.fleet.ready == sum(s.open for s in self.seats)
        assert self.fleet.reserved == sum(s.reserved for s in self.seats)


FleetMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_the_fleet_does_as_the_naive_model = pytest.mark.slow("large input")(FleetMachine.TestCase)


@pytest.mark.slow("large input")
def test_acquire_is_constant_time():
    """The cost is compared in the same run, generously: a linear one would be a hundred times as high."""

    def cost(containers: int) -> float:
        fleet = Fleet(SLOT)
        for n in range(containers):
            fleet.join(Seat(f"c{n}", n), slots=10, free=SLOT * 10, now=0)
        for _ in range(9 * containers):  # nearly full: the worst for a search
            fleet.ask(fleet.ticket())
        for ticket in fleet.match():
            fleet.granted(ticket)
        best = float("inf")
        for _ in range(5):
            began = time.process_time()
            for _ in range(300):
                fleet.ask(fleet.ticket())
                (ticket,) = fleet.match()
                fleet.granted(ticket)
                fleet.returned(ticket.seat, SLOT, clean=True, now=0)
            best = min(best, time.process_time() - began)
        return best

    assert cost(5000) < 15 * cost(50)


@pytest.mark.parametrize(("unprepared", "wanted"), [(0, 0), (20, 0), (21, 1), (50, 3)])
def test_prepared_raise_demand(unprepared, wanted):
    fleet = Fleet(Resources(memory_mib=10))
    fleet.join(Seat("a", 0), slots=2, free=Resources(memory_mib=20), now=0)
    fleet.unprepared_room = Resources(memory_mib=unprepared)
    assert fleet.wanted_slots == wanted
    for _ in range(4):
        fleet.ask(fleet.ticket())
    assert len([*fleet.match()]) == 2
    assert fleet.wanted_slots == 2 + -(-unprepared // 10)


def test_restart_has_two_seats():
    fleet = Fleet(SLOT)
    for _ in range(3):  # the old seats still lie in the heap, with the same index and key
        seat = Seat("same", 0)
        fleet.join(seat, slots=1, free=SLOT * 1, now=0.0)
        fleet.ask(fleet.ticket())
        (ticket,) = fleet.match()
        assert ticket.seat is seat
        fleet.cancel_reservation(ticket)
        fleet.leave(seat)
    fleet.ask(fleet.ticket())
    assert list(fleet.match()) == []


def test_a_container_joins_once():
    fleet = Fleet(SLOT)
    fleet.join(seat := Seat("one", 0), slots=2, free=SLOT * 2, now=0)
    with pytest.raises(ValueError, match="container one is already in the fleet"):
        fleet.join(seat, slots=2, free=SLOT * 2, now=0)
    assert (fleet.ready, fleet.free) == (1, 2)


def test_an_acquire_waits_once():
    fleet = Fleet(SLOT)
    fleet.ask(ticket := fleet.ticket())
    with pytest.raises(ValueError, match="already waiting"):
        fleet.ask(ticket)
    assert fleet.waiting == 1


def test_what_left_is_no_architecture():
    fleet, seats = Fleet(SLOT), [Seat("a", 0), Seat("b", 1)]
    for seat, architecture in zip(seats, ("amd64", "arm64"), strict=True):
        assert not fleet.mixed
        fleet.join(seat, slots=1, free=SLOT, now=0.0, architecture=architecture)
    assert fleet.mixed
    fleet.leave(seats[1])
    assert not fleet.mixed
