"""Environments over atroposlib. Importing a name costs atroposlib's import (1 to 2 s), so it happens on demand."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atropos.envs.adapter import APIServerConfig
    from atropos.envs.agent_env import AgentEnv
    from atropos.envs.config import AgentEnvConfig, SandboxEnvConfig
    from atropos.envs.hermes.base_env import HermesAgentBaseEnv
    from atropos.envs.hermes.config import HermesAgentEnvConfig
    from atropos.envs.hermes.tool_context import ToolContext
    from atropos.envs.humaneval_env import HumanEvalEnv, HumanEvalEnvConfig
    from atropos.envs.sandbox_env import SandboxEnv
    from atropos.envs.task_env import TaskEnv
    from atropos.envs.task_settings import TaskEnvConfig

_HOMES = {
    "APIServerConfig": "adapter",
    "AgentEnv": "agent_env",
    "AgentEnvConfig": "config",
    "HermesAgentBaseEnv": "hermes.base_env",
    "HermesAgentEnvConfig": "hermes.config",
    "HumanEvalEnv": "humaneval_env",
    "HumanEvalEnvConfig": "humaneval_env",
    "SandboxEnv": "sandbox_env",
    "SandboxEnvConfig": "config",
    "TaskEnv": "task_env",
    "TaskEnvConfig": "task_settings",
    "ToolContext": "hermes.tool_context",
}

__all__ = [
    "APIServerConfig",
    "AgentEnv",
    "AgentEnvConfig",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HumanEvalEnv",
    "HumanEvalEnvConfig",
    "SandboxEnv",
    "SandboxEnvConfig",
    "TaskEnv",
    "TaskEnvConfig",
    "ToolContext",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except KeyboardInterrupt:  # nothing is held yet, and nobody wants to read where it was
        print("interrupted while the environments were loaded", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
