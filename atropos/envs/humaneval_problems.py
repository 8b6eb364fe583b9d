"""HumanEval's problems, and the judge of a solution: neither needs atroposlib."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from atropos.envs.running.rollout import TaskFault
from atropos.errors import ConfigError, SandboxError
from atropos.slots import Slot

FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
CHECKER = Path(__file__).with_name("humaneval_check.py").read_text(encoding="utf-8")
"""The program that runs a problem's tests in a slot."""


@dataclass(frozen=True)
class HumanEvalProblem:
    """One line of HumanEval."""

    name: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


def load_problems(path: str | Path) -> list[HumanEvalProblem]:
    """Read HumanEval from JSONL or JSONL.gz.

    Raises:
        ConfigError: the file can't be read, or a line is not a problem; names the line.
    """
    source = Path(path)
    try:
        raw = source.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"humaneval_path: {source} can't be read ({error}); give HumanEval.jsonl.gz") from None
    lines = enumerate(text.split("\n"), 1)  # JSON's strings may hold what else `splitlines` ends a line at
    problems = [_problem(line, f"humaneval_path: {source}, line {number}") for number, line in lines if line.strip()]
    if not problems:
        raise ConfigError(f"humaneval_path: {source} holds no problem; give HumanEval.jsonl.gz")
    return problems


def _problem(line: str, where: str) -> HumanEvalProblem:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not an object with {', '.join(FIELDS)}")
    fields = cast("dict[str, object]", row)
    for field in FIELDS:
        if not isinstance(fields.get(field), str):
            raise ConfigError(f"{where}: {field} is missing or no text")
    return HumanEvalProblem(*(str(fields[field]) for field in FIELDS))


async def judge(slot: Slot, problem: HumanEvalProblem, solution: str, *, timeout_s: float) -> tuple[bool, str]:
    """Whether a solution passes in a slot that the model has not used, and the reason if it doesn't.

    Raises:
        SandboxError: the infrastructure failed.
        TaskFault: the problem's tests can't be run.
        ConfigError: the slot has one user alone.
    """
    content = {"prompt": problem.prompt, "test": problem.test, "entry_point": problem.entry_point}
    await slot.write_file("/check/problem.json", json.dumps(content), 0o600)
    await slot.write_file("/check/solution.py", solution.encode("utf-8", "surrogatepass"), 0o600)
    await slot.write_file("/check/check.py", CHECKER, 0o600)
    command = "chmod 700 /check && exec python3 -I /check/check.py /check/problem.json /check/solution.py"
    result = await slot.exec(command, workdir="/", clean_env=True, timeout_s=timeout_s)
    if result.timed_out:  # calls are bounded by what they compute: a host that stalls says nothing about a solution
        result = await slot.exec(command, workdir="/", clean_env=True, timeout_s=timeout_s)
    if result.timed_out or result.limit is not None:
        return False, f"stopped by a limit: {result.limit or 'time'}"
    try:
        verdict = cast("dict[str, object]", json.loads(result.output.strip().splitlines()[-1]))
        if "broken" in verdict:
            raise TaskFault(f"the tests of {problem.name} can't be run: {verdict['broken']}")
        return verdict["passed"] is True, str(verdict["detail"])
    except (ValueError, IndexError, KeyError, TypeError):
        for feature in (await slot.capabilities()).features:
            if feature.name == "separate_ids" and not feature.ok:
                raise ConfigError(
                    f"HumanEval needs slots with a second user, from whom its tests are hidden: {feature.fix}"
                ) from None
        raise SandboxError(
            f"the check of {problem.name} ended with {result.exit_code}: {result.output[-300:]}"
        ) from None
