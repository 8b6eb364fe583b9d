"""Llama: 3.1 and later as JSON, 4 (and 3.2) as a Python list of calls.

Source: Meta's published prompt formats for Llama 3.1, 3.2 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import MAX_CALLS, Collector, Format, Parsed, dump_json, first_json, skip
from atropos.tools.parsers.literals import LiteralReader

TAG = "<|python_tag|>"
_START = re.compile(r'^[ \t]*(?=\{\s*"(?:name|type|function|parameters|arguments)")', re.MULTILINE)
_ENDS = re.compile(r"\s*(?:(?:<\|eom_id\|>|<\|eot_id\|>)\s*)?\Z")
_LIST = r"\[\s*(?=[A-Za-z_][\w.-]*\s*\()"
_FIRST_LIST = re.compile(rf"^[ \t]*{_LIST}", re.MULTILINE)
_NEXT_LIST = re.compile(rf"[\s,;]*(?={_LIST})")
_CURE = 'write {"name": "tool", "parameters": {"name": "value"}}'


class Llama3JsonParser(Format):
    """JSON objects, separated by `;`, after `<|python_tag|>` or at the start of a line."""

    name = vllm_name = "llama3_json"

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        collector = Collector()
        tag, begin = text.find(TAG), _first_object(text)
        if tag >= 0 and (begin is None or tag < begin):
            collector.text(text[:tag])
            begin = tag + len(TAG)
        elif begin is not None:
            collector.text(text[:begin])
        else:
            collector.text(text)
            return collector.done()
        at = begin
        while not _ENDS.match(text, at):
            if collector.full(text[at : at + 500]):
                break
            try:
                value, end = first_json(text, at)
            except ValueError as error:
                if at == begin or text[at:].lstrip().startswith("{"):
                    collector.error(f"the tool call is not valid JSON ({str(error)[:120]}); {_CURE}", text[at:])
                else:
                    collector.text(f"\n{text[at:]}")
                break
            collector.json_calls(value, text[at:end], _CURE)
            at = skip(text, end, "; \t\r\n,")
            if text.startswith(TAG, at):
                at += len(TAG)
        return collector.done()

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return dump_json({"name": call.name, "parameters": call.arguments})

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See `Parser`."""
        rendered = "; ".join(self.render(call) for call in calls)
        return "\n".join(part for part in (content, rendered) if part)


def _first_object(text: str) -> int | None:
    """The index of the first line that begins with a call's JSON; text before it is content."""
    for count, match in enumerate(_START.finditer(text)):
        if count == MAX_CALLS:
            return None
        try:
            value, _ = first_json(text, match.start())
        except ValueError:
            if not text[: match.start()].strip():
                return match.start()  # a turn that begins like a call is a malformed call
            continue
        if isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value):
            return match.start()
    return None


class Llama4PythonicParser(Format):
    """`[tool(name="value"), other(n=1)]`, with or without `<|python_start|>` and `<|python_end|>`."""

    name = vllm_name = "llama4_pythonic"

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        collector = Collector()
        tag = text.find("<|python_start|>")
        if tag >= 0:
            begin = tag + len("<|python_start|>")
        else:
            match = _FIRST_LIST.search(text)
            if match is None:
                collector.text(text)
                return collector.done()
            tag = begin = match.start()
        collector.text(text[:tag])
        end = _calls(text, begin, collector)
        while following := _NEXT_LIST.match(text, end):
            end = _calls(text, following.end(), collector)
        rest = text[end:].lstrip()
        for token in ("<|python_end|>", "<|eom_id|>", "<|eot|>", "<|eot_id|>"):
            rest = rest.removeprefix(token).lstrip()
        collector.text(f"\n{rest}" if rest else "")
        return collector.done()

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return self.render_turn("", [call])

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See `Parser`."""
        rendered = f"[{', '.join(_python_call(call) for call in calls)}]" if calls else ""
        return "\n".join(part for part in (content, rendered) if part)


def _calls(text: str, begin: int, found: Collector) -> int:
    reader = LiteralReader(text, begin)
    listed = reader.peek("[")
    if listed:
        reader.at += 1
    try:
        while not (listed and reader.peek("]")):
            if found.full(text[reader.at : reader.at + 500]):
                return len(text)
            start = reader.at
            name, arguments = reader.call()
            found.call(name, arguments, text[start : reader.at])
            if reader.peek(",") or reader.peek(";"):
                reader.at += 1
            elif not listed:
                return reader.at
            elif not reader.peek("]"):
                raise ValueError(f"expected ',' or ']' at {text[reader.at : reader.at + 20]!r}")
    except ValueError as error:
        found.error(f'the tool call is no Python call ({error}); write [tool(name="value")]', text[begin:])
        return len(text)
    reader.at += 1
    return reader.at


def _python_call(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    return f"{call.name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def _python(value: object) -> str:
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{dump_json(key)}: {_python(one)}" for key, one in pairs) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_python(one) for one in cast('list[Any]', value))}]"
    return repr(value)


PARSERS = (Llama3JsonParser(), Llama4PythonicParser())
