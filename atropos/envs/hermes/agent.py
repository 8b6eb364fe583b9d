"""The Hermes agent loop: OpenAI's messages, tool messages included, in two modes.

With an OpenAI-compatible server, the server reads the calls out of the model's text and tokens are placeholders. With
vLLM or SGLang, the transcript holds exactly the tokens given and sampled, appended and never rewritten, and our own
parser reads the calls.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from atropos.agent import Model, PromptTooLong, Transcript
from atropos.agent.agent import MIN_TURN_TOKENS
from atropos.agent.fairness import gate, gate_for
from atropos.agent.prompt import shorten
from atropos.envs.hermes.dialect import Dialect
from atropos.errors import ConfigError
from atropos.tools import ToolCall, ToolResult
from atropos.tools.models import new_call_id
from atropos.tools.parsers import Parser, parser_for
from atropos.tools.parsers.base import whole_text

StopReason = Literal["final", "max_turns", "context_length"]
MAX_CALLS = 32
"""Calls of one turn that are run; further ones are answered with an error."""
MAX_RESULT_CHARS = 30_000
KEPT_CHARS = 2000
"""Of each part of a recorded tool error."""
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolError:
    """A call that ended with an error: what was asked and what came back, shortened."""

    turn: int
    tool_name: str
    arguments: str
    error: str
    tool_result: str


@dataclass
class HermesTurn:
    """One model turn, with the seconds spent in it."""

    reasoning: str = ""
    calls: int = 0
    model_s: float = 0.0
    tools_s: float = 0.0


@dataclass
class HermesResult:
    """How a rollout went; what a reward function gets.

    Attributes:
        messages: the conversation in OpenAI's form.
        turns_used: model turns.
        finished_naturally: the model ended with an answer without a call.
        reasoning_per_turn: thinking text by turn; empty where there was none.
        tool_errors: bounded, the first of them.
        stop_reason: `final`, or the bound that ended it.
        turns: timings by turn.
    """

    transcript: Transcript
    stop_reason: StopReason = "final"
    final_response: str = ""
    tool_errors: list[ToolError] = field(default_factory=list[ToolError])
    turns: list[HermesTurn] = field(default_factory=list[HermesTurn])
    managed_state: dict[str, Any] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's form."""
        return self.transcript.messages

    @property
    def turns_used(self) -> int:
        """Model turns."""
        return len(self.turns)

    @property
    def finished_naturally(self) -> bool:
        """Whether the model ended by itself."""
        return self.stop_reason == "final"

    @property
    def reasoning_per_turn(self) -> list[str | None]:
        """Thinking by turn."""
        return [turn.reasoning or None for turn in self.turns]

    @property
    def tool_calls(self) -> int:
        """Calls made in all."""
        return sum(turn.calls for turn in self.turns)


@dataclass(frozen=True)
class HermesSettings:
    """Bounds and sampling.

    Attributes:
        max_turns: most model turns.
        context_tokens: most tokens of the whole transcript, and of one generation.
        extra_body: further request fields, in OpenAI mode alone.
        max_errors: tool errors recorded.
    """

    max_turns: int = 30
    temperature: float = 1.0
    context_tokens: int = 32_768
    system_prompt: str | None = None
    parser: str = "hermes"
    extra_body: dict[str, Any] | None = None
    model_timeout_s: float = 300.0
    model_retries: int = 2
    seed: int | None = None
    max_errors: int = 50


