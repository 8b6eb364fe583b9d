"""The env: each item is a door for one of the pupils; `python -m examples.learn.env serve ...`."""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import Field

from atropos.agent import AgentResult
from atropos.envs import AgentEnv, AgentEnvConfig
from atropos.envs.config import Names
from atropos.envs.sandbox_env import ExecTool
from atropos.tools import ToolCall, ToolRegistry, build_tool_registry
from examples.learn.task import CHECK, WORDS, Door, door


class LearnConfig(AgentEnvConfig):
    """The pupils."""

    pupils: Names = Field(default_factory=lambda: ["amy"], description="pupils, who take turns with the items")


class LearnEnv(AgentEnv):
    """Scores the files in the slot after the agent has ended."""

    name = "learn"
    env_config_cls: Any = LearnConfig

    def build_tools(self) -> ToolRegistry:
        """Two tools."""
        every = build_tool_registry(["default"])
        return ToolRegistry([tool for tool in every if tool.name in {"terminal", "write_file"}])

    async def setup_agent_env(self) -> None:
        """Items are numbers; every pupil gets the same ones."""
        self.doors = (door(number, pupil, WORDS) for number in itertools.count() for pupil in self.config.pupils)

    async def get_next_item(self) -> Door:
        """The next door."""
        return next(self.doors)

    def build_task(self, item: Door) -> str:
        """The user's message."""
        return item.task()

    async def setup_trajectory_workspace(
        self, item: Door, *, trajectory_id: str, exec_tool: ExecTool
    ) -> dict[str, Any]:
        """The notes, and the program that opens them."""
        result = await exec_tool(ToolCall(name="terminal", arguments={"command": item.prepare()}))
        assert result.exit_code == 0, result.output
        return {}

    async def verify_and_score_trajectory(
        self, item: Door, final_response: str, *, trajectory_id: str, exec_tool: ExecTool, agent_result: AgentResult
    ) -> tuple[float, dict[str, Any]]:
        """Score by the slot's files only."""
        result = await exec_tool(ToolCall(name="terminal", arguments={"command": CHECK}))
        return item.score(result.output), {}


if __name__ == "__main__":
    LearnEnv.cli()
