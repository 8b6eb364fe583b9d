"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Source: the Hermes function-calling format as NousResearch publishes it; Qwen 2.5 and 3 write the same.
"""

from __future__ import annotations

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Parsed, Parser, dump_json, first_json, index_after, read_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CURE = 'write <tool_call>{"name": "tool", "arguments": {"name": "value"}}</tool_call>'


class HermesParser(Parser):
    """JSON between tags. A tag within a JSON string is text; an end tag may be missing where the JSON is complete."""

    def __init__(self, name: str = "hermes") -> None:
        self.name = name

    def parse(self, text: str) -> Parsed:
        """See `Parser`."""
        return read_calls(text, OPEN, _one)

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return f"{OPEN}\n{dump_json({'name': call.name, 'arguments': call.arguments})}\n{CLOSE}"


def _one(text: str, begin: int, found: Collector) -> int:
    try:
        value, end = first_json(text, begin)
    except ValueError as error:
        stop = index_after(text, begin, OPEN, CLOSE)
        what = "is not valid JSON" if stop < len(text) or text.endswith(CLOSE) else "was cut off"
        found.error(f"the tool call {what} ({str(error)[:120]}); {_CURE}", text[begin:stop].removesuffix(CLOSE))
        return stop
    found.json_calls(value, text[begin:end], _CURE)
    return _after(text, end)


def _after(text: str, end: int) -> int:
    """The index after a call's end tag; stray brackets before the tag are ignored."""
    close = end
    while close < len(text) and text[close] in " \t\r\n}`,;":
        close += 1
    return close + len(CLOSE) if text.startswith(CLOSE, close) else end
