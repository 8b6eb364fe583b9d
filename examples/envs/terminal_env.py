"""A terminal env over a folder of tasks, in twenty lines: the ready-made task env, with partial credit for short work.

python -m examples.envs.terminal_env process --env.tool_pool_mode local --env.tokenizer_name ... --openai.base_url ...
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from atropos.envs import TaskEnv, TaskEnvConfig


class TerminalEnvConfig(TaskEnvConfig):
    """The task env's settings, and how much a call costs."""

    call_cost: float = Field(default=0.01, ge=0, description="taken off a solved task's score for each tool call")


class TerminalEnv(TaskEnv):
    """The verifier's reward, less a little for every call: of two solutions the shorter one is better."""

    name = "terminal_env"
    env_config_cls: Any = TerminalEnvConfig

    async def verify_and_score_trajectory(
        self, item: Any, final_response: str, **context: Any
    ) -> tuple[float, dict[str, Any]]:
        """As `TaskEnv`, with the cost."""
        reward, details = await super().verify_and_score_trajectory(item, final_response, **context)
        cost = self.config.call_cost * context["agent_result"].total_tool_calls
        return max(0.0, reward - cost) if reward > 0 else reward, {**details, "reward": reward, "cost": cost}


if __name__ == "__main__":
    TerminalEnv.cli()
