"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since v11 `[TOOL_CALLS]name[ARGS]{…}`.

Source: the tokenizer formats that Mistral describes for mistral-common, versions 3 to 13.
"""

from __future__ import annotations

import re

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Format, Parsed, dump_json, first_json, read_calls

OPEN = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]{1,200})\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_NEXT = re.compile(r"[\s,;]*(?=\{|\[\s*\{)")
"""What is between a call, or a list of calls, and a further one without a token of its own."""
_CURE = 'write [TOOL_CALLS] [{"name": "tool", "arguments": {"name": "value"}}]'


class MistralParser(Format):
    """A special token, then a list of calls, or a name and its arguments."""

    name = vllm_name = "mistral"

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        return read_calls(text, OPEN, _one)

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return f"{OPEN} [{dump_json({'name': call.name, 'arguments': call.arguments})}]"


def _one(text: str, begin: int, found: Collector) -> int:
    named = _NAMED.match(text, begin)
    at = named.end() if named else begin
    while True:
        try:
            value, end = first_json(text, at)
        except ValueError as error:
            following = text.find(OPEN, at)
            stop = following if following >= 0 else len(text)
            found.error(f"the tool call is not valid JSON ({str(error)[:120]}); {_CURE}", text[at:stop])
            return stop
        if named:
            found.call(named[1], value, text[begin:end])
        else:
            found.json_calls(value, text[at:end], _CURE)
        following = _NEXT.match(text, end)
        if following is None:
            return end
        at, named = following.end(), None


PARSERS = (MistralParser(),)
