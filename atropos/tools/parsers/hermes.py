"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Source: the Hermes function-calling format as NousResearch publishes it; Qwen 2.5 and 3 write the same.
"""

from __future__ import annotations

from typing import cast

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Parsed, Parser, dump_json, first_json, read_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_RIGHT = 'write <tool_call>{"name": "tool", "arguments": {"name": "value"}}</tool_call>'


class HermesParser(Parser):
    """JSON between tags. A tag within a JSON string is text; a missing end tag is forgiven where the JSON is whole."""

    def __init__(self, name: str = "hermes") -> None:
        self.name = name

    def parse(self, text: str) -> Parsed:
        """Take the calls out of a turn."""
        return read_calls(text, OPEN, _one)

    def render(self, call: ToolCall) -> str:
        """The call between its tags."""
        arguments: object = call.arguments
        return f"{OPEN}\n{dump_json({'name': call.name, 'arguments': arguments})}\n{CLOSE}"


def _one(text: str, begin: int, found: Collector) -> int:
    """Read the call that begins after its tag; where to go on."""
    try:
        value, end = first_json(text, begin)
    except ValueError as error:
        close, following = text.find(CLOSE, begin), text.find(OPEN, begin)
        ends = [index for index in (close, following) if index >= 0]
        stop = min(ends, default=len(text))
        where = "is not valid JSON" if ends else "was cut off"
        found.error(f"the tool call {where} ({str(error)[:120]}); {_RIGHT}", text[begin:stop])
        return stop + len(CLOSE) if stop == close else stop
    stop = _after(text, end)
    _take(value, text[begin:end], found)
    return stop


def _after(text: str, end: int) -> int:
    """Where the text goes on after a call's JSON: behind its end tag, with stray brackets before it let pass."""
    close = end
    while close < len(text) and text[close] in " \t\r\n}`,;":
        close += 1
    return close + len(CLOSE) if text.startswith(CLOSE, close) else end


def _take(value: object, written: str, found: Collector) -> None:
    for one in cast("list[object]", value) if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            found.error(f"the tool call is no JSON object; {_RIGHT}", written)
            continue
        fields = cast("dict[str, object]", one)
        if isinstance(fields.get("function"), dict):  # OpenAI's nesting
            fields = cast("dict[str, object]", fields["function"])
        arguments = fields.get("arguments", fields.get("parameters"))
        if "name" not in fields:
            found.error(f"the tool call has no name; {_RIGHT}", written)
        else:
            found.call(fields["name"], arguments, written)
