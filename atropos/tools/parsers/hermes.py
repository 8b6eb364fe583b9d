"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Source: the Hermes function-calling format as NousResearch publishes it; Qwen 2.5 and 3 write the same.
"""

from __future__ import annotations

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Format, Parsed, dump_json, first_json, index_after, read_calls, skip

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_STRAY = " \t\r\n}]`,;"
"""What models write between a call and the next one or the end tag."""
_CURE = 'write <tool_call>{"name": "tool", "arguments": {"name": "value"}}</tool_call>'


class HermesParser(Format):
    """JSON between tags. A tag within a JSON string is text; an end tag may be missing where the JSON is complete."""

    vllm_name = "hermes"

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        return read_calls(text, OPEN, _one)

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return f"{OPEN}\n{dump_json({'name': call.name, 'arguments': call.arguments})}\n{CLOSE}"


def _one(text: str, begin: int, found: Collector) -> int:
    """Read what one tag holds: a call, several, or what is none; returns the index after it."""
    at = end = begin
    while at == begin or text.startswith("{", at):
        try:
            value, end = first_json(text, at)
        except ValueError as error:
            stop = index_after(text, at, OPEN, CLOSE)
            what = "is not valid JSON" if stop < len(text) or text.endswith(CLOSE) else "was cut off"
            found.error(f"the tool call {what} ({str(error)[:120]}); {_CURE}", text[at:stop].removesuffix(CLOSE))
            return stop
        found.json_calls(value, text[at:end], _CURE)
        at = skip(text, end, _STRAY)
    stop = index_after(text, at, OPEN, CLOSE)
    if not text.endswith(CLOSE, at, stop):
        return end  # without an end tag, what follows is text
    if written := text[at:stop].removesuffix(CLOSE):
        found.error(f"a tool call is followed by what is none; {_CURE}", written)
    return stop


PARSERS = (HermesParser("hermes"), HermesParser("qwen"))
