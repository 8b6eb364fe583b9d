"""Qwen3-Coder and GLM-4.5: each argument between tags of its own, as plain text.

Plain text has no types, so every value is a string here. The executor parses it where the tool's schema has another
type.

Source: the chat templates that Qwen and Zhipu publish with Qwen3-Coder and GLM-4.5.
"""

from __future__ import annotations

import re

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Format, Parsed, dump_json, index_after, read_calls

_CALL, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]{0,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,200})>")
_PARAMETER_END = re.compile(
    r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))"
    # a missing one, which vLLM accepts, unless one comes later: a file that is written may hold a whole call
    r"|\n(?=<parameter=[^>\n]{1,200}>\n|</function>\s*</tool_call>(?!\s*</parameter>))"
)
_OPENED_OR_ENDED = re.compile(
    r"(?P<opened><function=[^>\n]{1,200}>(?=\s*(?:<parameter=|</function>)))|(?P<closed></function>)"
    rf"|{_PARAMETER_END.pattern}"
)
_FUNCTION_END = re.compile(r"\s*(?:</function>\s*(?:</tool_call>)?|</tool_call>)")
_CALL_END = re.compile(r"\s*</tool_call>")
_NAME = re.compile(r"\s*([^\s<]{1,200})")
_KEY = re.compile(r"\s*<arg_key>([^<\n]{1,200})</arg_key>\s*<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")


class Qwen3CoderParser(Format):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

    name = vllm_name = "qwen3_coder"

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        collector = Collector()
        at = 0
        while match := _FUNCTION.search(text, at):
            _between(text[at : match.start()], collector)
            if collector.full(text[match.start() : match.start() + 500]):
                return collector.done()
            at = self._one(text, match, collector)
        _between(text[at:], collector)
        return collector.done()

    def _one(self, text: str, match: re.Match[str], found: Collector) -> int:
        arguments: dict[str, object] = {}
        at, balanced = match.end(), True
        while parameter := _PARAMETER.match(text, at):
            # where calls in a value have no end, they are looked for once only: the time stays linear
            end = _end_outside_calls(text, parameter.end()) if balanced else None
            balanced = end is not None
            end = end or _PARAMETER_END.search(text, parameter.end())
            if end is None:
                found.error(
                    f"parameter {parameter[1]!r} is not closed; end it with </parameter>", text[match.start() :]
                )
                return len(text)
            value = text[parameter.end() : end.start()]
            at, key = end.end(), parameter[1].strip()
            if key in arguments:
                found.error(f"parameter {key!r} is there twice; write each once", text[match.start() :])
                return index_after(text, at, "<function=", _CLOSE)
            arguments[key] = value.removeprefix("\n").removesuffix("\n")
        close = _FUNCTION_END.match(text, at)
        if close is None:
            # An error even where the call looks complete: more arguments may have been meant.
            found.error(
                "the tool call is not closed; write <parameter=name>value</parameter> and end with </function>",
                text[match.start() :],
            )
            return index_after(text, at, "<function=", _CLOSE)
        found.call(match[1], arguments, text[match.start() : at])
        return close.end()

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        arguments = call.arguments if isinstance(call.arguments, dict) else {}
        rows = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{rows}</function>\n</tool_call>"


def _end_outside_calls(text: str, at: int) -> re.Match[str] | None:
    """The end of the value that begins there, which may hold whole calls; None: each end is a part of one."""
    depth = 0
    for match in _OPENED_OR_ENDED.finditer(text, at):
        if match.lastgroup == "opened":
            depth += 1
        elif match.lastgroup == "closed":
            depth = max(0, depth - 1)
        elif not depth:
            return match
    return None


def _between(text: str, found: Collector) -> None:
    """Text before, between and after functions. A call of another kind in the tags, as JSON, is an error."""
    before, *tagged = text.split(_CALL)
    found.text(before)
    for piece in tagged:
        inner, _, after = piece.partition(_CLOSE)
        found.error(
            "the tool call has no <function=name>; write <tool_call><function=tool><parameter=name>value</parameter>"
            "</function></tool_call>",
            f"{_CALL}{inner}",
        )
        found.text(after)


class Glm45Parser(Format):
    """`<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`."""

    name = vllm_name = "glm45"

    def read(self, text: str) -> Parsed:
        """See `Format`."""
        return read_calls(text, _CALL, self._one)

    def _one(self, text: str, at: int, found: Collector) -> int:
        begin = at - len(_CALL)
        ends = [end for end in (text.find("<", at), text.find("\n", at + 1)) if end >= 0]
        stop = min(ends, default=len(text))
        name = text[at:stop].strip()
        if not name and stop < len(text):
            name_match = _NAME.match(text, at)
            name, stop = (name_match[1], name_match.end()) if name_match else ("", stop)
        arguments: dict[str, object] = {}
        at = stop
        while key := _KEY.match(text, at):
            end = _VALUE_END.search(text, key.end())
            if end is None:
                found.error(f"the value of {key[1]!r} is not closed; end it with </arg_value>", text[begin:])
                return len(text)
            arguments[key[1].strip()] = text[key.end() : end.start()]
            at = end.end()
        close = _CALL_END.match(text, at)
        if close is None:
            found.error(
                "the tool call is not closed; write <tool_call>name, then <arg_key>key</arg_key> and "
                "<arg_value>value</arg_value> pairs, and end with </tool_call>",
                text[begin:],
            )
            return index_after(text, at, _CALL, _CLOSE)
        found.call(name, arguments, text[begin : close.end()])
        return close.end()

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        arguments = call.arguments if isinstance(call.arguments, dict) else {}
        rows = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{call.name}\n{rows}</tool_call>"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else dump_json(value)


PARSERS = (Qwen3CoderParser(), Glm45Parser())
