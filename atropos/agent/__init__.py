"""The agent loop."""

from atropos.agent.agent import AtroposAgent, ExecuteTool, seed_for
from atropos.agent.config import AgentConfig, AgentResult, AgentStep, Outcome, PromptTooLong, StopReason
from atropos.agent.dialect import Dialect, Message, Turn, XmlDialect
from atropos.agent.model import Model
from atropos.agent.template import TurnRenderer
from atropos.agent.transcript import Transcript, sampled_runs
from atropos.errors import InferenceError

__all__ = [
    "AgentConfig",
    "AgentResult",
    "AgentStep",
    "AtroposAgent",
    "Dialect",
    "ExecuteTool",
    "InferenceError",
    "Message",
    "Model",
    "Outcome",
    "PromptTooLong",
    "StopReason",
    "Transcript",
    "Turn",
    "TurnRenderer",
    "XmlDialect",
    "sampled_runs",
    "seed_for",
]
