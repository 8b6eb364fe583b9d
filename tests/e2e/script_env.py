"""An env for the command line in tests: each item carries the policy's script, the score comes from the slot."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from atropos.envs import AgentEnv
from atropos.envs.reporting import watch
from atropos.tools import ToolCall


class ScriptEnv(AgentEnv):
    """Writes a number into its workspace and is scored by it: 1 for even members of a group, else 0."""

    name = "script"

    async def setup_agent_env(self) -> None:
        self.numbers = itertools.count()

    async def get_next_item(self) -> dict[str, Any]:
        return {"name": f"item-{next(self.numbers)}"}

    def build_task(self, item: dict[str, Any]) -> str:
        calls = [{"name": "terminal", "arguments": {"command": f"echo {item['name']} >> answer; cat answer"}}]
        return f"```policy\n{json.dumps([{'text': 'é 日本', 'calls': calls}, 'done'])}\n```"

    async def verify_and_score_trajectory(
        self, item: Any, final_response: str, *, trajectory_id: str, exec_tool: Any, agent_result: Any
    ) -> tuple[float, dict[str, Any]]:
        result = await exec_tool(ToolCall(name="terminal", arguments={"command": "cat answer"}))
        assert result.output == f"{item['name']}\n", result.output
        member = re.sub(r"-r\d+$", "", trajectory_id).rpartition("-")[2]  # an attempt's number ends its id
        return float(int(member) % 2 == 0), {}


if __name__ == "__main__":
    watch.WAITED_S = 2.0  # a test's patience
    ScriptEnv.cli()
