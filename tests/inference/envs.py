"""The two envs of these tests: tasks that the tiny model was trained on; tools answer from a table."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from atropos.envs import AgentEnv, AgentEnvConfig, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
from examples.policy.tokenizer import FOLDER
from tests.inference import dialogs
from tests.unit.envs.support import StandInExecutor


class Table(StandInExecutor):
    """Answers as `dialogs.result` says."""

    async def execute(self, trajectory_id, tool_call):
        await asyncio.sleep(0)
        self.lease(trajectory_id)
        return dialogs.result(tool_call)


class Tasks:
    """So many tasks; no slots."""

    left = 0

    def build_tools(self):
        return dialogs.tools()

    async def start_tool_backend(self, tools=None):
        self.backend.executor = Table(tools or self.build_tools())

    async def get_next_item(self):
        self.left -= 1
        return {"name": f"t{self.left}", "prompt": dialogs.task(random.Random(self.left))} if self.left >= 0 else None


class Agent(Tasks, AgentEnv):
    name = "real_agent"

    def build_task(self, item):
        return item["prompt"]

    async def score_trajectory(self, item, final_response):
        return random.Random(final_response).random()


class Hermes(Tasks, HermesAgentBaseEnv):
    name = "real_hermes"

    async def compute_reward(self, item, result, ctx):
        return random.Random(result.final_response).random()


ENVS: dict[str, tuple[type[Any], type[Any], dict[str, object]]] = {
    "agent": (Agent, AgentEnvConfig, {"tool_pool_mode": "local", "agent_system_prompt": dialogs.SYSTEM}),
    "hermes": (Hermes, HermesAgentEnvConfig, {"terminal_backend": "local", "system_prompt": dialogs.SYSTEM}),
}


def make(
    name: str, url: str, path: Any, *, groups: int, server_type: str = "vllm", model: str = "default", **settings: Any
):
    """An env against the server at `url`, whose groups go to `path`."""
    cls, config, own = ENVS[name]
    values = {
        "tokenizer_name": str(FOLDER),
        "use_wandb": False,
        "group_size": 4,
        "include_messages": True,
        "ensure_scores_are_not_same": False,
        "data_path_to_save_groups": str(path),
        "slots_per_container": 32,
        "max_containers": 1,
        **own,
        **settings,
    }
    env = cls(config(**values), [APIServerConfig(base_url=url, server_type=server_type, model_name=model, api_key="x")])
    env.left = env.n_groups_to_process = groups
    return env
