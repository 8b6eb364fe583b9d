"""HumanEval in slots: the model writes /workspace/solution.py, the problem's tests decide.

    python -m atropos.envs.humaneval_env evaluate --env.humaneval_path HumanEval.jsonl.gz --env.tool_pool_mode local ...

Only the solution is copied into a fresh slot and judged there (`humaneval_check.py`), so that nothing else that the
model left has an effect.
"""

from __future__ import annotations

import re

from pydantic import Field

from atropos import wire
from atropos.agent import AgentResult
from atropos.envs.adapter import ServerConfigs
from atropos.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atropos.envs.humaneval_problems import HumanEvalProblem, judge, load_problems
from atropos.envs.sandbox_env import ExecTool

SOLUTION = "/workspace/solution.py"
MAX_SOLUTION_BYTES = 256 * 1024
"""Longest solution that is judged; a longer one scores 0."""
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


class HumanEvalEnvConfig(DatasetEnvConfig):
    """Where the problems are."""

    humaneval_path: str = Field(
        default="HumanEval.jsonl.gz", min_length=1, description="the problems, as JSONL or JSONL.gz"
    )
    verify_timeout_s: float = Field(default=60.0, gt=0, description="longest the tests of one problem may take")


def answer_in(text: str) -> str | None:
    """The last fenced block of a final answer, for models that answer instead of writing the file."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


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
            f"Complete this Python function. Write the whole module, imports and helpers included, to {SOLUTION}, and "
            f"try it with python3 before you finish.\n\n```python\n{item.prompt.rstrip()}\n```"
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
