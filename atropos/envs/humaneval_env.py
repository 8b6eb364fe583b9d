"""HumanEval in slots: the model writes /workspace/solution.py, the problem's tests decide.

    python -m atropos.envs.humaneval_env evaluate --env.humaneval_path HumanEval.jsonl.gz --env.tool_pool_mode local ...

Only the solution is copied into a fresh slot and judged there (`humaneval_check.py`), so that nothing else that the model
left has an effect.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import Field

from atropos import wire
from atropos.agent import AgentResult
from atropos.envs.adapter import ServerConfigs
from atropos.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atropos.envs.running.rollout import TaskFault
from atropos.envs.sandbox_env import ExecTool
from atropos.errors import ConfigError, SandboxError
from atropos.slots import Slot

SOLUTION = "/workspace/solution.py"
MAX_SOLUTION_BYTES = 256 * 1024
"""Longest solution that is judged; a longer one scores 0."""
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
CHECKER = Path(__file__).with_name("humaneval_check.py").read_text(encoding="utf-8")
"""The program that runs a problem's tests in a slot."""
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class HumanEvalProblem:
    """One line of HumanEval."""

    name: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


class HumanEvalEnvConfig(DatasetEnvConfig):
    """Where the problems are."""

    humaneval_path: str = Field(
        default="HumanEval.jsonl.gz", min_length=1, description="the problems, as JSONL or JSONL.gz"
    )
    verify_timeout_s: float = Field(default=60.0, gt=0, description="longest the tests of one problem may take")


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


def answer_in(text: str) -> str | None:
    """The last fenced block of a final answer, for models that answer instead of writing the file."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


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


class HumanEvalEnv(DatasetEnv):
    """One trajectory solves one problem; 1.0 when its tests pass."""

    name = "humaneval_env"
    env_config_cls = HumanEvalEnvConfig
    config: HumanEvalEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, config: HumanEvalEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        problems = load_problems(config.humaneval_path)
        config.allow_network = False  # no problem needs a network
        super().__init__(config, server_configs, slurm, testing)
        self.items: list[HumanEvalProblem] = problems

    def build_task(self, item: HumanEvalProblem) -> str:
        """The problem, and where the answer goes."""
        return (
            f"Complete this Python function. Write the whole module, imports and helpers included, to {SOLUTION}, and try "
            f"it with python3 before you finish.\n\n```python\n{item.prompt.rstrip()}\n```"
        )

    async def verify_and_score_trajectory(
        self,
        item: HumanEvalProblem,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        agent_result: AgentResult,
    ) -> tuple[float, dict[str, object]]:
        """Read the solution, then judge it in a fresh slot."""
        solution, missing = await self._solution(trajectory_id, final_response)
        if solution is None:
            return 0.0, {"problem": item.name, "detail": missing}
        # Released before the next is leased, so that verification can't deadlock on a full pool.
        await self.executor.release_trajectory(trajectory_id)
        slot = await self.executor.slot(trajectory_id)
        passed, detail = await judge(slot, item, solution, timeout_s=self.config.verify_timeout_s)
        return float(passed), {"problem": item.name, "detail": detail}

    async def _solution(self, trajectory_id: str, final_response: str) -> tuple[str | None, str]:
        """The solution, or None and why there is none."""
        slot = await self.executor.slot(trajectory_id)
        result = await slot.run(wire.ReadFile(path=SOLUTION, max_bytes=MAX_SOLUTION_BYTES + 1))
        if not isinstance(result, wire.FileResult):
            return answer_in(final_response), f"no {SOLUTION}, and no code in the answer"
        if len(result.data) > MAX_SOLUTION_BYTES:
            return None, f"{SOLUTION} is longer than {MAX_SOLUTION_BYTES:,} bytes"
        return result.data.decode("utf-8", errors="replace"), ""


if __name__ == "__main__":
    HumanEvalEnv.cli()
