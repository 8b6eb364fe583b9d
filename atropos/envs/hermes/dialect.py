"""OpenAI's tool messages: how a chat template renders them, and how a model's turn becomes one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from atropos.agent import AgentConfig, Dialect, Message, Outcome, Turn, TurnRenderer
from atropos.agent.model import ChatAnswer
from atropos.agent.prompt import shorten, system_text
from atropos.agent.template import Tokenizer
from atropos.errors import ConfigError
from atropos.tools import ToolCall
from atropos.tools.arguments import replace_surrogates
from atropos.tools.models import escape_framing
from atropos.tools.parsers import parser_for

_PROBE = "\ue002probe\ue002"
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


class ToolTemplate:
    """How a tokenizer's chat template renders tools and tool messages, probed once."""

    def __init__(self, tokenizer: Tokenizer, schemas: Sequence[Mapping[str, object]], parser: str) -> None:
        plain = TurnRenderer(tokenizer)
        self._own_tools = bool(schemas) and self._renders_tools(tokenizer, schemas)
        self.renderer = TurnRenderer(tokenizer, schemas) if self._own_tools else plain
        self._schemas = [] if self._own_tools else list(schemas)
        self._tool_role = self._renders_tool_messages()
        if self._schemas and parser not in {"hermes", "qwen"}:
            raise ConfigError(
                f"tool_call_parser: the tokenizer's chat template doesn't describe tools, and only the "
                f"hermes format can be described without it, not {parser!r}; use its own tokenizer, or hermes"
            )

    @staticmethod
    def _renders_tools(tokenizer: Tokenizer, schemas: Sequence[Mapping[str, object]]) -> bool:
        asked = [{"role": "user", "content": "x"}]
        function = cast("Mapping[str, object]", schemas[0].get("function", schemas[0]))
        first = str(function.get("name"))
        try:
            text = tokenizer.apply_chat_template(asked, tokenize=False, tools=list(schemas), add_generation_prompt=True)
        except Exception:  # templates raise errors of any kind
            return False
        return first in str(text)

    def _renders_tool_messages(self) -> bool:
        probe = {"role": "tool", "tool_call_id": "a", "name": "t", "content": _PROBE}
        try:
            ids = self.renderer.following([probe])
        except Exception:  # templates raise errors of any kind
            return False
        return _PROBE in self.renderer.text(ids)

    def system(self, prompt: str | None) -> str | None:
        """The system message: with the tools in it, where the template doesn't render them."""
        return system_text(prompt, self._schemas) if self._schemas else prompt

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first messages."""
        return self.renderer.prompt(messages)

    def following(self, messages: Sequence[Message], sampled: Sequence[int]) -> list[int]:
        """Ids between two turns. Where the template has no tool messages, results are XML in user messages."""
        if not self._tool_role:
            messages = [
                {"role": "user", "content": f"<tool_response>\n{m['content']}\n</tool_response>"}
                if m["role"] == "tool"
                else m
                for m in messages
            ]
        return self.renderer.following(messages, sampled)

    def text(self, ids: Sequence[int]) -> str:
        """The model's text, without the token that ended its turn."""
        return self.renderer.text(ids)

    def placeholder(self, text: str) -> list[int]:
        """Ids of a turn for a server that doesn't report them."""
        return self.renderer.placeholder(text)


class OpenAIDialect(Dialect):
    """Calls are in `tool_calls`, each result is a tool message. Calls within `<think>` are ignored.

    Args:
        tokenizer: the model's, with a chat template.
        schemas: OpenAI schemas of the tools that are offered.
        parser: the format of calls in model text.
        extra_body: further fields of a chat request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        schemas: Sequence[Mapping[str, object]],
        parser: str,
        *,
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        self._template = ToolTemplate(tokenizer, schemas, parser)
        self._parser = parser_for(parser, tokenizer, [dict(schema) for schema in schemas])
        self._schemas = list(schemas)
        self._extra_body = dict(extra_body or {})
        self.stop_ids = self._template.renderer.stop_ids

    def opening(self, task: str, config: AgentConfig, *, exact: bool) -> list[Message]:
        """System, where there is one, and user; an OpenAI-compatible server describes the tools itself."""
        system = self._template.system(config.system_prompt) if exact else config.system_prompt
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return [*opening, {"role": "user", "content": task}]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See `Dialect.prompt`."""
        return self._template.opening(messages)

    def read(self, ids: Sequence[int], *, cut_off: bool) -> Turn:
        """The content keeps the thinking, as the model wrote it."""
        text = self._template.text(ids)
        parsed = self._parser.parse(_without_thinking(text))
        calls = () if cut_off else parsed.calls
        thinking = "".join(match[0] for match in _THINK.finditer(text))
        content = f"{thinking}{parsed.content}" if calls else text
        return Turn(
            _assistant(content, calls),
            list(ids),
            text,
            _without_thinking(content),
            reasoning=_thinking(text),
            calls=calls,
            unread=() if cut_off else parsed.errors,
        )

    def read_answer(self, answer: ChatAnswer, *, cut_off: bool) -> Turn:
        """The server's calls, or those that it left in the text."""
        content = answer.content
        parsed = self._parser.parse(_without_thinking(content))
        calls, unread = parsed.calls, parsed.errors
        if answer.tool_calls:
            calls, unread = tuple(call.tool_call() for call in answer.tool_calls), ()
        elif calls:
            content = parsed.content
        if cut_off:
            calls, unread, content = (), (), answer.content
        message = _assistant(content, calls)
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        text = self._parser.render_turn(content, calls)
        return Turn(
            message,
            self._template.placeholder(text),
            text,
            _without_thinking(content),
            reasoning=answer.reasoning or _thinking(answer.content),
            calls=calls,
            unread=unread,
        )

    def chat_options(self, config: AgentConfig, limit: int) -> dict[str, object]:
        """Tools for the server to describe, the env's limit of a generation, and `extra_body`."""
        options: dict[str, object] = {"max_tokens": config.context_tokens}
        if self._schemas:
            options["tools"] = self._schemas
        if self._extra_body:
            options["extra_body"] = self._extra_body
        return options

    def results(self, outcomes: Sequence[Outcome], config: AgentConfig) -> list[Message]:
        """A tool message for each call; what could not be read is answered in user messages after them."""
        answers: list[Message] = []
        unread: list[Message] = []
        for outcome in outcomes:
            content = escape_framing(replace_surrogates(shorten(outcome.result, config.max_result_chars).to_json()))
            if (call := outcome.call) is not None:
                answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
            else:
                unread.append({"role": "user", "content": content})
        return [*answers, *unread]

    def following(self, messages: Sequence[Message], sampled: Sequence[int]) -> list[int]:
        """See `Dialect.following`."""
        return self._template.following(messages, sampled)


def written_arguments(call: ToolCall) -> str:
    """A call's arguments as text; lone surrogates, which messages can't hold, are replaced."""
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return replace_surrogates(arguments)


def _assistant(content: str, calls: Sequence[ToolCall]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written_arguments(call)}}
            for call in calls
        ]
    return message


def _thinking(text: str) -> str:
    return "\n".join(part.strip() for part in _THINK.findall(text))


def _without_thinking(text: str) -> str:
    return _THINK.sub("", text).strip() if "<think>" in text else text
