"""How a chat template is told of tools and of what they answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atropos.agent import TurnRenderer
from atropos.agent.prompt import system_text
from atropos.errors import ConfigError

_PROBE = "\ue002probe\ue002"


class Dialect:
    """How a tokenizer's chat template renders tools and tool messages, found out once by trying."""

    def __init__(self, tokenizer: Any, schemas: Sequence[dict[str, Any]], parser: str) -> None:
        plain = TurnRenderer(tokenizer)
        self._own_tools = bool(schemas) and self._tells_tools(tokenizer, schemas)
        self._renderer = TurnRenderer(tokenizer, schemas) if self._own_tools else plain
        self._schemas = [] if self._own_tools else list(schemas)
        self._tool_role = self._takes_tool_messages()
        if self._schemas and parser not in {"hermes", "qwen"}:
            raise ConfigError(
                f"tool_call_parser: the tokenizer's chat template doesn't tell the model of its tools, and only the "
                f"hermes format can be described without it, not {parser!r}; use its own tokenizer, or hermes"
            )

    @staticmethod
    def _tells_tools(tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> bool:
        asked = [{"role": "user", "content": "x"}]
        first = str(schemas[0].get("function", schemas[0]).get("name"))
        try:
            text = tokenizer.apply_chat_template(asked, tokenize=False, tools=list(schemas), add_generation_prompt=True)
        except Exception:  # a template may refuse in any way
            return False
        return first in str(text)

    def _takes_tool_messages(self) -> bool:
        probe = {"role": "tool", "tool_call_id": "a", "name": "t", "content": _PROBE}
        try:
            ids = self._renderer.following([probe])
        except Exception:  # a template may refuse in any way
            return False
        return _PROBE in self._renderer.text(ids)

    def system(self, prompt: str | None) -> str | None:
        """The system message: with the tools in it, where the template doesn't tell them."""
        return system_text(prompt, self._schemas) if self._schemas else prompt

    def opening(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the first messages."""
        return self._renderer.prompt(messages)

    def following(self, messages: Sequence[dict[str, Any]], sampled: Sequence[int]) -> list[int]:
        """Ids of what is said between two turns. Where the template has no tool messages, users say it in XML."""
        if not self._tool_role:
            messages = [
                {"role": "user", "content": f"<tool_response>\n{m['content']}\n</tool_response>"}
                if m["role"] == "tool"
                else m
                for m in messages
            ]
        return self._renderer.following(messages, sampled)

    def text(self, ids: Sequence[int]) -> str:
        """What the model said, without the token that ended its turn."""
        return self._renderer.text(ids)

    def placeholder(self, text: str) -> list[int]:
        """Ids of a turn whose real ones nobody told."""
        return [*self._renderer.encode_text(text), self._renderer.end_id]
