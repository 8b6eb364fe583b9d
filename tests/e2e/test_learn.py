"""A policy learns in real slots from what the trajectory API hands out; one position off, and none does."""

from __future__ import annotations

import json

import pytest

from examples.learn.trainer import SHIFTS, shifted
from tests.e2e.test_serve import program

ARMS = ("as sent", "masks +1", "logprobs +1")


def test_a_shift_moves_by_one_and_fills_the_gap():
    assert shifted([1, 2, 3], 1, -100) == [-100, 1, 2]
    assert shifted([1, 2, 3], -1, -100) == [2, 3, -100]
    assert shifted([1, 2, 3], 0, -100) == [1, 2, 3]
    assert {abs(by) for pair in SHIFTS.values() for by in pair} == {0, 1}


@pytest.mark.timeout(1200)  # about 40 s of CPU on a quiet machine
async def test_a_policy_learns_from_the_batches_and_from_nothing_that_is_shifted(tmp_path):
    argv = ["-m", "examples.learn", "--shifts", ",".join(ARMS), "--stop-when-learned", "--out", str(tmp_path)]
    async with program(*argv) as lesson:
        code = await lesson.wait()
    log = (tmp_path / "env.log").read_text() if (tmp_path / "env.log").exists() else ""
    assert code == 0, log[-4000:]
    rows = json.loads((tmp_path / "curve.json").read_text())["rows"]
    assert set(rows) == set(ARMS)
    assert rows["as sent"]["first"] < 0.7
    assert rows["as sent"]["last"] > 0.9
    assert rows["as sent"]["positions_used"] > 0.95
    assert all(rows[arm]["last"] < 0.3 and rows[arm]["updates"] >= 10 for arm in ARMS[1:])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()
    assert "Traceback" not in log
