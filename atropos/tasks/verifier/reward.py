"""Reads a verifier's reward: reward.json, reward.txt, or the summary of a pytest run."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from atropos import wire
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.format.config import StepSection
from atropos.tasks.format.task import Task

REWARD_TEXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
MAX_REWARD_BYTES = 65_536
LOG_CHARS = 4000
"""Tail of the verifier's output that is kept with the trajectory."""
_SUMMARY = re.compile(r"= short test summary info =+\r?\n(.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)
_PASSES = {"PASSED", "XFAIL", "SKIPPED"}


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
    """A task's reward, as `multi_step_reward_strategy` says; as in Harbor, of the steps that were reached."""
    rewards = [verdict.reward for verdict in verdicts]
    final = not task.steps or task.config.multi_step_reward_strategy == "final"
    return rewards[-1] if final else statistics.mean(rewards)


def passed(step: StepSection, verdict: Verdict) -> bool:
    """Whether the next step may follow; a reward that the verifier didn't write reaches no bound."""
    least = step.min_reward
    bounds = {} if least is None else least if isinstance(least, dict) else {"reward": least}
    return all(verdict.metrics.get(name, -math.inf) >= bound for name, bound in bounds.items())


async def read_verdict(slot: Slot, task: Task, result: ExecResult) -> Verdict:
    """What the tests that ended with `result` say.

    Raises:
        VerifierFailed: no reward could be read.
    """
    reward, metrics = _summary(task, result) if task.scoring == "pytest" else await _written(slot, task, result)
    return Verdict(reward, result.exit_code, result.output[-LOG_CHARS:], result.duration_s, metrics)


async def _written(slot: Slot, task: Task, result: ExecResult) -> tuple[float, dict[str, float]]:
    """The reward as Harbor has it: reward.json holds numbers by name; without one, reward.txt holds one number."""
    for path in (REWARD_JSON, REWARD_TEXT):
        answer = await slot.run(wire.ReadFile(path=path, max_bytes=MAX_REWARD_BYTES))
        if isinstance(answer, wire.OpError):
            continue
        assert isinstance(answer, wire.FileResult)
        text = answer.data.decode("utf-8", errors="replace").strip()
        try:
            if answer.size > MAX_REWARD_BYTES:
                raise ValueError(f"{answer.size} bytes, more than {MAX_REWARD_BYTES}")
            metrics = _numbers(json.loads(text)) if path == REWARD_JSON else {"reward": _number(text)}
        except (ValueError, OverflowError, RecursionError) as error:  # 10**400, or brackets ten thousand deep
            raise VerifierFailed(f"{task.name}: {path} holds no reward: {error}") from None
        return metrics.get("reward", next(iter(metrics.values()))), metrics
    killed = f", limit {result.limit}" if result.limit else ""
    raise VerifierFailed(
        f"{task.name}: {task.test_script} wrote no {REWARD_JSON} and no {REWARD_TEXT} "
        f"(exit code {result.exit_code}{killed}): {result.output[-500:].strip()}"
    )


def _summary(task: Task, result: ExecResult) -> tuple[float, dict[str, float]]:
    """terminal-bench 1: every test in pytest's short summary passed, was skipped or failed as expected."""
    if result.truncated:
        raise VerifierFailed(
            f"{task.name}: {task.test_script} printed so much that {result.dropped_bytes} bytes in its middle were dropped, "
            "failed tests perhaps among them; let it print less"
        )
    summary = _SUMMARY.search(_COLOUR.sub("", result.output))
    outcomes = _OUTCOME.findall(summary[1]) if summary else []
    if not outcomes:
        raise VerifierFailed(
            f"{task.name}: {task.test_script} printed no pytest summary with results (exit code {result.exit_code}); "
            f"run pytest with -rA: {result.output[-500:].strip()}"
        )
    passed = sum(outcome in _PASSES for outcome in outcomes)
    reward = float(passed == len(outcomes))
    return reward, {"reward": reward, "tests": float(len(outcomes)), "passed": float(passed)}


def _number(value: object) -> float:
    if not isinstance(value, int | float | str):  # true is 1, as Harbor reads it
        raise ValueError(f"{value!r:.100} is not a number")  # noqa: TRY004 (what was read is wrong, not a type here)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.100} is not finite")
    return number


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError("it is not an object of numbers")
    named = cast("dict[object, object]", value)
    return {str(key): _number(number) for key, number in named.items()}
