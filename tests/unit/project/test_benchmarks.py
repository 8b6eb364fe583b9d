"""Benchmarks that `make bench` doesn't run still fit the code that they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import charts, docker_peer, over_http, report, swe_rex
from benchmarks.context import Context
from benchmarks.stats import row

pytestmark = pytest.mark.slow("starts Python anew")

ROOT = Path(__file__).resolve().parents[3]


def test_fleet_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.fleet", "--largest", "10"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "320" in done.stdout


async def test_servers_take_turns() -> None:
    rows = await over_http.measure({"one": ROOT, "other": ROOT}, parallel=2, n=4, rounds=2, say=print)
    assert [(one.subject, one.n) for one in rows] == [("one", 2), ("other", 2)] * 3
    assert len(report.ratios(rows)) == 3


async def test_no_peers_starts_none() -> None:
    context = Context(scale=0.1, say=print, skip_peers=True)
    async with swe_rex.running(context) as rex, docker_peer.container(context) as container:
        assert (rex, container) == (None, None)


def test_tails_are_told_and_drawn(tmp_path: Path) -> None:
    ours = row("sequential call", "ours", [0.001] * 98 + [0.5, 2.0], base=True)
    theirs = row("sequential call", "theirs", [0.002] * 100)
    assert (ours.p50, ours.p99, ours.longest) == (1, 500, 2000)
    (ratio,) = report.ratios([ours, theirs])
    assert (ratio["p50"], ratio["p99"]) == (0.5, 250)
    report.write(tmp_path / "run.json", {}, [ours, theirs], [])
    charts.main([tmp_path / "run.json"], tmp_path / "picture")
    assert "theirs" in (tmp_path / "picture-tails.svg").read_text()
