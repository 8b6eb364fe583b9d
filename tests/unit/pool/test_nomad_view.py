"""What follows from a list of allocations: no agent, no requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.nomad.view import Allocation


def row(index, state="running", **fields):
    name = fields.pop("name", f"a{index}")
    return Allocation(name, f"{name}.0", index, state, f"http://{name}", **fields)


def view_of(*rows, target=0, ready=()):
    view = JobView(placement_s=5)
    view.ask(target or len(rows))
    listed(view, *rows)
    for item in ready:
        view.answered(item.run)
    return view


def listed(view, *rows, answering=()):
    return view.apply(rows, view.merge(rows, answering))


def states(view):
    return {each.id: each.state for each in view.containers()}


def test_running_means_answered():
    view = view_of()
    assert listed(view, row(0), row(1, "starting"))
    assert view.unanswered() == {"a0.0": "http://a0"}
    assert states(view) == {"a0.0": "starting", "a1.0": "starting"}
    view.answered("a0.0")
    assert states(view)["a0.0"] == "running"
    assert not listed(view, row(0), row(1, "starting"))
    assert not view.unanswered()


def test_a_start_says_what_it_does():
    view = view_of(row(0, "starting", doing="Downloading image"), row(1, "starting", doing="x", detail="No such image"))
    assert [each.detail for each in view.containers()] == ["Downloading image", "No such image"]


def test_names_are_of_nodes():
    view = view_of(row(3, name="1f2e3d4c-aaaa-bbbb", node="node-7"))
    assert [each.name for each in view.containers()] == ["3 node-7 1f2e3d4c"]


def test_restart_is_a_new_container():
    view = view_of(row(0), ready=[row(0)])
    assert listed(view, replace(row(0), run="a0.1"))
    assert states(view) == {"a0.1": "starting"}
    assert not view.ready


def test_unlisted_but_answering():
    view = view_of(row(0), row(1), ready=[row(0), row(1)])
    assert view.doubtful([row(0)]) == [row(1)]
    assert not listed(view, row(0), answering=[row(1)])
    assert listed(view, row(0))
    assert states(view) == {"a0.0": "running"}


def test_lost_node_goes_on():
    view = view_of(row(0), ready=[row(0)])
    lost = row(0, "lost")
    assert view.doubtful([lost]) == [lost]
    listed(view, lost, row(0, "starting", name="b"), answering=[lost])
    assert states(view) == {"a0.0": "ending", "b.0": "starting"}
    assert view.placed() == 1


def test_token_is_read_anew():
    view = view_of(row(0))
    assert not view.needs_token({"a0.0": row(0)})
    assert view.needs_token({"a0.0": row(0), "a1.0": row(1)})
    assert view.needs_token({"a0.0": row(0, "starting")})


def test_unplaced_is_taken_back():
    view = view_of(target=2)
    listed(view)
    assert view.lacking
    assert view.placed() == 0
    view.judge_placement("no memory", 100)
    assert (view.trouble(), view.failure) == ("no memory", None)
    view.judge_placement("no memory", 105)
    assert isinstance(view.failure, BackendUnavailable)
    listed(view, row(0))
    view.judge_placement("no memory", 106)
    assert view.failure is None
    listed(view, row(0), row(1))
    assert not view.lacking
    view.judge_placement("", 107)
    assert view.trouble() == ""


def test_failure_is_explained_once():
    bad = row(0, "starting", detail="Driver Failure: No such image: x", node="n1", modified=3)
    view = view_of(target=1)
    listed(view, bad, row(1, "starting"))
    view.judge_crash(bad, "")
    assert (view.latest_failing(), view.failure) == (bad, None)
    listed(view, bad)
    view.judge_crash(bad, "")
    assert isinstance(view.failure, ConfigError)
    assert "container 0 on n1" in view.trouble()
    assert view.failures == 1


def test_replaced_is_no_trouble():
    good, bad = row(0), row(0, "over", name="old", failed=True, detail="exit code 1", exit_code=1)
    view = view_of(good, ready=[good])
    listed(view, good, bad)
    assert view.latest_failing() is None


@pytest.mark.parametrize(
    ("target", "count", "may"),
    [(1, 2, True), (2, 2, False), (1, 3, False), (1, 1, False)],
)
def test_lowering_takes_highest(target, count, may):
    view = view_of(row(0), row(1))
    view.target = target
    assert view.may_lower(1, count) == may


def test_drained_ones_go_first():
    view = view_of(row(0), row(1), row(2))
    assert view.next_shrink() is None
    view.target = 1
    assert view.next_shrink() == row(2)
    view.ending.add("a2.0")
    assert view.next_shrink() == row(1)
    view.drained.add("a2.0")
    assert view.next_shrink() == row(2)


def test_unplaced_are_dropped():
    view = view_of(row(0), target=4)
    view.target = 1
    assert view.unplaced_count(4) == 1
    assert view.unplaced_count(6) is None
    assert view.unplaced_count(1) is None
