"""What must hold of groups that were sampled by a real server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.hermes_support import sampled
from tests.inference.servers import CACHE, RealServer

COUNTS: dict[str, int] = {}
"""Tokens that were compared, by test; `conftest.py` prints them."""


def groups_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def members_of(path: Path) -> list[dict[str, Any]]:
    """What the groups tell of each trajectory."""
    return [facts for group in groups_of(path) for facts in group["atropos"]["trajectories"]]


def assert_exact(path: Path, running: RealServer) -> int:
    """The sampled tokens of all groups, each of which is in the server's log under exactly its prompt."""
    log, count = running.sampled(), 0
    for group in groups_of(path):
        for index in range(len(group["tokens"])):
            for prompt, ids, _ in sampled(group, index):
                assert log.holds(prompt, ids)
                count += len(ids)
    return count


def assert_logprobs(path: Path) -> int:
    """The sampled tokens, whose logprobs are what float32 gives."""
    argv = [CACHE / "venv/bin/python", "tests/inference/recompute.py", CACHE / "model", path]
    found = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    assert found["worst"] < 1e-4
    return found["tokens"]


def assert_agents_act(path: Path) -> None:
    """The model called tools, read their results and answered."""
    members = members_of(path)
    ended = [
        facts for facts in members if facts["stop_reason"] == "final" and facts["calls"] > 1 and facts["steps"] > 1
    ]
    assert len(ended) > len(members) / 2


def assert_each_token_has_a_version(path: Path) -> None:
    for group in groups_of(path):
        for masks, facts in zip(group["masks"], group["overrides"], strict=True):
            told = [at for begin, end, _ in facts["weight_versions"] for at in range(begin, end)]
            assert told == [at for at, mask in enumerate(masks) if mask != -100]
