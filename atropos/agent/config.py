"""The settings and the result of an agent loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TypedDict

from atropos.agent.transcript import Message, Transcript
from atropos.errors import ConfigError
from atropos.tools import ToolCall, ToolResult
from atropos.tools.parsers.base import ParseError

StopReason = Literal["final", "max_steps", "max_time", "context_length", "max_tokens"]
"""Why a loop ended: the model gave its answer, or a bound on turns, context or one turn's tokens was reached."""


class PromptTooLong(ValueError):
    """The prompt alone doesn't fit the context: this item can't be run with these settings."""

    code = "prompt_too_long"


@dataclass(frozen=True)
class AgentConfig:
    """Bounds and sampling of one trajectory.

    Attributes:
        max_steps: most model turns. The calls of the last one are run too.
        temperature: sampling temperature.
        max_tokens: most tokens of one turn; None: what the context has left.
        tool_delay_s: pause after each tool call, in seconds.
        context_tokens: most tokens of the whole transcript; a turn that doesn't fit is not started.
        model_timeout_s: deadline of one turn's generation, retries included.
        model_retries: further tries after a failure that may pass (never after 4xx).
        system_prompt: text before the tools' description; None: a short default.
        tool_call_parser: the format of calls in model text.
        max_calls_per_turn: calls beyond it are answered with an error and not run.
        max_result_chars: of each tool result in the conversation; the middle of a longer one is left out.
        seed: sent with every request where set, so that a sampling server can repeat itself.
        timeout_s: time after which a call that runs is ended, no further one run, and no further turn begun; None: no
            limit. What requests that the inference server failed or broke off take is not counted.
    """

    max_steps: int = 50
    temperature: float = 0.7
    max_tokens: int | None = None
    tool_delay_s: float = 0.0
    context_tokens: int = 32_768
    model_timeout_s: float = 300.0
    model_retries: int = 2
    system_prompt: str | None = None
    tool_call_parser: str = "hermes"
    max_calls_per_turn: int = 32
    max_result_chars: int = 30_000
    seed: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        positive = ("max_steps", "context_tokens", "max_calls_per_turn", "max_result_chars")
        for name, least in (*((name, 1) for name in positive), ("model_retries", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(
                f"max_tokens must be at least 1, or None for the remaining context, not {self.max_tokens}"
            )
        for name in ("temperature", "tool_delay_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} can't be negative: {getattr(self, name)}")
        if self.model_timeout_s <= 0:
            raise ConfigError(f"model_timeout_s must be more than 0, not {self.model_timeout_s}")


class Outcome(NamedTuple):
    """A call and its result; no call where what the model wrote could not be read as one."""

    call: ToolCall | None
    result: ToolResult


class TurnTiming(TypedDict):
    """When a turn's generation began, its tokens, and seconds: of generation, of all its calls, and of each."""

    started_at: str
    tokens: int
    model_s: float
    tools_s: float
    calls_s: list[float]


@dataclass
class AgentStep:
    """One model turn and what its calls gave.

    Attributes:
        number: from 0.
        text: the model's text, calls included.
        content: the text without its calls.
        calls: of the turn, in order.
        unread: calls that could not be parsed.
        outcomes: of calls and unread ones, in order, as far as the time let them run. Those of a last turn are not in
            the conversation: the model never reads them.
        reasoning: the model's thinking, if the dialect separates it from the answer.
        model_s, tools_s: seconds spent in generation and in tools.
        started_at: when the generation began, in seconds since 1970.
    """

    number: int
    text: str
    content: str
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    unread: list[ParseError] = field(default_factory=list[ParseError])
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    reasoning: str = ""
    tokens: int = 0
    finish_reason: str = ""
    model_s: float = 0.0
    tools_s: float = 0.0
    started_at: float = 0.0

    @property
    def results(self) -> list[ToolResult]:
        """What the model reads of the turn's calls."""
        return [outcome.result for outcome in self.outcomes]

    def answers(self) -> list[Outcome]:
        """What the model is to read of the turn's calls: also that a call was not run, since each needs an answer."""
        ran = sum(outcome.call is not None for outcome in self.outcomes)
        late = ToolResult.failure("not run: the agent used all its time")
        return [*self.outcomes, *(Outcome(call, late) for call in self.calls[ran:])]

    def timing(self) -> TurnTiming:
        """What files keep of the turn beside its messages and tokens, rounded."""
        return {
            "started_at": datetime.fromtimestamp(self.started_at, UTC).isoformat(timespec="milliseconds"),
            "tokens": self.tokens,
            "model_s": round(self.model_s, 4),
            "tools_s": round(self.tools_s, 4),
            "calls_s": [round(result.duration_s, 4) for result in self.results],
        }


@dataclass
class AgentResult:
    """How a trajectory went.

    Attributes:
        success: whether the model ended with an answer.
        error: the bound that ended it otherwise, in words; None on success.
        final_response: the text of the last turn, without calls.
        trajectory_data: tokens, masks, logprobs, messages.
        stop_reason: which bound, or `final`.
    """

    success: bool
    error: str | None
    final_response: str
    steps: list[AgentStep]
    trajectory_data: Transcript
    total_tool_calls: int
    stop_reason: StopReason = "final"

    @property
    def messages(self) -> list[Message]:
        """The conversation, as it reaches the trainer."""
        return self.trajectory_data.messages

    @property
    def tool_errors(self) -> int:
        """Results that are errors: of tools, of calls that could not be read, of calls that were not run."""
        return sum(result.error is not None for step in self.steps for result in step.results)
