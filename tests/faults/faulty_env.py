"""The env of test_serve_faults: kills a fifth of its sandboxes, and keeps a journal of what it was given and did.

`ATROPOS_TEST_JOURNAL` names the journal: JSON lines of items given out, of tools that ran twice, and, at the end, of
the env's counters.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from atropos.tools import ToolCall, ToolRegistry
from tests.e2e.own_tools import tally
from tests.e2e.test_env_faults import KILLED, NumberingEnv, Work

JOURNAL = Path(os.environ["ATROPOS_TEST_JOURNAL"])


def note(**entry: Any) -> None:
    with JOURNAL.open("a") as journal:
        journal.write(json.dumps(entry) + "\n")


class FaultyEnv(NumberingEnv):
    """Endless items; the first call of an attempt is also counted by a ToolServer, under the attempt's name."""

    name = "faulty"
    kills = KILLED

    async def setup_agent_env(self) -> None:
        self.numbers, self.work = itertools.count(), Work()

    def build_tools(self) -> ToolRegistry:
        registry = super().build_tools()
        registry.register(tally)
        return registry

    async def get_next_item(self) -> dict[str, Any]:
        name = f"item-{next(self.numbers)}"
        note(given=name)
        return {"name": name}

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> Any:
        if not self.work.calls[trajectory_id]:
            counted = await super(NumberingEnv, self).execute_tool(
                trajectory_id, ToolCall(name="tally", arguments={"key": trajectory_id})
            )
            if counted.output != "1":
                note(twice=trajectory_id, output=counted.output, error=counted.error)
        return await super().execute_tool(trajectory_id, call)

    async def shutdown_tool_backend(self) -> None:
        note(metrics=self.metrics.as_dict(), killed=len(self.work.killed))
        await super().shutdown_tool_backend()


if __name__ == "__main__":
    FaultyEnv.cli()
