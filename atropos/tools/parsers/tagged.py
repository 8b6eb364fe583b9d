"""Qwen3-Coder and GLM-4.5: each argument between tags of its own, as plain text.

Text has no types: every value is a string here. The executor reads numbers, lists and objects out of it where the
tool's schema asks for one.

Source: the chat templates that Qwen and Zhipu publish with Qwen3-Coder and GLM-4.5.
"""

from __future__ import annotations

import re

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Parsed, Parser, dump_json, read_calls

_CALL = "<tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]{0,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,200})>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))")
_FUNCTION_END = re.compile(r"\s*(?:</function>\s*(?:</tool_call>)?|</tool_call>)")
_CALL_END = re.compile(r"\s*</tool_call>")
_KEY = re.compile(r"\s*<arg_key>([^<\n]{1,200})</arg_key>\s*<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")


class Qwen3CoderParser(Parser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

    name = "qwen3_coder"

    def parse(self, text: str) -> Parsed:
        """Take the calls out of a turn."""
        found = Collector()
        at = 0
        while True:
            match = _FUNCTION.search(text, at)
            if match is None:
                rest = text[at:]
                if rest.strip() == "<tool_call>":
                    found.error("the tool call was cut off before its <function=name>", rest)
                else:
                    found.text(rest)
                return found.done()
            found.text(re.sub(r"<tool_call>\s*\Z", "", text[at : match.start()]))
            if found.full(text[match.start() : match.start() + 500]):
                return found.done()
            at = self._one(text, match, found)

    def _one(self, text: str, match: re.Match[str], found: Collector) -> int:
        arguments: dict[str, object] = {}
        at = match.end()
        while parameter := _PARAMETER.match(text, at):
            end = _PARAMETER_END.search(text, parameter.end())
            if end is None:
                found.error(
                    f"parameter {parameter[1]!r} is not closed; end it with </parameter>", text[match.start() :]
                )
                return len(text)
            arguments[parameter[1].strip()] = _inside(text[parameter.end() : end.start()])
            at = end.end()
        close = _FUNCTION_END.match(text, at)
        if close is None:
            # Nothing is forgiven here: without its end, a call may lack arguments that were still to come.
            found.error(
                "the tool call is not closed; write <parameter=name>value</parameter> and end with </function>",
                text[match.start() :],
            )
            return _resume(text, at, "<function=")
        found.call(match[1], arguments, text[match.start() : at])
        return close.end()

    def render(self, call: ToolCall) -> str:
        """The call between its tags."""
        given = call.arguments if isinstance(call.arguments, dict) else {}
        rows = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={call.name}>\n{rows}</function>\n</tool_call>"


class Glm45Parser(Parser):
    """`<tool_call>name` and then pairs of `<arg_key>` and `<arg_value>`."""

    name = "glm45"

    def parse(self, text: str) -> Parsed:
        """Take the calls out of a turn."""
        return read_calls(text, _CALL, self._one)

    def _one(self, text: str, at: int, found: Collector) -> int:
        begin = at - len(_CALL)
        ends = [end for end in (text.find("<", at), text.find("\n", at + 1)) if end >= 0]
        stop = min(ends, default=len(text))
        name = text[at:stop].strip()
        if not name and stop < len(text):
            name_match = re.compile(r"\s*([^\s<]{1,200})").match(text, at)
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
            return _resume(text, at, "<tool_call>")
        found.call(name, arguments, text[begin : close.end()])
        return close.end()

    def render(self, call: ToolCall) -> str:
        """The call between its tags."""
        given = call.arguments if isinstance(call.arguments, dict) else {}
        rows = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in given.items()
        )
        return f"<tool_call>{call.name}\n{rows}</tool_call>"


def _resume(text: str, at: int, opening: str) -> int:
    """Where to go on after a wrong call: at its end, or where the next begins."""
    end, following = text.find("</tool_call>", at), text.find(opening, at)
    if end >= 0 and (following < 0 or end < following):
        return end + len("</tool_call>")
    return following if following >= 0 else len(text)


def _inside(value: str) -> str:
    """A value without the line breaks that set it apart from its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else dump_json(value)
