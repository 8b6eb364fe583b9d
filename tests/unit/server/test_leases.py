"""The lease table: decisions over plain data, with a clock that the test moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos.errors import PoolFull, SandboxError
from atropos.resources import NOTHING, Resources
from atropos.sandbox.contract import Stopped
from atropos.sandbox.server.state.lease_table import (
    LARGE_WANT_S,
    MAX_ENDED,
    WANT_S,
    EndedLease,
    HeldLease,
    LeaseTable,
)
from atropos.wire import LeaseRequest

SLOT = Resources(memory_mib=10, pids=4)
SIZES = [SLOT] * 3 + [Resources(memory_mib=mib, pids=pids) for mib, pids in ((15, 4), (25, 8), (10, 9), (40, 4))]


def ask(
    table: LeaseTable, lease: str, client: str = "a", now: float = 0.0, ttl_s: float = 10
) -> HeldLease | SandboxError:
    return sized(table, lease, SLOT, client, now, ttl_s)


def sized(
    table: LeaseTable, lease: str, room: Resources, client: str = "a", now: float = 0.0, ttl_s: float = 10
) -> HeldLease | SandboxError:
    try:
        return table.grant(LeaseRequest(lease_id=f"lease-of-{lease}", client_id=client, ttl_s=ttl_s), now, room)
    except SandboxError as error:
        return error


def held(decision: HeldLease | SandboxError) -> HeldLease:
    assert isinstance(decision, HeldLease), decision
    return decision


def end(
    table: LeaseTable, lease: HeldLease, code: str = "released", now: float = 0.0, *, clean: bool = True
) -> EndedLease:
    table.begin_end(lease, code, "")
    return table.finish_end(lease, now, Stopped(clean=clean, seconds=0))


def test_epochs_grow_slots_unshared():
    table = LeaseTable(3, SLOT)
    leases = [held(ask(table, str(n))) for n in range(3)]
    assert [lease.epoch for lease in leases] == [1, 2, 3]
    assert len({lease.slot for lease in leases}) == 3
    assert isinstance(ask(table, "more"), SandboxError)
    end(table, leases[1])
    again = held(ask(table, "again"))
    assert (again.slot, again.epoch) == (leases[1].slot, 4)


def test_asking_again_gives_the_same_lease():
    table = LeaseTable(2, SLOT)
    first = held(ask(table, "x"))
    assert ask(table, "x", now=5) is first
    assert table.free == 1
    other = ask(table, "x", client="b")
    assert isinstance(other, SandboxError)
    assert other.code == "lease_expired"


def test_ended_is_not_granted():
    table = LeaseTable(2, SLOT)
    end(table, held(ask(table, "x")))
    end(table, held(ask(table, "y")), "slot_lost")
    over, lost = ask(table, "x"), ask(table, "y")
    assert isinstance(over, SandboxError)
    assert isinstance(lost, SandboxError)
    assert (over.code, lost.code) == ("lease_expired", "slot_lost")


def test_an_early_release_refuses():
    table = LeaseTable(1, SLOT)
    table.refuse_later("lease-of-x", 0)
    assert isinstance(ask(table, "x"), SandboxError)
    assert table.free == 1


def test_signs_of_life_prolong():
    table = LeaseTable(2, SLOT)
    mine, other = held(ask(table, "1", "a")), held(ask(table, "2", "b"))
    table.seen("a", 9.0)
    assert table.due(9.9) == []
    assert table.due(10.0) == [other]
    assert table.due(19.0) == [mine, other]
    other.renewed_at = 15
    assert table.due(20.0) == [mine]


def test_older_epoch_finds_it_over():
    table = LeaseTable(1, SLOT)
    lease = held(ask(table, "x"))
    assert table.find("lease-of-x", lease.epoch) is lease
    assert table.find("lease-of-x", None) is lease
    for epoch in (lease.epoch - 1, lease.epoch + 1):
        found = table.find("lease-of-x", epoch)
        assert isinstance(found, EndedLease)
        assert found.code == "lease_expired"


def test_gpus_are_leased_alone():
    one, both = SLOT + Resources(gpus=1), SLOT + Resources(gpus=2)
    table = LeaseTable(4, SLOT, Resources(gpus=2), 2)
    first, second = held(sized(table, "1", one)), held(sized(table, "2", one))
    assert {first.gpus, second.gpus} == {(0,), (1,)}
    assert "no room for 10 MiB, 4 processes, 1 GPU" in str(sized(table, "3", one))
    assert held(ask(table, "plain", now=10)).gpus == ()  # which the wish for a GPU keeps from nobody
    end(table, first, now=10, clean=False)
    end(table, second, now=10)
    assert isinstance(sized(table, "4", both, now=20), SandboxError)
    third = held(sized(table, "5", one, now=20))
    assert third.gpus == second.gpus
    table.restore(first.slot)
    end(table, third, now=20)
    assert sorted(held(sized(table, "6", both, now=30)).gpus) == [0, 1]
    shared = LeaseTable(4, SLOT, Resources(gpus=4), 2)
    assert sorted(held(sized(shared, str(n), one)).gpus[0] for n in range(4)) == [0, 0, 1, 1]


def test_doubtful_slot_is_retired():
    table = LeaseTable(1, SLOT)
    lease = held(ask(table, "x"))
    end(table, lease, clean=False)
    assert (table.free, set(table.retired)) == (0, {0})
    assert isinstance(ask(table, "y"), SandboxError)
    table.restore(0)
    table.restore(0)
    assert held(ask(table, "z")).slot == 0


def test_draining_keeps_leases():
    table = LeaseTable(2, SLOT)
    lease = held(ask(table, "x"))
    table.draining = "the server is draining"
    refused = ask(table, "y")
    assert isinstance(refused, SandboxError)
    assert refused.code == "backend_unavailable"
    assert held(ask(table, "x")) is lease


def test_memory_is_bounded():
    table = LeaseTable(1, SLOT)
    for number in range(MAX_ENDED + 50):
        end(table, held(ask(table, f"{number:06}")))
    assert len(table.ended) == MAX_ENDED
    assert table.free == 1


def test_client_of_fewest_is_next():
    table = LeaseTable(4, SLOT)
    greedy = [held(ask(table, f"g{n}", "greedy")) for n in range(4)]
    assert isinstance(ask(table, "g4", "greedy", now=0.1), SandboxError)
    assert isinstance(ask(table, "p0", "poor", now=0.2), SandboxError)
    end(table, greedy[0], now=0.3)
    assert table.wanting() == ["poor", "greedy"]
    assert isinstance(ask(table, "g5", "greedy", now=0.3), SandboxError), "kept for the one with fewer"
    assert held(ask(table, "p1", "poor", now=0.4)).client_id == "poor"


def test_silent_client_is_passed():
    table = LeaseTable(1, SLOT)
    lease = held(ask(table, "a", "a"))
    assert isinstance(ask(table, "b", "b"), SandboxError)
    end(table, lease)
    held(ask(table, "spare", "b", now=0.1))
    table = LeaseTable(2, SLOT)
    lease = held(ask(table, "a0", "a"))
    held(ask(table, "a1", "a"))
    assert isinstance(ask(table, "b", "b"), SandboxError)
    end(table, lease)
    assert isinstance(ask(table, "a2", "a", now=0.1), SandboxError)
    assert held(ask(table, "a3", "a", now=WANT_S + 0.1))


def test_waiting_gets_its_slot():
    """Leases last longer than a refused request is kept; whoever gives one back asks again before the other has heard."""
    table = LeaseTable(2, SLOT)
    greedy = [held(ask(table, f"g{n}", "greedy")) for n in range(2)]
    assert isinstance(ask(table, "p0", "poor"), SandboxError)
    for now in (50.0, 100.0):
        end(table, greedy.pop(0), now=now)
        assert table.offer(now, lambda _: True) == (["poor"] if now == 50 else ["greedy"])
        again = ask(table, f"g-{now:.0f}", "greedy", now=now)
        if now == 50.0:
            assert isinstance(again, SandboxError), "kept for the one that waits"
            assert held(ask(table, "p1", "poor", now=now + 0.5)).client_id == "poor"
    held(again)


@pytest.mark.parametrize("is_connected", [True, False])
def test_gone_waiter_costs_moment(is_connected):
    table = LeaseTable(2, SLOT)
    lease, _ = (held(ask(table, f"g{n}", "greedy")) for n in range(2))
    assert isinstance(ask(table, "p0", "poor"), SandboxError)
    for now in (50.0, 60.0):
        end(table, lease, now=now)
        table.offer(now, lambda _: is_connected)
        first = ask(table, f"g-{now:.0f}", "greedy", now=now + 0.1)
        assert isinstance(first, SandboxError) == (is_connected and now == 50.0)
        lease = held(
            first if isinstance(first, HeldLease) else ask(table, f"h-{now:.0f}", "greedy", now=now + WANT_S + 0.1)
        )


def test_refusals_are_bounded(monkeypatch):
    monkeypatch.setattr("atropos.sandbox.server.state.lease_table.MAX_WANTING", 20)
    table = LeaseTable(2, SLOT)
    for n in range(2):
        held(ask(table, f"g{n}", "greedy"))
    for n in range(100):
        ask(table, f"p{n}", "poor", now=n)
        ask(table, f"q{n}", f"other-{n}", now=n)
    assert len(table.wanting()) == 20


def test_refusals_are_bounded_by_client():
    table = LeaseTable(2, SLOT)
    leases = [held(ask(table, f"g{n}", "greedy")) for n in range(2)]
    for n in range(100):
        ask(table, f"p{n}", "poor", now=n)
    for n, lease in enumerate(leases):
        assert table.wanting() == ["poor"]
        end(table, lease, now=100)
        held(ask(table, f"r{n}", "poor", now=100))
    assert not table.wanting()


def test_nobody_starves():
    """Three clients with unlimited demand ask in turns of very different speed; leases last as long for all."""
    table = LeaseTable(6, SLOT)
    active: list[tuple[float, HeldLease]] = []
    granted: Counter[str] = Counter()
    serial = 0
    for step in range(4000):
        now = step * 0.01
        for until, lease in [item for item in active if item[0] <= now]:
            active.remove((until, lease))
            end(table, lease, now=now)
        for client, pause in (("fast", 1), ("slow", 10), ("slower", 25)):
            if step % pause:
                continue
            serial += 1
            decision = ask(table, f"{serial:08}", client, now=now, ttl_s=1000)
            if isinstance(decision, HeldLease):
                granted[client] += 1
                active.append((now + 1.0, decision))
    assert min(granted.values()) > 0.25 * max(granted.values()), granted


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(SIZES), st.integers(0, 9))))
def test_sizes_never_exceed_room(steps: list[tuple[str, int, int]]):
    table = LeaseTable(4, SLOT)
    for number, (client, room, other) in enumerate(steps):
        decision = sized(table, f"{number:03}", room, client, now=number / 3)
        if isinstance(decision, SandboxError) and table.held:
            lease = list(table.held.values())[other % len(table.held)]
            end(table, lease, now=number / 3, clean=other != 9 or len(table.retired) > 2)
        taken = sum((each.room for each in table.held.values()), NOTHING)
        assert taken + table.retired_room + table.room == SLOT * 4
        assert len({each.slot for each in table.held.values()} | table.retired.keys()) == len(table.held) + len(
            table.retired
        )


def test_room_is_kept_for_large():
    table = LeaseTable(4, SLOT)
    small = [held(sized(table, f"s{n}", SLOT, "many")) for n in range(4)]
    now = 0.0
    for round_ in range(4):
        assert isinstance(
            sized(table, f"big{round_}", SLOT * 4, "one", now), SandboxError
        )  # a pool asks under a new id
        end(table, small[round_], now=now)
        table.offer(now, lambda _: True)
        now += 2.0
        refused = sized(table, f"more{round_}", SLOT, "many", now - 0.1)
        assert isinstance(refused, PoolFull)
        assert refused.room == NOTHING
    assert held(sized(table, "big9", SLOT * 4, "one", now)).room == SLOT * 4


def test_gone_large_costs_little():
    table = LeaseTable(4, SLOT)
    lease = held(sized(table, "s", SLOT, "many"))
    assert isinstance(sized(table, "big", SLOT * 4, "one"), SandboxError)
    assert isinstance(sized(table, "x", SLOT, "many", LARGE_WANT_S - 0.1), SandboxError)
    assert isinstance(sized(table, "x", SLOT, "many", LARGE_WANT_S + 0.1), HeldLease)
    assert lease.room == SLOT
