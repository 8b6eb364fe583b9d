"""What looks like a tool call in any format, in a turn in which its own format finds none."""

from __future__ import annotations

import re

_QUOTED = r"[\"'][^\"'\s]{1,64}[\"']"
_SHAPES = re.compile(
    r"(?<!`)(?:"  # a tag in inline code is a mention, not a call
    r"<(?:[\w-]+:)?(?:tool|function)[_-]?calls?(?:\s[^<>]{0,200})?>"  # Hermes, Qwen, GLM, MiniMax, Seed
    r"|<function\s?=\s?[\w.-]|<(?:invoke|function)\s+name="  # Qwen3-Coder, Llama's own functions; MiniMax
    r"|<[|｜](?:DSML｜)?(?:tool|function)[_▁]calls?[\w▁]*[|｜]?>"  # DeepSeek, Kimi, Phi, LFM2
    r"|<｜DSML｜invoke"
    r"|\[TOOL_CALLS?\]|<\|python_(?:tag|start)\|>|functools\["  # Mistral; Llama; Phi
    r"|<\|channel\|>commentary\s+to=|\bto=functions\.\w"  # gpt-oss
    r")"
    r"|^```tool_(?:call|code)s?\b"  # Gemma
    r"|^Action:[ \t]*[\w.-]+[ \t]*\n[ \t]*Action Input:"  # ReAct
    # JSON, or a dict of Python, with an object or its text as arguments, and no schema
    rf"|\{{\s*(?:[\"'](?:id|type)[\"']\s*:\s*{_QUOTED}\s*,\s*){{0,2}}"
    rf"[\"'](?:name|tool|tool_name|function)[\"']\s*:\s*{_QUOTED}\s*,\s*"
    r"[\"'](?:arguments|parameters|args|tool_input)[\"']\s*:(?!\s*\{\s*[\"']type[\"']\s*:\s*[\"']object[\"'])(?=\s*(?:[{\"']|\Z))"
    rf"|\{{\s*[\"'](?:arguments|parameters)[\"']\s*:\s*\{{[^{{}}]*\}}\s*,\s*[\"']name[\"']\s*:\s*{_QUOTED}\s*\}}"
    rf"|\{{\s*[\"']action[\"']\s*:\s*{_QUOTED}\s*,\s*[\"']action_input[\"']\s*:"  # LangChain
    r"|\{\s*[\"']type[\"']\s*:\s*[\"']tool_use[\"']\s*,",  # Anthropic
    re.MULTILINE | re.IGNORECASE,
)
_LIST = re.compile(r"^[ \t]*\[\s*[A-Za-z_][\w.-]*\((?:\s*[A-Za-z_]\w*\s*=(?!=)|\s*\)\s*\]\s*\Z)", re.MULTILINE)
"""Llama's list of Python calls, which ends the turn."""


def call_shaped(text: str) -> str:
    """The text from what looks like a call on; empty: nothing does. Takes time linear in the text."""
    match = _SHAPES.search(text) or (_LIST.search(text) if text.rstrip().endswith(")]") else None)
    return text[match.start() :].lstrip() if match else ""
