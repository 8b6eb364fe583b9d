"""A policy server, and Hermes envs that talk to it, for the tests beside this file."""

from __future__ import annotations

import contextlib
import json
import sys

from atropos.envs import APIServerConfig, HermesAgentEnvConfig
from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer, Settings
from examples.policy.tokenizer import FOLDER
from examples.policy.truth import claims
from tests.engines import SMALL
from tests.web_app import serving


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def script(*turns):
    return f"Follow this.\n```policy\n{json.dumps(turns)}\n```"


@contextlib.asynccontextmanager
async def running_policy(tmp_path, mistakes=0.0, **settings):
    """Base URL of a scripted policy, and its log of every token it sampled."""
    log = tmp_path / "truth.jsonl"
    server = PolicyServer(Policy(TASKS, mistakes=mistakes), Settings(**settings), log)
    async with serving(server.application()) as url:
        yield f"{url}/v1", log


def script_env(policy, **settings):
    """The command line of the script env's `process` on a small Nomad pool, as a user would type it."""
    command = [sys.executable, "-m", "tests.e2e.script_env", "process", "--openai.base_url", policy]
    command += ["--openai.server_type", "vllm", "--openai.model_name", "policy", "--env.use_wandb", "false"]
    common = {
        "tokenizer_name": FOLDER,
        "tool_pool_mode": "nomad",
        "slots_per_container": 2,
        "max_containers": 1,
        "slot_memory_mib": SMALL.memory_mib,
        "group_size": 2,
    }
    return command + [f"--env.{name}={value}" for name, value in {**common, **settings}.items()]


def make(cls, policy, tmp_path, rows, *, server_type="vllm", api_key="x", config_cls=HermesAgentEnvConfig, **settings):
    config = config_cls(
        **{
            "tokenizer_name": str(FOLDER),
            "use_wandb": False,
            "group_size": 2,
            "include_messages": True,
            "ensure_scores_are_not_same": False,
            "data_path_to_save_groups": str(tmp_path / "groups.jsonl"),
            "total_steps": -1,
            "enabled_toolsets": ["default"],
            **({"dataset_name": json.dumps(rows)} if rows else {}),
            "slots_per_container": 4,
            "max_containers": 1,
            "allow_network": False,
            "max_token_length": 16_384,
            **settings,
        }
    )
    url, _ = policy
    server = APIServerConfig(
        base_url=url,
        api_key=api_key,
        model_name="scripted-policy",
        server_type=server_type,
        **({"tokenizer_name": str(FOLDER)} if server_type != "openai" else {}),
    )
    env = cls(config, [server])
    env.group_size_to_process, env.n_groups_to_process = config.group_size, len(rows) or 2
    return env


def groups(tmp_path):
    path = tmp_path / "groups.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sampled(group, index):
    """(prompt, ids, logprobs) of every turn of a member, as its tokens, masks and logprobs say."""
    return list(claims(*(group[key][index] for key in ("tokens", "masks", "inference_logprobs"))))
