"""What looks like a tool call in any format, in a turn in which its own format finds none."""

from __future__ import annotations

import re

_SHAPES = re.compile(
    r"(?<!`)(?:"  # a tag in inline code is a mention, not a call
    r"<(?:[\w-]+:)?(?:tool|function)[_-]?calls?>"  # Hermes, Qwen, GLM, and in name spaces MiniMax and Seed
    r"|<function=[\w.-]|<invoke\s+name="  # Qwen3-Coder, Llama's own functions; MiniMax
    r"|<[|｜](?:DSML｜)?(?:tool|function)[_▁]calls?[\w▁]*[|｜]?>"  # DeepSeek, Kimi, Phi, LFM2
    r"|<｜DSML｜invoke"
    r"|\[TOOL_CALLS?\]|<\|python_(?:tag|start)\|>|functools\["  # Mistral; Llama; Phi
    r"|<\|channel\|>commentary\s+to=|\bto=functions\.\w"  # gpt-oss
    r")"
    r"|^```tool_(?:call|code)s?\b"  # Gemma
    r"|^Action:[ \t]*[\w.-]+[ \t]*\n[ \t]*Action Input:"  # ReAct
    r"|\{\s*\"(?:name|tool|tool_name|function)\"\s*:\s*\"[^\"\s]{1,64}\"\s*,\s*"
    r"\"(?:arguments|parameters|args|tool_input)\"\s*:(?!\s*\{\s*\"type\"\s*:\s*\"object\")",  # JSON, no schema
    re.MULTILINE | re.IGNORECASE,
)
_LIST = re.compile(r"^[ \t]*\[\s*[A-Za-z_][\w.-]*\((?:\s*[A-Za-z_]\w*\s*=(?!=)|\s*\)\s*\]\s*\Z)", re.MULTILINE)
"""Llama's list of Python calls, which ends the turn."""


def call_shaped(text: str) -> str:
    """The text from what looks like a call on; empty: nothing does. Takes time linear in the text."""
    match = _SHAPES.search(text) or (_LIST.search(text) if text.rstrip().endswith(")]") else None)
    return text[match.start() :].lstrip() if match else ""
