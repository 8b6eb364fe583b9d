"""An answer is acknowledged until the server is known to have read that, and no longer."""

from __future__ import annotations

from atropos.slots.client.acknowledgements import ACKS_AT_ONCE, Acknowledgements


def given(*call_ids: str) -> Acknowledgements:
    acks = Acknowledgements()
    for call_id in call_ids:
        acks.add(call_id)
    return acks


def test_they_are_sent_once():
    acks = given("a", "b")
    acks.due = True
    assert acks
    assert acks.take() == ("a", "b")
    assert not acks
    assert not acks.due
    assert acks.take() == ()


def test_many_go_by_themselves():
    acks = given(*map(str, range(ACKS_AT_ONCE - 1)))
    assert not acks.many
    acks.add("last")
    assert acks.many


def test_an_echo_confirms_what_went_before():
    acks = Acknowledgements()
    assert not acks.due
    assert not acks.unconfirmed
    acks.add("a")
    assert acks.unconfirmed
    acks.take()
    assert acks.unconfirmed
    acks.beat(1)
    assert not acks.unconfirmed  # its echo will tell
    acks.add("b")
    acks.take()
    acks.beat(2)
    acks.add("c")
    acks.take()
    acks.add("d")
    acks.echoed(1)
    acks.resend()
    assert acks.due
    assert acks.take() == ("b", "c", "d")
    acks.resend()
    assert acks.take() == ("b", "c", "d")
    acks.beat(1)
    acks.echoed(1)
    acks.resend()
    assert not acks.due
    assert acks.take() == ()
