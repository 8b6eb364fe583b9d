"""A SWE-style env: a repository with a bug, prepared once a group and forked for each member, scored by hidden tests.

    python -m examples.envs.swe_env process --env.tokenizer_name ... --openai.base_url ... --openai.server_type vllm

Rows (`--env.dataset_name FILE.jsonl`) have `issue`, `files` (name to text) and `checks`: calls of the solution with
what they must give. Without a dataset, one small built-in bug is used.

How not to be cheated, which is what this example is about:
- Tests that import the solution share a process with it, and the solution can end that process with 0, patch
  `assertEqual` or bring its own `unittest.py`. So the solution only *answers*: it is called in the slot, and its
  answers are compared here, in the env's process. What they should be is never in any slot.
- The agent's slot is not trusted either (`sitecustomize.py`, another `git`, a daemon): its work is taken as a diff and
  applied to the original files in a fresh slot. A diff is data, whoever wrote it.
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

from atropos.envs import HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext

BUILT_IN = {
    "name": "median",
    "issue": "median([4, 1, 3, 2]) gives 3; for an even count it should be the mean of the two middle values.",
    "files": {
        "stats.py": "def median(values):\n    ordered = sorted(values)\n    return ordered[len(ordered) // 2]\n",
        "test_stats.py": "import unittest\nfrom stats import median\n\n\nclass Test(unittest.TestCase):\n"
        "    def test_odd(self):\n        self.assertEqual(median([3, 1, 2]), 2)\n",
    },
    "checks": [
        {"call": "stats.median", "arguments": [[4, 1, 3, 2]], "gives": 2.5},
        {"call": "stats.median", "arguments": [[9, 1, 5]], "gives": 5},
        {"call": "stats.median", "arguments": [[-1, -8]], "gives": -4.5},
    ],
}
DIFF = (
    "git add -A && git diff --cached --binary $(git rev-list --max-parents=0 HEAD | tail -n 1) 2>/dev/null | base64 -w0"
)
"""The agent's work since the first commit, its own commits included."""
CALLER = """\
import importlib, json, sys
answers, calls = [], json.load(sys.stdin)
sys.path.insert(0, "/workspace")
for call in calls:
    module, _, function = call["call"].rpartition(".")
    try:
        answers.append(getattr(importlib.import_module(module), function)(*call["arguments"]))
    except BaseException as error:
        answers.append({"raised": repr(error)[:200]})
print("\\n" + json.dumps(answers))
"""
"""Calls the solution and prints its answers in one line. It runs beside the solution, so nothing in it is a secret."""


class SweEnv(HermesAgentBaseEnv):
    """1 where every hidden check holds for the original repository with the agent's diff, else 0."""

    name = "swe_env"
    env_config_cls: Any = HermesAgentEnvConfig

    async def setup(self) -> None:
        """Rows, once through when processing; the built-in bug where there is no dataset."""
        self.rows = self.load_rows() if self.config.dataset_name else itertools.repeat(BUILT_IN)

    async def get_next_item(self) -> Any:
        """The next repository."""
        return next(self.rows, None)

    def format_prompt(self, item: Any) -> str:
        """The issue."""
        return f"The repository in /workspace has a bug. Find and mend it; keep the tests passing.\n\n{item['issue']}"

    async def setup_group(self, item: Any, ctx: ToolContext) -> None:
        """Once a group, so that slow steps (a clone, a build) are shared by its members."""
        for name, text in item["files"].items():
            ctx.write_file(name, text)
        ctx.terminal(
            "git init -q . && git add -A && git -c user.name=x -c user.email=x@x commit -q -m 'As it was'", check=True
        )

    async def compute_reward(self, item: Any, result: Any, ctx: ToolContext) -> float:
        """Take the agent's diff, call the patched solution in a fresh slot, and compare its answers here."""
        diff = ctx.terminal(DIFF, timeout=60)
        if diff["exit_code"] != 0 or "truncated" in diff:
            return 0.0
        # Given back before the next is taken, so that verifying can't wait for itself on a full pool.
        await self.executor.release_trajectory(ctx.trajectory_id)
        return float(self.checks_hold(item, diff["output"], ctx))

    def checks_hold(self, item: Any, diff: str, fresh: ToolContext) -> bool:
        """Whether the original files with this diff pass the checks."""
        for name, text in item["files"].items():
            fresh.write_file(name, text)
        try:
            fresh.write_file("/tmp/agent.diff", base64.b64decode(diff, validate=True))
        except ValueError:
            return False
        applied = fresh.terminal("test ! -s /tmp/agent.diff || git apply /tmp/agent.diff")
        if applied["exit_code"] != 0:
            return False
        calls = [{"call": check["call"], "arguments": check["arguments"]} for check in item["checks"]]
        fresh.write_file("/tmp/calls.json", json.dumps(calls))
        fresh.write_file("/tmp/caller.py", CALLER)
        ran = fresh.terminal("python3 -I -B /tmp/caller.py < /tmp/calls.json 2>/dev/null", timeout=120)
        try:
            answers = json.loads(ran["output"].rstrip().rpartition("\n")[2])
        except (ValueError, RecursionError):
            return False
        return answers == [check["gives"] for check in item["checks"]]


if __name__ == "__main__":
    SweEnv.cli()
