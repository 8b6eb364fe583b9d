"""The journal: at most once, and every bound has its effect."""

from __future__ import annotations

import asyncio

from atropos.sandbox.server.calls.journal import GATE_BYTES, MAX_EARLY, Journal, JournalEntry
from atropos.wire import Call, CommandResult, Done, Exec, Fault, Reply


def call(name: str, lease: str = "lease-01", *, resent: bool = False) -> Call:
    return Call(call_id=name, lease_id=lease, epoch=1, operation=Exec(command="x"), resent=resent)


def reply(name: str, size: int = 0) -> Reply:
    return Reply(call_id=name, result=CommandResult(exit_code=0, output=bytes(size), duration_s=0))


def finish(journal: Journal, name: str, lease: str = "lease-01", size: int = 0) -> JournalEntry:
    entry = journal.open(call(name, lease))
    journal.close(entry, reply(name, size))
    return entry


def code_of(found: object) -> str:
    assert isinstance(found, Fault), found
    return found.code


def test_a_call_is_new_once():
    journal = Journal()
    assert journal.look_up(call("c")) is None
    entry = journal.open(call("c"))
    assert journal.look_up(call("c", resent=True)) is entry
    journal.close(entry, reply("c"))
    assert journal.look_up(call("c", resent=True)) is entry
    assert entry.answer == reply("c")
    journal.ack("c")
    assert code_of(journal.look_up(call("c"))) == "outcome_unknown"
    assert (journal.bytes, journal.answers, journal.entries) == (0, 0, {})


def test_the_first_answer_stands():
    journal = Journal()
    entry = finish(journal, "c")
    journal.close(entry, Fault(call_id="c", code="slot_lost", message=""))
    assert entry.answer == reply("c")


def test_others_call_id_is_not_run():
    journal = Journal()
    finish(journal, "c", "lease-01")
    assert code_of(journal.look_up(call("c", "lease-02"))) == "sandbox_error"


def test_dropped_answer_is_unknown():
    journal = Journal(max_answer_bytes=10_000)
    finish(journal, "small", "lease-02")
    entries = [finish(journal, f"c{n}", size=4000) for n in range(5)]
    assert journal.bytes <= 10_000
    assert code_of(journal.look_up(call("c0"))) == "outcome_unknown"
    assert isinstance(entries[0].answer, Fault), "who still holds the entry sends the truth, and it is small"
    assert journal.look_up(call("c4")) is entries[4]
    assert isinstance(journal.look_up(call("small", "lease-02")), JournalEntry), "the lease that holds most pays"
    huge = finish(journal, "huge", size=1_000_000)
    assert journal.look_up(call("huge")) is huge
    assert journal.answers == 1


def test_answers_are_bounded():
    journal = Journal(max_answers=10)
    for n in range(100):
        finish(journal, f"c{n}")
    assert journal.answers == len(journal.entries) == 10
    assert code_of(journal.look_up(call("c0"))) == "outcome_unknown"


def test_forgotten_ids_concern_resent_calls():
    journal = Journal(max_gone=5, max_answers=1)
    for n in range(10):
        finish(journal, f"c{n}")  # each drops the answer before it
    assert code_of(journal.look_up(call("c8"))) == "outcome_unknown"
    assert code_of(journal.look_up(call("c0", resent=True))) == "outcome_unknown"
    assert journal.look_up(call("never seen")) is None


def test_a_long_lease_makes_no_call_unknown():
    journal = Journal(max_gone=5)
    for n in range(10):
        finish(journal, f"c{n}")
        journal.ack(f"c{n}")
    assert code_of(journal.look_up(call("c9"))) == "outcome_unknown"
    assert journal.look_up(call("sent, cut off, and sent again", resent=True)) is None


def test_early_cancel_wins():
    journal = Journal()
    journal.cancel_early("c")
    entry = journal.open(call("c"))
    assert entry.state == "done"
    assert isinstance(entry.answer, Reply)
    assert isinstance(entry.answer.result, CommandResult)
    assert entry.answer.result.cancelled
    for n in range(MAX_EARLY + 10):
        journal.cancel_early(f"x{n}")
    states = {n: journal.open(call(f"x{n}")).state for n in (0, 9, 10, MAX_EARLY + 9)}
    assert [n for n, state in states.items() if state == "done"] == [10, MAX_EARLY + 9], "the latest are remembered"


def test_ended_lease_keeps_them():
    journal = Journal()
    finish(journal, "acked")
    journal.ack("acked")
    entry = finish(journal, "waiting")
    journal.trim_lease("lease-01")
    assert journal.look_up(call("waiting", resent=True)) is entry
    journal.forget_lease("lease-01")
    assert (journal.bytes, journal.answers, journal.entries, journal.lease_ids()) == (0, 0, {}, [])


def test_open_calls_are_counted():
    journal = Journal()
    entry = journal.open(call("a"))
    finish(journal, "b")
    assert journal.open_calls == 1
    journal.close(entry, Reply(call_id="a", result=Done()))
    assert journal.open_calls == 0


def test_large_answers_congest():
    journal = Journal()
    finish(journal, "a", size=GATE_BYTES)
    assert journal.congested
    journal.ack("a")
    assert not journal.congested


async def test_waiters_hear_of_answer():
    journal = Journal()
    entry = journal.open(call("a"))
    waiter = asyncio.get_running_loop().create_future()
    entry.waiters.append(waiter)
    journal.close(entry, reply("a"))
    await asyncio.wait_for(waiter, 1)
