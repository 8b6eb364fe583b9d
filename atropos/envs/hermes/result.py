"""What a reward function gets of a rollout: `AtroposAgent`'s result, as a Hermes env names its parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from atropos.agent import AgentResult, AgentStep, Message, Transcript
from atropos.envs.hermes.dialect import written_arguments

MAX_TOOL_ERRORS = 50
"""Tool errors of a rollout that are recorded, the first."""
KEPT_CHARS = 2000
"""Of each part of a recorded tool error."""


@dataclass(frozen=True)
class ToolErrorRecord:
    """A call that ended with an error: its turn (from 1), what was asked and what came back, shortened."""

    turn: int
    tool_name: str
    arguments: str
    error: str
    tool_result: str


@dataclass(frozen=True)
class HermesResult:
    """How a rollout went.

    Attributes:
        run: the agent loop's own result.
    """

    run: AgentResult

    @property
    def transcript(self) -> Transcript:
        """Tokens, masks, logprobs and messages."""
        return self.run.trajectory_data

    @property
    def messages(self) -> list[Message]:
        """The conversation in OpenAI's form."""
        return self.run.messages

    @property
    def turns(self) -> list[AgentStep]:
        """The model's turns, with the seconds spent in each."""
        return self.run.steps

    @property
    def turns_used(self) -> int:
        """Number of model turns."""
        return len(self.run.steps)

    @property
    def final_response(self) -> str:
        """The text of the last turn, without calls and thinking."""
        return self.run.final_response

    @property
    def stop_reason(self) -> str:
        """`final`, or the bound that ended it: max_turns, context_length, max_tokens."""
        return "max_turns" if self.run.stop_reason == "max_steps" else self.run.stop_reason

    @property
    def finished_naturally(self) -> bool:
        """Whether the model ended with an answer without a call."""
        return self.run.success

    @property
    def reasoning_per_turn(self) -> list[str | None]:
        """Thinking by turn; None where there was none."""
        return [step.reasoning or None for step in self.run.steps]

    @property
    def tool_calls(self) -> int:
        """Calls made in all."""
        return self.run.total_tool_calls

    @property
    def tool_errors_count(self) -> int:
        """Results in the conversation that are errors, all of them."""
        return self.run.tool_errors

    @property
    def tool_errors(self) -> list[ToolErrorRecord]:
        """The first of the errors."""
        records = (
            ToolErrorRecord(
                step.number + 1,
                call.name[:200] if call else "",
                written_arguments(call)[:KEPT_CHARS] if call else "",
                result.error[:KEPT_CHARS],
                result.to_json()[:KEPT_CHARS],
            )
            for step in self.run.steps
            for call, result in step.outcomes
            if result.error is not None
        )
        return list(islice(records, MAX_TOOL_ERRORS))
