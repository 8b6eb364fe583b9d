"""Terminal sessions of an env's trajectories are kept beside them, as asciinema v2, and executors give everything back."""

from __future__ import annotations

import json
import re
from pathlib import Path

from atropos.envs import AgentEnv
from tests.e2e.hermes_support import running_policy
from tests.settings import shows
from tests.unit.envs.support import ScriptEnv, make

SCRIPT = [
    {"calls": [{"name": "session", "arguments": {"action": "start", "command": "sh", "rows": 10, "cols": 60}}]},
    {"calls": [{"name": "session", "arguments": {"action": "send", "text": "echo $((6*7)) é", "keys": ["Enter"]}}]},
    {"calls": [{"name": "session", "arguments": {"action": "wait", "pattern": "42"}}]},
    {"calls": [{"name": "session", "arguments": {"action": "resize", "rows": 12, "cols": 70}}]},
    {"calls": [{"name": "session", "arguments": {"action": "send", "keys": ["C-d"]}}]},
    "done",
]


class SessionEnv(ScriptEnv):
    """A script with real slots."""

    start_tool_backend = AgentEnv.start_tool_backend


def check_cast(path: Path) -> str:
    """The file is what asciicast v2 says; answers all output."""
    header, *events = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["version"] == 2
    assert (header["width"], header["height"]) == (60, 10)
    assert isinstance(header["timestamp"], int)
    assert set(header) <= {
        "version",
        "width",
        "height",
        "timestamp",
        "duration",
        "idle_time_limit",
        "command",
        "title",
        "env",
    }
    last = 0.0
    for at, code, data in events:
        assert isinstance(at, float | int)
        assert at >= last
        last = at
        assert code in {"o", "i", "m", "r"}
        assert isinstance(data, str)
        assert code != "r" or re.fullmatch(r"\d+x\d+", data)
    assert {event[1] for event in events} == {"o", "i", "r"}
    return "".join(event[2] for event in events if event[1] == "o")


@shows("record_sessions")
async def test_recordings_are_beside(tmp_path: Path):
    path = tmp_path / "out" / "groups.jsonl"
    async with running_policy(tmp_path) as (url, _):
        env = make(
            SessionEnv,
            url,
            path,
            group_size=2,
            slots_per_container=2,
            max_containers=1,
            enabled_toolsets=["session"],
            record_sessions=True,
            total_steps=1,
        )
        env.items = [{"name": "one", "script": SCRIPT}]
        await env.process_manager()
    [group] = [json.loads(line) for line in path.read_text().splitlines()]
    names = {one["trajectory_id"] for one in group["atropos"]["trajectories"]}
    casts = sorted((tmp_path / "out" / "groups.recordings").iterdir())
    assert len(casts) == 2
    assert {cast.name.rpartition("-proc")[0] for cast in casts} == names
    for cast in casts:
        assert "42 é" in check_cast(cast)
    assert path.with_suffix(".html").exists()
