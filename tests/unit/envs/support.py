"""An env whose items carry the policy's script, and an executor that does what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from atropos import wire
from atropos.envs import AgentEnv, AgentEnvConfig, APIServerConfig
from atropos.tools import ToolCall, ToolResult
from examples.policy.tokenizer import FOLDER


def call(command: str, **more: Any) -> dict[str, Any]:
    return {"name": "terminal", "arguments": {"command": command, **more}}


def turns(*steps: Any) -> str:
    return f"```policy\n{json.dumps(list(steps))}\n```"


class Snapshot:
    dropped = False

    async def drop(self) -> None:
        self.dropped = True
        await asyncio.sleep(0)


class Slot:
    profile = SimpleNamespace(workdir="/workspace")

    def __init__(self, executor: StandInExecutor) -> None:
        self.executor = executor

    async def run(self, _operation: wire.Operation) -> wire.OpError:
        return wire.OpError(error="not_found", message="a stand-in")

    async def snapshot(self) -> Snapshot:
        self.executor.snapshots.append(Snapshot())
        return self.executor.snapshots[-1]


class StandInExecutor:
    """Remembers what is leased and never runs anything; `fault(trajectory, call)` may raise."""

    def __init__(self, tools: Any, fault: Callable[[str, ToolCall], None] | None = None) -> None:
        self.tools = tools
        self.fault = fault
        self.live: set[str] = set()
        self.released: list[str] = []
        self.forks: list[tuple[str, Snapshot]] = []
        self.snapshots: list[Snapshot] = []
        self.most = 0
        self.closed = False

    def lease(self, trajectory_id: str) -> None:
        assert trajectory_id not in self.released, "a released trajectory's id came back"
        self.live.add(trajectory_id)
        self.most = max(self.most, len(self.live))

    def mistake_in(self, tool_call: ToolCall) -> str | None:
        return None if self.tools is None or tool_call.name in self.tools else self.tools.unknown(tool_call.name)

    async def execute(self, trajectory_id: str, tool_call: ToolCall) -> ToolResult:
        self.lease(trajectory_id)
        await asyncio.sleep(0.001)
        if self.fault is not None:
            self.fault(trajectory_id, tool_call)
        return ToolResult(success=True, output=f"ran {tool_call.arguments}", exit_code=0)

    async def check_alive(self, trajectory_id: str) -> None:
        pass

    def has_slot(self, trajectory_id: str) -> bool:
        return False  # no view can be opened of its slots

    def acquire_s(self, trajectory_id: str) -> float:
        return 0.001 if trajectory_id in self.live else 0.0

    async def slot(self, trajectory_id: str) -> Slot:
        self.lease(trajectory_id)
        return Slot(self)

    async def start_from(self, trajectory_id: str, snapshot: Snapshot) -> Slot:
        assert not snapshot.dropped
        self.lease(trajectory_id)
        self.forks.append((trajectory_id, snapshot))
        return Slot(self)

    async def release_trajectory(self, trajectory_id: str, reset_workspace: bool = True) -> None:
        self.live.discard(trajectory_id)
        self.released.append(trajectory_id)

    async def close(self) -> None:
        self.closed = True


class ScriptEnv(AgentEnv):
    """Items are policy scripts; the score is the length of the final answer."""

    name = "script"
    items: list[Any]
    fault: Callable[[str, ToolCall], None] | None = None
    stand_in: StandInExecutor

    async def start_tool_backend(self, tools: Any = None) -> None:
        self.stand_in = StandInExecutor(tools or self.build_tools(), self.fault)
        self.backend.executor = self.stand_in  # type: ignore[assignment]

    async def get_next_item(self) -> Any:
        return self.items.pop(0) if self.items else None

    def build_task(self, item: Any) -> str:
        return turns(*item["script"])

    async def score_trajectory(self, item: Any, final_response: str) -> float:
        return float(len(final_response))


def items(count: int, *script: Any) -> list[dict[str, Any]]:
    return [{"name": f"item-{n}", "script": script or [{"calls": [call("ls")]}, "done"]} for n in range(count)]


def make(cls: type[ScriptEnv], url: str, path: Any, *, server_type: str = "vllm", **settings: Any) -> Any:
    config = AgentEnvConfig(
        **{
            "tool_pool_mode": "local",
            "tokenizer_name": str(FOLDER),
            "use_wandb": False,
            "group_size": 3,
            "include_messages": True,
            "ensure_scores_are_not_same": False,
            "data_path_to_save_groups": str(path) if path else None,
            "model_timeout_s": 20,
            **settings,
        }
    )
    env = cls(config, [APIServerConfig(base_url=url, server_type=server_type, model_name=str(FOLDER), api_key="x")])
    env.items = items(3)
    return env
