"""The format of a conversation with tools, the only part in which agent loops differ.

The loop (`AtroposAgent`) samples turns, runs calls and keeps the transcript. A dialect defines the messages, their
token ids, and how a model's turn is parsed. `AgentEnv` uses `XmlDialect`; `HermesAgentBaseEnv` uses OpenAI's tool
messages (`atropos.envs.hermes.dialect`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atropos.agent.config import AgentConfig, Outcome
from atropos.agent.model import ChatAnswer
from atropos.agent.prompt import system_text
from atropos.agent.template import TurnRenderer
from atropos.agent.transcript import Message
from atropos.thinking import thinking, unfinished_thinking, without_thinking
from atropos.tools import ToolCall
from atropos.tools.arguments import replace_surrogates
from atropos.tools.parsers import Parsed, ParseError, Parser
from atropos.tools.parsers.shapes import call_shaped, tool_names
from atropos.tools.sandboxed.text import clip_result


@dataclass(frozen=True)
class Turn:
    """A model's turn as a dialect reads it.

    Attributes:
        message: the turn in the conversation.
        ids: the turn's token ids, the end of the turn included.
        text: all that the model wrote.
        answer: its text without calls.
        reasoning: its thinking, if the dialect separates it.
        calls: in order.
        unread: calls that could not be read.
    """

    message: Message
    ids: list[int]
    text: str
    answer: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    unread: tuple[ParseError, ...] = ()


class Dialect(ABC):
    """How messages and turns are written. One object serves any number of trajectories at once.

    Args:
        renderer: of turns as token ids.
        parser: the format of calls in model text.
        schemas: OpenAI schemas of the tools that are offered.
    """

    def __init__(self, renderer: TurnRenderer, parser: Parser, schemas: Sequence[Mapping[str, object]]) -> None:
        self._renderer = renderer
        self._parser = parser
        self._schemas = schemas
        self.stop_ids = renderer.stop_ids
        """Tokens that end an assistant's turn: nothing is sampled after one."""

    def _parsed(self, whole: str, reasoning: str = "") -> Parsed:
        """The answer and the calls of a turn, none from its thinking: a call there without an answer is an error.

        `reasoning`: its thinking, where the server has parsed it out.
        """
        parsed = self._parser.parse(without_thinking(whole))
        written = call_shaped(reasoning or unfinished_thinking(whole), tool_names(self._schemas))
        if parsed.calls or parsed.errors or parsed.content or not written:
            return parsed
        message = "not run: calls within <think> are ignored; end it with </think>, then make the call, or answer"
        return replace(parsed, errors=(ParseError(message, written[:500], 0),))

    @abstractmethod
    def opening(self, task: str, config: AgentConfig, *, exact: bool) -> list[Message]:
        """The messages before the first turn; `exact`: the prompt is rendered here, not by the server."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the opening messages, up to where the assistant begins."""
        return self._renderer.prompt(messages)

    @abstractmethod
    def read(self, ids: Sequence[int], *, cut_off: bool) -> Turn:
        """A turn from the ids that a server sampled; `cut_off`: a limit ended it, so that its calls are ignored."""

    @abstractmethod
    def read_answer(self, answer: ChatAnswer, *, cut_off: bool) -> Turn:
        """A turn from a server that reports text; its ids are placeholders."""

    @abstractmethod
    def chat_options(self, config: AgentConfig, limit: int) -> dict[str, object]:
        """Fields of a chat request beside messages and sampling; `limit`: most tokens that the turn may have."""

    @abstractmethod
    def results(self, outcomes: Sequence[Outcome], config: AgentConfig) -> list[Message]:
        """What the model reads of a turn's calls."""

    def following(self, messages: Sequence[Message], sampled: Sequence[int]) -> list[int]:
        """Ids between a turn's last sampled token and the next turn."""
        return self._renderer.following(messages, sampled)


class XmlDialect(Dialect):
    """Tools in the system message; a turn's results as XML in one user message. Calls within `<think>` are ignored."""

    def opening(self, task: str, config: AgentConfig, *, exact: bool) -> list[Message]:  # noqa: ARG002
        """System and user."""
        return [
            {"role": "system", "content": system_text(config.system_prompt, self._schemas, self._parser)},
            {"role": "user", "content": task},
        ]

    def read(self, ids: Sequence[int], *, cut_off: bool) -> Turn:
        """See `Dialect.read`."""
        text = self._renderer.text(ids)
        return self._turn(text, self._renderer.whole_turn(text), list(ids), cut_off=cut_off)

    def read_answer(self, answer: ChatAnswer, *, cut_off: bool) -> Turn:
        """The text, with the calls that the server parsed out of it restored."""
        text = answer.content.removesuffix(self._renderer.end_text)  # left in by trl's server
        if answer.tool_calls:
            text = replace_surrogates(self._parser.render_turn(text, answer.tool_calls))
        whole, ids = self._renderer.whole_answer(text), self._renderer.placeholder(text)
        return self._turn(text, whole, ids, cut_off=cut_off, reasoning=answer.reasoning)

    def _turn(self, text: str, whole: str, ids: list[int], *, cut_off: bool, reasoning: str = "") -> Turn:
        parsed = self._parsed(whole, reasoning)
        message: Message = {"role": "assistant", "content": whole}
        if reasoning:
            message["reasoning_content"] = reasoning
        calls, unread = ((), ()) if cut_off else (parsed.calls, parsed.errors)
        return Turn(message, ids, text, parsed.content, reasoning or thinking(whole), calls, unread)

    def chat_options(self, config: AgentConfig, limit: int) -> dict[str, object]:
        """A limit where one is set: None would go out as null."""
        return {} if config.max_tokens is None else {"max_tokens": limit}

    def results(self, outcomes: Sequence[Outcome], config: AgentConfig) -> list[Message]:
        """All results in one user message, in the order written."""
        texts = (clip_result(outcome.result, config.max_result_chars).to_xml() for outcome in outcomes)
        return [{"role": "user", "content": "\n".join(texts)}]
