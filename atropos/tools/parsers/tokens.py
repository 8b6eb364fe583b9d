"""DeepSeek V3 and V3.1, and Kimi K2: calls between special tokens, arguments as JSON.

Source: the chat templates that DeepSeek and Moonshot publish with their models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from atropos.tools.arguments import replace_surrogates
from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Format, Parsed, dump_json, first_json, index_after, read_calls, skip

_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n?")
_FENCE_END = re.compile(r"\s*```")
_KIMI_INDEX = re.compile(r":\d+\Z")


class TokenParser(Format):
    """The shared part of the formats; subclasses know the special tokens, and where the name is."""

    begin_all: str
    end_all: str
    begin: str
    middle: str
    end: str

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        parsed = read_calls(text, self.begin, self._one)
        content = parsed.content.replace(self.begin_all, "").replace(self.end_all, "")
        return replace(parsed, content=content.strip())

    def _one(self, text: str, begin: int, found: Collector) -> int:
        middle = text.find(self.middle, begin, begin + 1000)
        if middle < 0:
            found.error(f"the tool call has no {self.middle} after its name", text[begin:])
            return index_after(text, begin, self.begin, self.end)
        head = text[begin:middle]
        try:
            name, value, end, identity = self._read(text, head, middle + len(self.middle))
        except ValueError as error:
            found.error(f"the tool call's arguments are not valid JSON ({str(error)[:120]})", text[begin:])
            return index_after(text, begin, self.begin, self.end)
        found.call(name, value, text[begin:end], identity)
        close = skip(text, end)
        return close + len(self.end) if text.startswith(self.end, close) else end

    def _read(self, text: str, head: str, at: int) -> tuple[str, object, int, str]:
        """The name, the arguments, their end, and the call's id where the format has one.

        `head` is the text before the middle token, `at` the index after it.
        """
        value, end = first_json(text, at)
        return head.strip(), value, end, ""

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See `Parser`."""
        inner = "".join(self._render_one(call, index) for index, call in enumerate(calls))
        return content + (f"{self.begin_all}{inner}{self.end_all}" if inner else "")

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return self.render_turn("", [call])

    def _render_one(self, call: ToolCall, index: int) -> str:
        del index
        return f"{self.begin}{call.name}{self.middle}{dump_json(call.arguments)}{self.end}"


class DeepSeekV31Parser(TokenParser):
    """V3.1: name, separator, JSON."""

    name = "deepseek_v3_1"
    vllm_name = "deepseek_v31"
    begin_all, end_all = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    begin, middle, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3Parser(DeepSeekV31Parser):
    """V3 and R1: the word `function`, separator, name, and the JSON in a code block."""

    name = vllm_name = "deepseek_v3"

    def _read(self, text: str, head: str, at: int) -> tuple[str, object, int, str]:
        """The name comes after the separator, on the same line."""
        del head
        ends = [end for end in (text.find("\n", at), text.find("```", at), text.find("{", at)) if end >= 0]
        stop = min(ends, default=-1)
        if stop < 0:
            raise ValueError("the arguments are missing")
        fence = _FENCE.match(text, stop)
        value, end = first_json(text, fence.end() if fence else stop)
        close = _FENCE_END.match(text, end) if fence else None
        return text[at:stop].strip(), value, close.end() if close else end, ""

    def _render_one(self, call: ToolCall, index: int) -> str:
        del index
        return f"{self.begin}function{self.middle}{call.name}\n```json\n{dump_json(call.arguments)}\n```{self.end}"


class KimiK2Parser(TokenParser):
    """Kimi K2: the id `functions.name:index` takes the name's place.

    Kimi's template names a result by it. Models may repeat it from turn to turn; the agent runs each call under an id
    of its own.
    """

    name = vllm_name = "kimi_k2"
    begin_all, end_all = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def _read(self, text: str, head: str, at: int) -> tuple[str, object, int, str]:
        """The name within the id, which is as the model wrote it."""
        value, end = first_json(text, at)
        head = replace_surrogates(head.strip())
        identity = head if _KIMI_INDEX.search(head) and "<" not in head else ""
        return _KIMI_INDEX.sub("", head.removeprefix("functions.")), value, end, identity

    def _render_one(self, call: ToolCall, index: int) -> str:
        head = f"functions.{call.name}:{index}"
        return f"{self.begin}{head}{self.middle}{dump_json(call.arguments)}{self.end}"


PARSERS = (DeepSeekV3Parser(), DeepSeekV31Parser(), KimiK2Parser())
