"""Rewards of verifiers whose output an agent's programs can write to."""

import asyncio
import contextlib
import sys
import time

import pytest

from atropos.slots import ExecResult
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.folder import load_task
from atropos.tasks.format.config import StepSection
from atropos.tasks.verifier import judging
from atropos.tasks.verifier.mode import choose
from atropos.tasks.verifier.reward import Verdict, passed, read_verdict
from atropos.tasks.verifier.surroundings import Surroundings
from tests.files import write_files
from tests.unit.tasks.test_task_folder import folder

__all__ = ["folder"]


@pytest.fixture
def task(tmp_path):
    write_files(
        tmp_path / "old",
        {
            "task.yaml": "instruction: Write hello.txt.\nparser_name: pytest\n",
            "Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
            "run-tests.sh": "#!/bin/bash\n",
            "tests/test_outputs.py": "",
        },
    )
    return load_task(tmp_path / "old")


def test_tests_run_where_the_solution_works(task):
    assert choose(task).mode == "view"
    (task.path / "solution.sh").write_text("apt-get install -y nginx\n")
    chosen = choose(load_task(task.path))
    assert (chosen.mode, chosen.reason.split()[0]) == ("shared", "solution.sh")


@pytest.mark.parametrize(("used", "runs"), [(0.0, 2), (0.7, 2), (0.95, 1)])
async def test_tests_kept_from_the_cpu_run_again(task, monkeypatch, used, runs):
    """For any good part of their time."""
    kept = (ExecResult(-9, "", b"", timed_out=True), used * task.config.verifier.timeout_sec)
    output = "= short test summary info =\nPASSED a\n"
    results = [kept, (ExecResult(0, output, output.encode()), 0.0)]

    async def run(*_):
        return results.pop(0)

    monkeypatch.setattr(judging, "_run_tests", run)
    with contextlib.nullcontext() if runs == 2 else pytest.raises(VerifierFailed, match="took longer"):
        assert (await judging.judge(None, task, Surroundings())).reward == 1
    assert len(results) == 2 - runs


@pytest.mark.parametrize("company", [False, True])
async def test_only_company_is_watched(folder, monkeypatch, company):
    """It takes seconds, in which programs of the agent's that are alive could write a reward."""
    watched = []

    async def watch(*_):
        watched.append(True)

    async def run(*_):
        return ExecResult(-9, "", b"", timed_out=True), 1000.0

    monkeypatch.setattr(judging, "_watch_company", watch)
    monkeypatch.setattr(judging, "_run_tests", run)
    surroundings = Surroundings(company=True) if company else Surroundings()
    with pytest.raises(VerifierFailed, match="took longer"):
        await judging.judge(None, load_task(folder), surroundings)
    assert bool(watched) == company


async def test_summaries_are_found_in_linear_time(task):
    async def seconds(count):
        started = time.process_time()
        output = "=" * count
        with pytest.raises(VerifierFailed, match="no pytest summary"):
            await read_verdict(None, task, ExecResult(0, output, output.encode()))
        return time.process_time() - started

    await seconds(100)
    small, large = await seconds(3_000), await seconds(24_000)
    assert large < max(small, 0.01) * 30  # quadratic work would take 64 times as long


async def test_the_last_summary_counts(task):
    output = "=====\n== short test summary info ===\nPASSED a\nFAILED b\n"
    verdict = await read_verdict(None, task, ExecResult(0, output, output.encode()))
    assert verdict.metrics == {"reward": 0.0, "tests": 2.0, "passed": 1.0}


async def test_a_test_with_a_failed_subtest_fails(task, tmp_path):
    (tmp_path / "test_subtests.py").write_text(
        "import unittest\n\nclass Test(unittest.TestCase):\n    def test_it(self):\n"
        "        for n in range(3):\n            with self.subTest(n=n):\n                self.assertNotEqual(n, 1)\n"
    )
    run = (sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_subtests.py")
    process = await asyncio.create_subprocess_exec(*run, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
    raw = (await process.communicate())[0]
    assert b"PASSED test_subtests.py::Test::test_it" in raw
    assert (await read_verdict(None, task, ExecResult(1, raw.decode(), raw))).reward == 0.0


async def test_a_failed_subtest_of_the_plugin_fails(task):
    output = "= short test summary info =\nPASSED a\n[message] (n=1) SUBFAIL a - AssertionError: 1 == 1\n"
    assert (await read_verdict(None, task, ExecResult(1, output, output.encode()))).reward == 0.0


async def test_a_cut_summary_is_no_reward(task):
    output = "= short test summary info =\nPASSED a\n[... 12 bytes dropped ...]\nPASSED z\n"
    with pytest.raises(VerifierFailed, match="12 bytes in its middle were dropped"):
        await read_verdict(None, task, ExecResult(0, output, output.encode(), truncated=True, dropped_bytes=12))


CUT = "= short test summary info =\nPASSED fake\nmuch\n[... 9 bytes dropped ...]\n"
WHOLE = "= short test summary info =\nPASSED a\n{}= {} in 0.01s =\n"


@pytest.mark.parametrize(
    ("tail", "reward"),
    [
        (WHOLE.format("", "1 passed"), 1.0),
        (WHOLE.format("FAILED b - x\n", "1 failed, 1 passed"), 0.0),
        (WHOLE.format("", "1 failed, 1 passed"), None),
        ("= short test summary info =\nPASSED a\n", None),
        ("PASSED a\n= 1 passed in 0.01s =\n", None),
    ],
)
async def test_whole_summary_is_a_reward(task, tail, reward):
    output = CUT + tail
    result = ExecResult(0, output, output.encode(), truncated=True, dropped_bytes=9)
    if reward is not None:
        assert (await read_verdict(None, task, result)).reward == reward
    else:
        with pytest.raises(VerifierFailed, match="9 bytes in its middle"):
            await read_verdict(None, task, result)


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        *(("PASSED", 1.0), ("XFAIL", 1.0), ("SKIPPED", 1.0)),
        *(("FAILED", 0.0), ("ERROR", 0.0), ("XPASS", 0.0), ("SUBFAILED", 0.0)),
    ],
)
async def test_each_outcome_counts(task, outcome, reward):
    output = f"= short test summary info =\n\x1b[32mPASSED\x1b[0m a\n\x1b[1m{outcome}\x1b[0m b - why\n"
    assert (await read_verdict(None, task, ExecResult(0, output, output.encode()))).reward == reward


@pytest.mark.parametrize(
    ("least", "metrics", "follows"),
    [
        (None, {}, True),
        (0.5, {"reward": 0.5}, True),
        (0.5, {"reward": 0.4, "style": 1.0}, False),
        (0.0, {"style": 1.0}, False),
        ({"style": 1.0, "reward": 0.5}, {"style": 1.0, "reward": 0.5}, True),
        ({"style": 1.0, "reward": 0.5}, {"style": 0.9, "reward": 1.0}, False),
        ({"style": -1.0}, {"reward": 1.0}, False),
    ],
)
def test_next_step_needs_min_reward(least, metrics, follows):
    assert passed(StepSection(name="one", min_reward=least), Verdict(1.0, 0, "", 0.0, metrics)) is follows
