"""OpenAI's tool messages: how a chat template renders them, and how a model's turn becomes one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from atropos.agent import AgentConfig, Dialect, Message, Outcome, Turn, TurnRenderer
from atropos.agent.model import ChatAnswer
from atropos.agent.prompt import system_text
from atropos.agent.template import Tokenizer
from atropos.thinking import tagged_thinking, thinking, without_thinking
from atropos.tools import ToolCall
from atropos.tools.arguments import BadArguments, parse_object, replace_surrogates
from atropos.tools.models import MAX_CALL_ID, escape_framing
from atropos.tools.parsers import parser_for
from atropos.tools.sandboxed.text import clip_result

_PROBE = "\ue002probe\ue002"
MISTRAL_ID_CHARS = 9
"""Length of a call's id that Mistral's templates insist on."""


def _renders_results(renderer: TurnRenderer, id_chars: int) -> bool:
    """Whether the template has tool messages, with ids of this length."""
    probe = {"role": "tool", "tool_call_id": "a" * id_chars, "name": "t", "content": _PROBE}
    try:
        ids = renderer.following([probe])
    except Exception:  # templates may raise any error
        return False
    return _PROBE in renderer.text(ids)


def _renders_tools(tokenizer: Tokenizer, schemas: Sequence[Mapping[str, object]]) -> bool:
    """Whether the template describes tools; else the system message has to."""
    asked = [{"role": "user", "content": "x"}]
    function = cast("Mapping[str, object]", schemas[0].get("function", schemas[0]))
    first = str(function.get("name"))
    try:
        text = tokenizer.apply_chat_template(asked, tokenize=False, tools=list(schemas), add_generation_prompt=True)
    except Exception:  # templates may raise any error
        return False
    return first in str(text)


def _in_user_message(message: Message) -> str:
    if message["role"] == "tool":
        return f"<tool_response>\n{message['content']}\n</tool_response>"
    return str(message["content"])


class OpenAIDialect(Dialect):
    """Calls are in `tool_calls`, each result is a tool message. Calls within `<think>` are ignored."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        schemas: list[dict[str, object]],
        parser: str,
        *,
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        self._template_describes_tools = bool(schemas) and _renders_tools(tokenizer, schemas)
        renderer = TurnRenderer(tokenizer, schemas if self._template_describes_tools else None)
        super().__init__(renderer, parser_for(parser, tokenizer, schemas), schemas)
        self._id_chars = next((n for n in (MAX_CALL_ID, MISTRAL_ID_CHARS) if _renders_results(renderer, n)), None)
        self._extra_body = dict(extra_body or {})

    def opening(self, task: str, config: AgentConfig, *, exact: bool) -> list[Message]:
        """System, where there is one, and user; an OpenAI-compatible server describes the tools itself."""
        system = config.system_prompt
        if exact and self._schemas and not self._template_describes_tools:
            system = system_text(system, self._schemas, self._parser)
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return [*opening, {"role": "user", "content": task}]

    def read(self, ids: Sequence[int], *, cut_off: bool) -> Turn:
        """The content keeps the thinking, as the model wrote it."""
        text = self._renderer.text(ids)
        whole = self._renderer.whole_turn(text)
        parsed = self._parsed(whole)
        calls = () if cut_off else parsed.calls
        content = f"{tagged_thinking(whole)}{parsed.content}" if calls else whole
        return Turn(
            _assistant(content, calls),
            list(ids),
            text,
            without_thinking(content),
            reasoning=thinking(whole),
            calls=calls,
            unread=() if cut_off else parsed.errors,
        )

    def read_answer(self, answer: ChatAnswer, *, cut_off: bool) -> Turn:
        """The server's calls, or those that it left in the text."""
        content = whole = self._renderer.whole_answer(answer.content)
        parsed = self._parsed(whole, answer.reasoning)
        calls, unread = parsed.calls, parsed.errors
        if answer.tool_calls:
            calls, unread = answer.tool_calls, ()
        elif calls:
            content = f"{tagged_thinking(whole)}{parsed.content}"
        if cut_off:
            calls, unread, content = (), (), whole
        message = _assistant(content, calls)
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        text = replace_surrogates(self._parser.render_turn(content, calls))
        return Turn(
            message,
            self._renderer.placeholder(text),
            text,
            without_thinking(content),
            reasoning=answer.reasoning or thinking(whole),
            calls=calls,
            unread=unread,
        )

    def chat_options(self, config: AgentConfig, limit: int) -> dict[str, object]:
        """Tools for the server to describe, what the context has left, and `extra_body`."""
        options: dict[str, object] = {"max_tokens": limit}
        if self._schemas:
            options["tools"] = self._schemas
        if self._extra_body:
            options["extra_body"] = self._extra_body
        return options

    def results(self, outcomes: Sequence[Outcome], config: AgentConfig) -> list[Message]:
        """A tool message for each call; what could not be read is answered in one user message after them."""
        answers: list[Message] = []
        unread: list[str] = []
        for outcome in outcomes:
            content = escape_framing(replace_surrogates(clip_result(outcome.result, config.max_result_chars).to_json()))
            if (call := outcome.call) is not None:
                answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
            else:
                unread.append(content)
        return [*answers, {"role": "user", "content": "\n".join(unread)}] if unread else answers

    def following(self, messages: Sequence[Message], sampled: Sequence[int]) -> list[int]:
        """Where the template has no tool messages, results are XML in one user message."""
        if self._id_chars is None:
            messages = [{"role": "user", "content": "\n".join(map(_in_user_message, messages))}]
        elif self._id_chars == MISTRAL_ID_CHARS:
            messages = [
                {**m, "tool_call_id": str(m["tool_call_id"])[-MISTRAL_ID_CHARS:].zfill(MISTRAL_ID_CHARS)}
                if m["role"] == "tool"
                else m
                for m in messages
            ]
        return super().following(messages, sampled)


def written_arguments(call: ToolCall) -> str:
    """A call's arguments as text; lone surrogates, which messages can't hold, are replaced."""
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return replace_surrogates(arguments)


def _assistant(content: str, calls: Sequence[ToolCall]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": written_arguments(_with_object(call))},
            }
            for call in calls
        ]
    return message


def _with_object(call: ToolCall) -> ToolCall:
    """The call with an object as arguments; vLLM refuses a conversation, and so the trajectory, with other types."""
    try:
        arguments = parse_object(call.name, call.arguments)
    except BadArguments:
        arguments = {"invalid": call.arguments}
    return call.model_copy(update={"arguments": arguments})
