"""Environments over atroposlib. Importing a name costs atroposlib's import (about 3 s), so it happens on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atropos.envs.adapter import APIServerConfig
    from atropos.envs.agent_env import AgentEnv
    from atropos.envs.config import AgentEnvConfig, SandboxEnvConfig
    from atropos.envs.sandbox_env import SandboxEnv

_HOMES = {
    "APIServerConfig": "adapter",
    "AgentEnv": "agent_env",
    "AgentEnvConfig": "config",
    "SandboxEnv": "sandbox_env",
    "SandboxEnvConfig": "config",
}

__all__ = ["APIServerConfig", "AgentEnv", "AgentEnvConfig", "SandboxEnv", "SandboxEnvConfig"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
