"""The agent loop."""

from atropos.agent.agent import AtroposAgent, ExecuteTool, seed_for
from atropos.agent.config import AgentConfig, AgentResult, AgentStep, PromptTooLong, StopReason
from atropos.agent.model import Model
from atropos.agent.template import TurnRenderer
from atropos.agent.transcript import Transcript, sampled_runs
from atropos.errors import InferenceError

__all__ = [
    "AgentConfig",
    "AgentResult",
    "AgentStep",
    "AtroposAgent",
    "ExecuteTool",
    "InferenceError",
    "Model",
    "PromptTooLong",
    "StopReason",
    "Transcript",
    "TurnRenderer",
    "sampled_runs",
    "seed_for",
]