class HermesAgent:
    """Runs one rollout.

    Args:
        server: atroposlib's server manager, or anything of its shape.
        tokenizer: the model's, with a chat template.
        schemas: OpenAI schemas of the tools that this rollout is offered.
        settings: bounds and sampling.
        execute: runs one call; a raised `SandboxError` ends the rollout.
        dialect: of this tokenizer, these tools and this parser, where rollouts share it.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any,
        schemas: Sequence[dict[str, Any]],
        settings: HermesSettings,
        execute: Callable[[ToolCall], Awaitable[ToolResult]],
        *,
        dialect: Dialect | None = None,
    ) -> None:
        self.settings = settings
        self._model = Model(server, timeout_s=settings.model_timeout_s, retries=settings.model_retries)
        self._execute = execute
        self._schemas = list(schemas)
        self._parser: Parser = parser_for(settings.parser, tokenizer, self._schemas)
        self._dialect = dialect or Dialect(tokenizer, self._schemas, settings.parser)
        if settings.extra_body and self._model.exact:
            raise ConfigError("extra_body: only OpenAI-compatible servers take it; remove it for vllm and sglang")

    async def run(self, prompt: str) -> HermesResult:
        """Work until the model answers without a call, or a bound is reached.

        Raises:
            InferenceError: the server gave no usable answer.
            SandboxError: a tool's infrastructure failed.
            PromptTooLong: the prompt alone fills the context.
        """
        messages = self._opening(prompt)
        transcript = Transcript(messages=messages, placeholder=not self._model.exact)
        async with gate():
            transcript.add_context(self._dialect.opening(messages))
        if len(transcript) + MIN_TURN_TOKENS > self.settings.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(transcript)} tokens and the context {self.settings.context_tokens}: "
                "raise max_token_length or shorten the prompt"
            )
        result = HermesResult(transcript)
        while True:
            calls, unread, ids, cut_off = await self._turn(result)
            if cut_off:
                result.stop_reason = "context_length"
            elif not calls and not unread:
                result.stop_reason = "final"
            elif result.turns_used >= self.settings.max_turns:
                result.stop_reason = "max_turns"
            else:
                answers = await self._answers(result, calls, unread)
                async with gate():
                    context = self._dialect.following(answers, ids)
                if len(transcript) + len(context) + MIN_TURN_TOKENS <= self.settings.context_tokens:
                    transcript.messages.extend(answers)
                    transcript.add_context(context)
                    continue
                result.stop_reason = "context_length"
            transcript.check()
            return result

    def _opening(self, prompt: str) -> list[dict[str, Any]]:
        system = self.settings.system_prompt
        if self._model.exact:
            system = self._dialect.system(system)
        opening = [] if system is None else [{"role": "system", "content": system}]
        return [*opening, {"role": "user", "content": prompt}]

    async def _turn(self, result: HermesResult) -> tuple[list[ToolCall], list[str], list[int], bool]:
        """One generation, appended: its calls, errors of calls that can't be read, its ids, and whether it was cut."""
        started = time.perf_counter()
        turn = HermesTurn()
        result.turns.append(turn)
        ask = self._sample if self._model.exact else self._chat
        message, calls, unread, ids, cut_off = await ask(result.transcript, turn)
        turn.model_s = time.perf_counter() - started
        turn.calls = len(calls)
        if calls:
            message["tool_calls"] = [_openai_call(call) for call in calls]
        result.transcript.messages.append(message)
        result.final_response = _without_thinking(str(message["content"]))
        return calls, unread, ids, cut_off

    async def _sample(
        self, transcript: Transcript, turn: HermesTurn
    ) -> tuple[dict[str, Any], list[ToolCall], list[str], list[int], bool]:
        room = self.settings.context_tokens - len(transcript)
        sampling: dict[str, Any] = {"temperature": self.settings.temperature}
        if self.settings.seed is not None:
            sampling["seed"] = self.settings.seed
        generation = await self._model.generate(transcript.tokens, max_tokens=room, **sampling)
        ids = generation.ids[:room]
        transcript.add_sampled(ids, generation.logprobs[:room])
        async with gate_for(len(ids)):
            text = self._dialect.text(ids)
            parsed = self._parser.parse(_without_thinking(text))
        turn.reasoning = "\n".join(part.strip() for part in _THINK.findall(text))
        cut_off = generation.finish_reason == "length" or len(generation.ids) > room
        calls = [] if cut_off else list(parsed.calls)
        # The content keeps the thinking, as the model wrote it; calls stand in tool_calls.
        thinking = "".join(match[0] for match in _THINK.finditer(text))
        content = f"{thinking}{parsed.content}" if calls else text
        return (
            {"role": "assistant", "content": content},
            calls,
            [] if cut_off else [error.message for error in parsed.errors],
            ids,
            cut_off,
        )

    async def _chat(
        self, transcript: Transcript, turn: HermesTurn
    ) -> tuple[dict[str, Any], list[ToolCall], list[str], list[int], bool]:
        options: dict[str, Any] = {"temperature": self.settings.temperature, "max_tokens": self.settings.context_tokens}
        if self._schemas:
            options["tools"] = self._schemas
        if self.settings.seed is not None:
            options["seed"] = self.settings.seed
        if self.settings.extra_body:
            options["extra_body"] = self.settings.extra_body
        answer = await self._model.chat(transcript.messages, **options)
        content, unread = answer.content, list[str]()
        if answer.tool_calls:
            calls = [_call_of(call) for call in answer.tool_calls]
        else:  # a server that leaves the calls in the text
            parsed = self._parser.parse(_without_thinking(content))
            calls, unread = list(parsed.calls), [error.message for error in parsed.errors]
            content = parsed.content if calls else content
        thought = answer.reasoning or "\n".join(part.strip() for part in _THINK.findall(answer.content))
        turn.reasoning = thought
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        ids = self._dialect.placeholder(self._parser.render_turn(content, calls))
        transcript.add_sampled(ids, [0.0] * len(ids))
        return message, calls, unread, ids, answer.finish_reason == "length"

    async def _answers(
        self, result: HermesResult, calls: Sequence[ToolCall], unread: Sequence[str]
    ) -> list[dict[str, Any]]:
        """The turn's calls, run in order, as tool messages; what can't be read is answered in a user message."""
        started = time.perf_counter()
        answers: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            if index >= MAX_CALLS:
                outcome = ToolResult.failure(f"not run: more than {MAX_CALLS} calls in one turn")
            else:
                # Models repeat ids between turns, and to the executor the same id and call is the same work.
                outcome = await self._execute(call.model_copy(update={"id": new_call_id()}))
            content = whole_text(shorten(outcome, MAX_RESULT_CHARS).to_json())
            answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
            if outcome.error is not None and len(result.tool_errors) < self.settings.max_errors:
                result.tool_errors.append(_recorded(result.turns_used, call, outcome.error, content))
        for message in unread:
            content = ToolResult.failure(message).to_json()
            answers.append({"role": "user", "content": content})
            if len(result.tool_errors) < self.settings.max_errors:
                result.tool_errors.append(ToolError(result.turns_used, "", "", message, content))
        result.turns[-1].tools_s = time.perf_counter() - started
        return answers


def _without_thinking(text: str) -> str:
    """The text after its thinking; calls within that are not meant."""
    return _THINK.sub("", text).strip() if "<think>" in text else text


def _call_of(call: dict[str, Any]) -> ToolCall:
    arguments = call["arguments"]
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = arguments
    given = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else str(arguments)
    identity = str(call.get("id") or "")
    if 0 < len(identity) <= 200:
        return ToolCall(name=str(call["name"]), arguments=given, id=identity)
    return ToolCall(name=str(call["name"]), arguments=given)


def _openai_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _written(call)}}


def _written(call: ToolCall) -> str:
    """A call's arguments as text, without the halves of characters that JSON can say and messages can't."""
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return whole_text(arguments)


def _recorded(turn: int, call: ToolCall, error: str, content: str) -> ToolError:
    return ToolError(turn, call.name[:200], _written(call)[:KEPT_CHARS], error[:KEPT_CHARS], content[:KEPT_CHARS])
