"""Reads a verifier's reward: reward.json, reward.txt, or the summary of a pytest run."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from atropos import wire
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.format.config import StepSection
from atropos.tasks.format.task import Task

REWARD_TEXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
MAX_REWARD_BYTES = 65_536
ROUNDED = 0.01
"""By how much the two may differ: one of them may be rounded for people."""
LOG_CHARS = 4000
"""Tail of the verifier's output that is kept with the trajectory."""
_SUMMARY = re.compile(r"= short test summary info =+\r?\n(.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_OUTCOME = re.compile(r"^(?:[\[(].*[\])] )?(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED|SUBFAIL|SUBFAILED)\b", re.MULTILINE)
"""A failed subtest has a line of its own, beside which its test can have one that says PASSED. pytest-subtests writes
it as `[message] (i=1) SUBFAIL`."""
_TOTAL = re.compile(r"^=+ (\d.*) in [\d.]+s\b.*$", re.MULTILINE)
_FAILURES = re.compile(r"\b(?:failed|errors?|xpassed)\b")
_PASSES = {"PASSED", "XFAIL", "SKIPPED"}
_Read = TypeVar("_Read", float, dict[str, float])


@dataclass(frozen=True)
class Verdict:
    """A reward and what the verifier had to say.

    Attributes:
        reward: as written; by convention from 0 to 1.
        metrics: all numbers of a reward.json.
        seconds: of the verifier's own run.
    """

    reward: float
    exit_code: int | None
    log: str
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def combined(task: Task, verdicts: Sequence[Verdict]) -> float:
    """A task's reward, as `multi_step_reward_strategy` says; as in Harbor, of the steps that were reached.

    A mean is of each number by its name, where a step without it counts as 0.
    """
    # The last one that was reached: a step whose bound failed is the end.
    if task.config.multi_step_reward_strategy == "final":
        return verdicts[-1].reward
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.metrics)
    means = {name: statistics.mean(verdict.metrics.get(name, 0.0) for verdict in verdicts) for name in names}
    return _main(means) if means else 0.0


def _main(metrics: Mapping[str, float]) -> float:
    """The number that is the reward: the one of that name, else the first."""
    return metrics.get("reward", next(iter(metrics.values())))


def passed(step: StepSection, verdict: Verdict) -> bool:
    """Whether the next step may follow; a reward that the verifier didn't write reaches no bound."""
    least = step.min_reward
    bounds = {} if least is None else least if isinstance(least, dict) else {"reward": least}
    # -inf: a bound on a number that is missing is never reached, not even one of 0.
    return all(verdict.metrics.get(name, -math.inf) >= bound for name, bound in bounds.items())


async def read_verdict(slot: Slot, task: Task, result: ExecResult) -> Verdict:
    """What the tests that ended with `result` say.

    Raises:
        VerifierFailed: no reward could be read.
    """
    # Never both: tests that were to write a reward and only printed have failed as such.
    reward, metrics = _summary(task, result) if task.scoring == "pytest" else await _written(slot, task, result)
    return Verdict(reward, result.exit_code, result.output[-LOG_CHARS:], result.duration_s, metrics)


async def _written(slot: Slot, task: Task, result: ExecResult) -> tuple[float, dict[str, float]]:
    """The reward as Harbor has it: reward.json holds numbers by name; without one, reward.txt holds one number.

    Raises:
        VerifierFailed: there is neither, one is no reward, or they say different things: one of them is not the tests'.
    """
    named = await _read(slot, task, REWARD_JSON, _numbers)
    if named is None:
        alone = await _read(slot, task, REWARD_TEXT, _number)
        if alone is None:
            killed = f", limit {result.limit}" if result.limit else ""
            raise VerifierFailed(
                f"{task.name}: {task.test_script} wrote no {REWARD_JSON} and no {REWARD_TEXT} "
                f"(exit code {result.exit_code}{killed}): {result.output[-500:].strip()}"
            )
        return alone, {"reward": alone}
    reward = _main(named)
    beside = None
    with contextlib.suppress(VerifierFailed):  # beside reward.json it may hold anything
        beside = await _read(slot, task, REWARD_TEXT, _number)
    if beside is not None and abs(beside - reward) > ROUNDED:
        raise VerifierFailed(
            f"{task.name}: {REWARD_JSON} says {reward:g} and {REWARD_TEXT} {beside:g}; a verifier writes one of them, "
            "or the same to both"
        )
    return reward, named


async def _read(slot: Slot, task: Task, path: str, parse: Callable[[str], _Read]) -> _Read | None:
    """What a file of the verifier's holds; None: there is no such file."""
    answer = await slot.run(wire.ReadFile(path=path, max_bytes=MAX_REWARD_BYTES))
    if isinstance(answer, wire.OpError):
        return None
    assert isinstance(answer, wire.FileResult)
    try:
        if answer.size > MAX_REWARD_BYTES:
            raise ValueError(f"{answer.size} bytes, more than {MAX_REWARD_BYTES}")
        # utf-8-sig: PowerShell and some editors begin a file with a byte-order mark.
        return parse(answer.data.decode("utf-8-sig", errors="replace").strip())
    except (ValueError, OverflowError, RecursionError) as error:  # 10**400, or brackets ten thousand deep
        raise VerifierFailed(f"{task.name}: {path} holds no reward: {error}") from None


def _summary(task: Task, result: ExecResult) -> tuple[float, dict[str, float]]:
    """terminal-bench 1: every test in pytest's short summary passed, was skipped or failed as expected."""
    output = _COLOUR.sub("", result.output)
    if result.truncated:
        # Only what came after the gap: before it, a program could have printed a summary of its own.
        output = output.rpartition(f"\n[... {result.dropped_bytes} bytes dropped ...]\n")[2]
    summary = _SUMMARY.search(output)
    outcomes = _OUTCOME.findall(summary[1]) if summary else []
    passed = sum(outcome in _PASSES for outcome in outcomes)
    if result.truncated and not (summary and _agrees(summary[1], failed=passed < len(outcomes))):
        raise VerifierFailed(
            f"{task.name}: {task.test_script} printed so much that {result.dropped_bytes} bytes in its middle were "
            "dropped, failed tests perhaps among them; let it print less"
        )
    if not outcomes:
        raise VerifierFailed(
            f"{task.name}: {task.test_script} printed no pytest summary with results (exit code {result.exit_code}); "
            f"run pytest with -rA: {result.output[-500:].strip()}"
        )
    reward = float(passed == len(outcomes))
    return reward, {"reward": reward, "tests": float(len(outcomes)), "passed": float(passed)}


def _agrees(summary: str, *, failed: bool) -> bool:
    """Whether the last line that pytest prints is there, and says the same: the start may be a program's output."""
    totals = _TOTAL.findall(summary)
    return bool(totals) and (_FAILURES.search(totals[-1]) is not None) == failed


def _number(text: str) -> float:
    return _finite(float(text))


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _numbers(text: str) -> dict[str, float]:
    value = json.loads(text)
    if not isinstance(value, dict) or not value:
        raise ValueError("it is not an object of numbers")
    numbers: dict[str, float] = {}
    for key, number in cast("dict[str, object]", value).items():
        if not isinstance(number, int | float):  # true is 1, as Harbor reads it
            raise ValueError(f"{number!r:.100} is not a number")  # noqa: TRY004 (it was read)
        numbers[key] = _finite(float(number))
    return numbers
