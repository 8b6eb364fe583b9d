"""`make test` runs what must be alone first, then the rest; either may fail it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def every_test(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    yield importlib.import_module("every_test")
    for name in ("every_test", "engines"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("ends", "code"),
    [([0, 0], 0), ([1, 0], 1), ([0, 1], 1), ([1, 1], 1), ([5, 0], 0), ([0, 5], 0), ([1, 5], 1), ([5, 5], 5), ([2], 2)],
)
def test_either_run_may_fail(every_test, monkeypatch, ends, code):
    asked = []

    def run(argv, _env):
        asked.append(argv)
        return ends[len(asked) - 1]

    monkeypatch.setattr(every_test, "run", run)
    assert every_test.main(["tests/unit"]) == code
    assert len(asked) == len(ends)
    assert asked[0] == ["pytest", "-m", "alone", "tests/unit", "-n", "0"]


def test_a_choice_of_marks_is_kept_in_both_runs(every_test, monkeypatch):
    asked = []
    monkeypatch.setattr(every_test, "run", lambda argv, _env: asked.append(argv) or 0)
    assert every_test.main(["-m", "slow or fast", "-n", "8"]) == 0
    assert [argv[2] for argv in asked] == ["alone and (slow or fast)", "not alone and (slow or fast)"]
    assert asked[0][-2:] == ["-n", "0"]
    assert asked[1][-2:] == ["-n", "8"]


def test_modules_of_alone_tests_are_found(every_test, monkeypatch):
    """Without arguments, so that the other modules need not be read for some forty tests."""
    asked = []
    monkeypatch.setattr(every_test, "run", lambda argv, _env: asked.append(argv) or 0)
    assert every_test.main([]) == 0
    named = {Path(each).name for each in asked[0][3:-2]}
    assert {"test_attack_programs.py", "test_neighbours_stay_quick.py", "test_limits.py"} <= named
    assert len(named) < 15


def test_groups_are_read_by_xdist(request):
    """It takes what follows the last @ of a test's id for its group, unless a ] comes later."""
    groups = {item.get_closest_marker("xdist_group").args[0] for item in request.session.items}
    assert [group for group in groups if {*"@]"} & {*group}] == []
