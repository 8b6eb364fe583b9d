"""A real env program for these tests: `python slow_env.py process ...`. Each item is checked in the slot that did it.

There are items until the file UNTIL exists; a call takes WORK_S seconds; both are in the environment.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.e2e.script_env import ScriptEnv

UNTIL, WORK_S = Path(os.environ["UNTIL"]), os.environ["WORK_S"]


class SlowEnv(ScriptEnv):
    """Appends the item's name in one call and looks at it in another; the score depends on item and member."""

    async def setup_agent_env(self) -> None:
        self.numbers = itertools.count()

    async def get_next_item(self) -> dict[str, Any] | None:
        number = next(self.numbers)
        return None if UNTIL.exists() else {"name": f"item-{number}"}

    def build_task(self, item: dict[str, Any]) -> str:
        def call(command: str) -> dict[str, Any]:
            return {"calls": [{"name": "terminal", "arguments": {"command": f"sleep {WORK_S}; {command}"}}]}

        script = [call(f"echo {item['name']} >> answer; ls -A"), call("cat answer"), "done"]
        return f"```policy\n{json.dumps(script)}\n```"


if __name__ == "__main__":
    SlowEnv.cli()
