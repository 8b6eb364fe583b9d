"""Thinking in `<think>` tags: it is no part of the answer, and no call in it is run. Within a call the tag is text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_THINKING_OR_CALL = re.compile(
    r"<think>(?P<thought>.*?)(?:</think>|\Z)"
    r"|<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>|\Z)"
    r"|<｜tool▁call▁begin｜>.*?(?:<｜tool▁call▁end｜>|\Z)|<\|tool_call_begin\|>.*?(?:<\|tool_call_end\|>|\Z)"
    r"|(?:\[TOOL_CALLS\]|<\|python_(?:tag|start)\|>).*"
    r"|(?:^|(?<=</think>))[ \t]*(?:(?:\[\s*)?\{\s*\"|\[\s*[\w.-]+\().*",
    re.DOTALL | re.MULTILINE,
)
"""Of calls in the formats of `atropos.tools.parsers`; where a format has no end, all that follows belongs to the
call."""
_OPENED = re.compile(r"<think>\s*\Z")


def opening_of(prompt: str) -> str:
    """The tag, with the white space after it, with which a template itself opens the thinking; else empty."""
    opened = _OPENED.search(prompt)
    return opened[0] if opened else ""


def _found(text: str) -> Iterator[re.Match[str]]:
    return (match for match in _THINKING_OR_CALL.finditer(text) if match["thought"] is not None)


def tagged_thinking(text: str) -> str:
    """The thinking in a turn, tags included."""
    return "".join(match[0] for match in _found(text))


def split_thinking(text: str) -> list[tuple[str, bool]]:
    """A turn in pieces without the tags, and which of them are thinking."""
    pieces: list[tuple[str, bool]] = []
    at = 0
    for match in _found(text):
        pieces += [(text[at : match.start()], False), (match["thought"], True)]
        at = match.end()
    return [*pieces, (text[at:], False)]


def thinking(text: str) -> str:
    """The thinking in a turn."""
    return "\n".join(match["thought"].strip() for match in _found(text))


def unfinished_thinking(text: str) -> str:
    """The thinking in which a turn ended, without closing it; empty where it did."""
    last = next((match for match in _found(text) if match.end() == len(text)), None)
    return "" if last is None or last[0].endswith("</think>") else last["thought"]


def without_thinking(text: str) -> str:
    """A turn without its thinking."""
    return (
        "".join(piece for piece, thought in split_thinking(text) if not thought).strip() if "<think>" in text else text
    )
