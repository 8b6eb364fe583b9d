"""A SWE-style env: a repository with a bug, prepared once a group and forked for each member, scored by hidden tests.

    python -m examples.envs.swe_env process --env.tokenizer_name ... --openai.base_url ... --openai.server_type vllm

Rows (`--env.dataset_name FILE.jsonl`) have `issue`, `files` (name to text), and `tests` (name to text) that are written
only after the agent has finished, into a fork of its workspace. Without a dataset, one small built-in bug is used.
"""

from __future__ import annotations

import itertools
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
    "tests": {
        "test_hidden.py": "import unittest\nfrom stats import median\n\n\nclass Hidden(unittest.TestCase):\n"
        "    def test_even(self):\n        self.assertEqual(median([4, 1, 3, 2]), 2.5)\n\n"
        "    def test_odd(self):\n        self.assertEqual(median([9, 1, 5]), 5)\n",
    },
}


class SweEnv(HermesAgentBaseEnv):
    """The share of test files that pass, the repository's own included."""

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
        """Once a group: what is slow here (a clone, a build) costs the members nothing."""
        for name, text in item["files"].items():
            ctx.write_file(name, text)
        made = ctx.terminal(
            "git init -q . && git add -A && git -c user.name=x -c user.email=x@x commit -q -m 'As it was'"
        )
        assert made["exit_code"] == 0, made["output"]

    async def compute_reward(self, item: Any, result: Any, ctx: ToolContext) -> float:
        """Hidden tests in a fork: nothing that the agent left running is there, and it can't see them."""
        async with ctx.fork() as clean:
            visible = [name for name in item["files"] if name.startswith("test_")]
            for name in visible:  # tests that the agent weakened count as they were
                clean.write_file(name, item["files"][name])
            for name, text in item["tests"].items():
                clean.write_file(name, text)
            passed = 0
            for name in [*visible, *item["tests"]]:
                run = clean.terminal(f"python3 -B -m unittest -q {name.removesuffix('.py')}", timeout=120)
                passed += run["exit_code"] == 0 and run["output"].rstrip().endswith("OK")
        return float(passed == len(visible) + len(item["tests"]))


if __name__ == "__main__":
    SweEnv.cli()
