"""What looks like a tool call in any format, in a turn in which its own format finds none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

_QUOTED = r"[\"'][^\"'\s]{1,64}[\"']"
_NAME = r"[\"']([^\"'\s]{1,64})[\"']"
_SCHEMA = (
    r"\{\s*[\"'](?:type[\"']\s*:\s*[\"']object[\"']|\$schema[\"']|properties[\"']\s*:\s*\{|required[\"']\s*:\s*\[)"
)
_SHAPES = re.compile(
    r"(?<!`)(?:"  # a tag in inline code is a mention, not a call
    r"<(?:[\w-]+:)?(?:tool|function)[_-]?calls?(?:\s[^<>]{0,200})?>"  # Hermes, Qwen, GLM, MiniMax, Seed
    r"|<function\s?=\s?[\w.-]|<invoke\s+name="  # Qwen3-Coder, Llama's own functions; MiniMax
    r"|<function\s+name\s?=\s?[\"']?([^\"'\s<>]{1,64})"
    r"|<[|｜](?:DSML｜)?(?:tool|function)[_▁]calls?[\w▁]*[|｜]?>"  # DeepSeek, Kimi, Phi, LFM2
    r"|<｜DSML｜invoke"
    r"|\[TOOL_CALLS?\]|<\|python_(?:tag|start)\|>|functools\["  # Mistral; Llama; Phi
    r"|<\|channel\|>commentary\s+to=|\bto=functions\.\w"  # gpt-oss
    r")"
    r"|^```tool_(?:call|code)s?\b"  # Gemma
    r"|^Action:[ \t]*[\w.-]+[ \t]*\n[ \t]*Action Input:"  # ReAct
    # JSON, or a dict of Python, with an object or its text as arguments, and no schema
    rf"|\{{\s*(?:[\"'](?:id|type)[\"']\s*:\s*{_QUOTED}\s*,\s*){{0,2}}"
    rf"[\"'](?:name|tool|tool_name|function)[\"']\s*:\s*{_NAME}\s*,\s*"
    rf"[\"'](?:arguments|parameters|args|tool_input)[\"']\s*:(?!\s*{_SCHEMA})(?=\s*(?:[{{\"']|\Z))"
    rf"|\{{\s*[\"'](?:arguments|parameters)[\"']\s*:\s*\{{[^{{}}]*\}}\s*,\s*[\"']name[\"']\s*:\s*{_NAME}\s*\}}"
    rf"|\{{\s*[\"']action[\"']\s*:\s*{_NAME}\s*,\s*[\"']action_input[\"']\s*:"  # LangChain
    rf"|\{{\s*[\"']type[\"']\s*:\s*[\"']tool_use[\"']\s*,\s*(?:[\"']id[\"']\s*:\s*{_QUOTED}\s*,\s*)?"  # Anthropic
    rf"[\"']name[\"']\s*:\s*{_NAME}",
    re.MULTILINE | re.IGNORECASE,
)
_PARTS = re.compile(
    r"(\"[^\"\\]*(?:\\.?[^\"\\]*)*(?:\"|\Z)|'[^'\\]*(?:\\.?[^'\\]*)*(?:'|\Z))(\s*:)?|[{}\[\]]", re.DOTALL
)
_CALL_KEYS = frozenset(
    {"id", "type", "name", "tool", "tool_name", "function", "arguments", "parameters", "args"}
    | {"tool_input", "action", "action_input", "input"}
)
_LIST = re.compile(r"^[ \t]*\[\s*[A-Za-z_][\w.-]*\((?:\s*[A-Za-z_]\w*\s*=(?!=)|\s*\)\s*\]\s*\Z)", re.MULTILINE)
"""Llama's list of Python calls, which ends the turn."""


def tool_names(schemas: Iterable[Mapping[str, object]]) -> frozenset[str]:
    """The names of the tools that OpenAI schemas describe."""
    functions = (schema.get("function") for schema in schemas)
    return frozenset(str(one["name"]) for one in functions if isinstance(one, Mapping) and "name" in one)


def call_shaped(text: str, tools: AbstractSet[str] = frozenset()) -> str:
    """The text from what looks like a call on; empty: nothing does. Takes time linear in the text.

    Args:
        text: the text.
        tools: names of the tools that are offered, if known: an object of JSON or Python with another name is none.
            Where none are known, one with other keys than a call's is none.
    """
    at = 0
    while match := _SHAPES.search(text, at):
        name = match[match.lastindex] if match.lastindex else ""
        if tools:
            at = match.end() if name and name not in tools else -1
        else:
            at = _end_of_other(text, match.start()) if match[0].startswith("{") else -1
        if at < 0:
            return text[match.start() :]
    match = _LIST.search(text) if text.rstrip().endswith(")]") else None
    return text[match.start() :].lstrip() if match else ""


def _end_of_other(text: str, start: int) -> int:
    """Where an object ends that has other keys than a call's; -1: it has none."""
    depth, other, at = 0, False, len(text)
    for part in _PARTS.finditer(text, start):
        depth += (part[0] in "{[") - (part[0] in "}]")
        other = other or (depth == 1 and part[2] is not None and part[1][1:-1].lower() not in _CALL_KEYS)
        if not depth:
            at = part.end()
            break
    return at if other else -1
