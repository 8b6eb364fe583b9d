"""Amounts of what slots are made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atropos.resources import NOTHING, Resources

AMOUNTS = st.builds(
    Resources,
    memory_mib=st.integers(0, 1 << 40),
    disk_mib=st.integers(0, 1 << 40),
    pids=st.integers(0, 1 << 22),
    cpus=st.integers(0, 512),
)
SLOT = Resources(memory_mib=1024, pids=256)


@given(AMOUNTS, AMOUNTS)
def test_what_was_added_can_be_taken_away(one: Resources, other: Resources) -> None:
    assert one + other - other == one
    assert one.fits(one + other)
    assert one - (one + other) == NOTHING


@given(AMOUNTS, AMOUNTS)
def test_most_and_least_are_bounds(one: Resources, other: Resources) -> None:
    assert one.fits(one.most(other)) and other.fits(one.most(other))
    assert one.least(other).fits(one) and one.least(other).fits(other)
    assert one.most(other) + one.least(other) == one + other


@given(AMOUNTS, st.integers(1, 1000))
def test_parts_are_what_they_are_shares_of(one: Resources, number: int) -> None:
    assert (one * number).parts(one) == (one * number).holds(one) == (number if one else 0)
    assert (one // number * number).fits(one + Resources(cpus=1e-6))


def test_scarcest_amount_decides() -> None:
    assert Resources(memory_mib=10_000, pids=300).holds(SLOT) == 1
    assert Resources(memory_mib=10, pids=300).parts(SLOT) == 2
    assert not Resources(pids=257).fits(SLOT)
    assert (NOTHING.holds(SLOT), NOTHING.parts(SLOT), bool(NOTHING)) == (0, 0, False)


def test_it_says_what_there_is() -> None:
    assert str(SLOT) == "1024 MiB, 256 processes"
    assert str(Resources(disk_mib=5, cpus=1.5)) == "5 MiB of files, 1.5 cores"
    assert str(NOTHING) == "nothing"
